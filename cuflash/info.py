"""What is on this machine, for bug reports and for a first look: `cuflash.info()`."""

from __future__ import annotations

import importlib.util
import os
import platform
from dataclasses import dataclass

_PACKAGES = ("cuflash", "numpy", "cupy-cuda12x", "cupy-cuda13x", "torch", "jax", "ml-dtypes")


@dataclass(frozen=True)
class Info:
    """Versions, GPUs and the kernel cache; str() is a small report."""

    python: str
    packages: dict[str, str]
    gpus: tuple[str, ...]
    cuda: str
    cache: str

    def __str__(self) -> str:
        lines = [f"python      {self.python}"]
        lines += [f"{name:<11} {version}" for name, version in self.packages.items()]
        lines += [f"gpu {i}       {name}" for i, name in enumerate(self.gpus)]
        lines += [] if self.gpus else ["gpu         none that CuPy can use: calls on NumPy arrays"]
        return "\n".join([*lines, f"cuda        {self.cuda}", f"kernels     {self.cache}"])


def info() -> Info:
    """Versions of what cuflash uses, the GPUs, and where compiled kernels are kept.

    CuPy is imported if it is installed; nothing is compiled.

    Returns
    -------
    Info : fields python, packages, gpus, cuda, cache; str() is the report
    """
    from importlib import metadata  # slow to import: it brings email and socket

    packages = {}
    for name in _PACKAGES:
        try:
            packages[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    gpus, cuda = _cuda()
    cache = os.environ.get("CUPY_CACHE_DIR", os.path.join("~", ".cupy", "kernel_cache"))
    return Info(platform.python_version(), packages, gpus, cuda, f"{cache} (CUPY_CACHE_DIR)")


def _cuda() -> tuple[tuple[str, ...], str]:
    if importlib.util.find_spec("cupy") is None:
        return (), "CuPy is not installed: pip install 'cuflash[cuda13]' or 'cuflash[cuda12]'"
    from cuflash.arrays.cupy import load_cupy

    try:
        cupy = load_cupy()
        if not cupy.is_available():
            return (), "CuPy finds no GPU or no driver"
        runtime = cupy.cuda.runtime
        gpus = []
        for index in range(runtime.getDeviceCount()):
            properties = runtime.getDeviceProperties(index)
            gpus.append(
                f"{properties['name'].decode()}, compute capability {properties['major']}."
                f"{properties['minor']}, {properties['totalGlobalMem'] / 2**30:.0f} GiB"
            )
        driver, nvrtc = runtime.driverGetVersion(), cupy.cuda.nvrtc.getVersion()
    except Exception as error:  # a broken driver must not hide the rest of the report
        return (), f"CuPy does not work here: {error}"
    return tuple(
        gpus
    ), f"driver {driver // 1000}.{driver % 1000 // 10}, NVRTC {nvrtc[0]}.{nvrtc[1]}"
