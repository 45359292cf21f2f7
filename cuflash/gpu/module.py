"""From a CUDA text to loaded kernels: compiled by CuPy with NVRTC, once a device and text.

Compiled kernels lie in CuPy's cache folder, `$CUPY_CACHE_DIR` or `~/.cupy/kernel_cache`, so that a
second process compiles nothing. Where that folder cannot be written, kernels are compiled again in
each process, after one warning; no lock is ever taken on the file system.
"""

from __future__ import annotations

import threading
import warnings
from collections import defaultdict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any

from cuflash.arrays.cupy import on_device

_lock = threading.Lock()
_text_locks: defaultdict[tuple[int, str], threading.Lock] = defaultdict(threading.Lock)
_loaded: dict[tuple[int, str], dict[str, Any]] = {}


@cache
def device_limits(index: int) -> tuple[int, int]:
    """Compute capability (90 is 9.0) of a GPU, and the shared memory that a block may have."""
    import cupy

    device = cupy.cuda.Device(index)
    return int(device.compute_capability), device.attributes["MaxSharedMemoryPerBlockOptin"]


@cache
def multiprocessors(index: int) -> int:
    """How many SMs a GPU has."""
    import cupy

    return int(cupy.cuda.Device(index).attributes["MultiProcessorCount"])


def load_all(
    units: Sequence[tuple[str, Sequence[str]]], options: tuple[str, ...], shared_bytes: int,
    device: int,
) -> dict[str, Any]:  # fmt: skip
    """The kernels of several texts, which are compiled side by side: NVRTC runs in parallel."""
    if all((device, text) in _loaded for text, _ in units) or len(units) == 1:
        found = [load(text, names, options, shared_bytes, device) for text, names in units]
    else:

        def work(unit: tuple[str, Sequence[str]]) -> dict[str, Any]:
            with on_device(device):
                return load(*unit, options, shared_bytes, device)

        with ThreadPoolExecutor(len(units)) as pool:
            found = list(pool.map(work, units))
    return {name: function for functions in found for name, function in functions.items()}


def load(
    text: str, kernels: Sequence[str], options: tuple[str, ...], shared_bytes: int, device: int
) -> dict[str, Any]:
    """The kernels of a text on a device, as CuPy functions; compiled at most once a process.

    The device has to be the current one. Kernels may use `shared_bytes` of dynamic shared memory.
    """
    key = device, text
    if key in _loaded:
        return _loaded[key]
    with _lock:
        text_lock = _text_locks[key]
    with text_lock:
        if key not in _loaded:
            _loaded[key] = _load(text, kernels, options, shared_bytes, device)
    return _loaded[key]


def _load(
    text: str, kernels: Sequence[str], options: tuple[str, ...], shared_bytes: int, device: int
) -> dict[str, Any]:
    import cupy

    _check_driver(cupy)
    arch = device_limits(device)[0]
    if arch <= _newest_of_cupy(cupy):
        try:
            module = cupy.RawModule(code=text, options=options)
            module.compile()
            functions = {name: module.get_function(name).kernel for name in kernels}
        except OSError as error:  # the cache folder is read-only or full
            _warn(f"the kernel cache cannot be written ({error}); each process compiles again")
            functions = _in_memory(cupy, text, kernels, options, f"-arch=sm_{arch}")
    elif arch in cupy.cuda.nvrtc.getSupportedArchs():
        _warn(f"CuPy does not know compute capability {arch / 10}; each process compiles again")
        functions = _in_memory(cupy, text, kernels, options, f"-arch=sm_{arch}")
    else:
        newest = max(cupy.cuda.nvrtc.getSupportedArchs())
        version = ".".join(map(str, cupy.cuda.nvrtc.getVersion()))
        _warn(
            f"NVRTC {version} does not know compute capability {arch / 10}: in each process the "
            f"driver translates PTX for {newest / 10}. A newer NVRTC compiles for this GPU"
        )
        functions = _in_memory(cupy, text, kernels, options, f"-arch=compute_{newest}")
    for function in functions.values():
        _allow_shared(function, shared_bytes)
    return functions


def _in_memory(
    cupy: Any, text: str, kernels: Sequence[str], options: tuple[str, ...], arch: str
) -> dict[str, Any]:
    """Compile and load without any file."""
    nvrtc = cupy.cuda.nvrtc
    program = nvrtc.createProgram(text, "cuflash.cu", (), ())
    try:
        try:
            nvrtc.compileProgram(program, (*options, arch, "-ftz=true"))
        except nvrtc.NVRTCError as error:
            raise RuntimeError(f"NVRTC: {error}\n{nvrtc.getProgramLog(program)}") from error
        cubin = "sm_" in arch
        binary = nvrtc.getCUBIN(program) if cubin else nvrtc.getPTX(program)
    finally:
        nvrtc.destroyProgram(program)
    module = cupy.cuda.function.Module()
    module.load(binary)
    return {name: module.get_function(name) for name in kernels}


def _allow_shared(function: Any, shared_bytes: int) -> None:
    """Allow the dynamic shared memory now, not in a launch that a graph may be capturing."""
    if shared_bytes > 48 << 10:
        from cupy.cuda import driver

        attribute = driver.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        driver.funcSetAttribute(function.ptr, attribute, shared_bytes)


def _newest_of_cupy(cupy: Any) -> int:
    """The newest arch that CuPy asks NVRTC for; for a newer GPU it would compile for this one."""
    version = cupy.cuda.nvrtc.getVersion()
    if version >= (12, 9):
        return 121
    return 120 if version >= (12, 8) else 90


def _check_driver(cupy: Any) -> None:
    """What a newer major version of NVRTC compiles, an older driver cannot load."""
    nvrtc = cupy.cuda.nvrtc.getVersion()
    driver = cupy.cuda.runtime.driverGetVersion()
    if nvrtc[0] > driver // 1000:
        raise RuntimeError(
            f"NVRTC is of CUDA {nvrtc[0]}.{nvrtc[1]}, the driver of CUDA {driver // 1000}."
            f"{driver % 1000 // 10}: update the driver, or install cuflash[cuda{driver // 1000}]"
        )


def _warn(message: str) -> None:
    warnings.warn(f"cuflash: {message}", RuntimeWarning, stacklevel=2)
