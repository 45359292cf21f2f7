"""The machine under test: arrays, a clock, a cache to flush, what it is and what it can do.

Times on a GPU are taken by CUDA events on the null stream, which CuPy and PyTorch share; a buffer
larger than the L2 cache is written before each call, outside the events, so no call finds its
inputs in the cache, and the writing hides the host's time of the launch.
"""

from __future__ import annotations

import datetime
import gc
import math
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np

REPOSITORY = Path(__file__).resolve().parent.parent
PACKAGES = ("numpy", "cupy-cuda12x", "cupy-cuda13x", "torch", "triton", "jax", "ml_dtypes")


class Machine:
    """A CPU, with NumPy arrays."""

    xp: Any = np
    kind = "cpu"

    def __init__(self) -> None:
        self._flush = np.zeros(2**23)  # 64 MiB, larger than most caches

    @property
    def name(self) -> str:
        for line in _read("/proc/cpuinfo").splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
        return platform.processor() or platform.machine()

    @property
    def label(self) -> str:
        """The name of the file of results."""
        return "cpu"

    def normal(self, rng: np.random.Generator, shape: tuple[int, ...], dtype: str) -> Any:
        """Random numbers around 0, from the same generator on every machine."""
        return rng.standard_normal(shape, dtype=np.float32).astype(dtype_of(dtype))

    def poison(self, sizes: list[int]) -> None:
        """Fill memory of these sizes with NaN and free it, for outputs to come from."""
        for size in sizes:
            np.full(size, 255, np.uint8)

    def flush(self) -> None:
        self._flush += 1

    def release(self) -> None:
        """Give back memory that libraries keep for later."""
        gc.collect()

    def synchronize(self) -> None:
        pass

    def timed(self, call: Callable[[], Any]) -> Callable[[], float]:
        """Run a call between two marks; the returned function says how many ms it took."""
        start = time.perf_counter()
        call()
        elapsed = (time.perf_counter() - start) * 1e3
        return lambda: elapsed

    def header(self) -> dict[str, Any]:
        """What a reader needs to know to trust or repeat the numbers."""
        return {
            "machine": self.name,
            "python": platform.python_version(),
            "packages": {name: version for name in PACKAGES if (version := _version(name))},
            "commit": _commit(),
            "command": " ".join(["python -m bench", *sys.argv[1:]]),
            "date": datetime.date.today().isoformat(),
        }

    def matmul_size(self, dtype: str) -> int:
        return 1024

    def copy_bytes(self) -> int:
        return 2**27

    def matmul_rate(self, dtype: str) -> float:
        """TFLOP/s of this machine's own matrix product in a dtype, on random numbers."""
        n = self.matmul_size(dtype)
        rng = np.random.default_rng(0)
        a, b = (self.normal(rng, (n, n), dtype) for _ in range(2))
        return 2 * n**3 / self.median(lambda: a @ b, 9) / 1e9

    def copy_rate(self) -> float:
        """GB/s of a large copy within this machine's memory, bytes read plus bytes written."""
        a = self.xp.ones(self.copy_bytes(), np.uint8)
        b = self.xp.empty_like(a)
        return 2 * a.nbytes / self.median(lambda: self.xp.copyto(b, a), 9) / 1e6

    def median(self, call: Callable[[], Any], repeats: int) -> float:
        """Median ms of a call after two warm ones."""
        for _ in range(2):
            call()
        self.synchronize()
        marks = [self.timed(call) for _ in range(repeats)]
        self.synchronize()
        return statistics.median(mark() for mark in marks)


class Gpu(Machine):
    """An NVIDIA GPU, with CuPy arrays."""

    kind = "cuda"

    def __init__(self) -> None:
        import cupy

        self.xp = cupy
        self._device = cupy.cuda.Device()
        cache = self._device.attributes["L2CacheSize"]
        self._flush = cupy.zeros(max(4 * cache, 2**28), np.uint8)

    @property
    def name(self) -> str:
        return self.xp.cuda.runtime.getDeviceProperties(self._device.id)["name"].decode()

    @property
    def label(self) -> str:
        return self.name.removeprefix("NVIDIA ").lower().replace(" ", "-")

    def normal(self, rng: np.random.Generator, shape: tuple[int, ...], dtype: str) -> Any:
        values = rng.standard_normal(min(2**24, math.prod(shape)), dtype=np.float32)
        numbers = np.resize(values, shape)  # drawing is what takes the host long
        return self.xp.asarray(numbers).astype(dtype_of(dtype))

    def poison(self, sizes: list[int]) -> None:
        for size in sizes:
            self.xp.full(size, 255, np.uint8)
        torch = self._torch()
        if torch is not None:
            for size in sizes:
                torch.full((size,), 255, dtype=torch.uint8, device="cuda")

    def flush(self) -> None:
        self._flush.fill(0)

    def release(self) -> None:
        super().release()
        self.xp.get_default_memory_pool().free_all_blocks()
        torch = self._torch()
        if torch is not None:
            torch.cuda.empty_cache()

    def _torch(self) -> Any:
        """PyTorch, if a contender has imported it and it was built for this GPU."""
        torch = sys.modules.get("torch")
        return torch if torch is not None and torch.cuda.is_available() else None

    def synchronize(self) -> None:
        self.xp.cuda.runtime.deviceSynchronize()

    def timed(self, call: Callable[[], Any]) -> Callable[[], float]:
        start, end = self.xp.cuda.Event(), self.xp.cuda.Event()
        start.record()
        call()
        end.record()
        return lambda: self.xp.cuda.get_elapsed_time(start, end)

    def header(self) -> dict[str, Any]:
        asked = "driver_version,clocks.sm,clocks.max.sm,clocks.mem,power.limit,temperature.gpu"
        command = ["nvidia-smi", f"--query-gpu={asked}", "--format=csv,noheader", "--id=0"]
        answer = _output(command).split(", ")
        state = dict(zip(asked.split(","), answer)) if len(answer) > 1 else {}
        cuda = self.xp.cuda.runtime.runtimeGetVersion()
        return super().header() | {"cuda": f"{cuda // 1000}.{cuda % 1000 // 10}"} | state

    def matmul_size(self, dtype: str) -> int:
        return 8192 if dtype in ("float16", "bfloat16") else 4096

    def copy_bytes(self) -> int:
        return 2**31

    def matmul_rate(self, dtype: str) -> float:
        # CuPy multiplies bfloat16 slowly or not at all; the tensor cores' float16 rate is the same.
        return super().matmul_rate("float16" if dtype == "bfloat16" else dtype)


def find() -> Machine:
    """The GPU if CuPy sees one, else the CPU."""
    try:
        import cupy
    except ImportError:
        return Machine()
    return Gpu() if cupy.is_available() else Machine()


def dtype_of(name: str) -> np.dtype:
    """The NumPy dtype of this name; bfloat16 comes from ml_dtypes."""
    if name == "bfloat16":
        import ml_dtypes

        return np.dtype(ml_dtypes.bfloat16)
    return np.dtype(name)


def _read(path: str) -> str:
    try:
        return Path(path).read_text()
    except OSError:
        return ""


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _output(command: list[str]) -> str:
    """What a command prints; nothing where it fails or does not exist."""
    try:
        return subprocess.run(
            command, capture_output=True, text=True, check=True, timeout=30, cwd=REPOSITORY
        ).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""


def _commit() -> str:
    """The commit, marked where tracked files differ from it; CUFLASH_COMMIT where git is not."""
    if "CUFLASH_COMMIT" in os.environ:
        return os.environ["CUFLASH_COMMIT"]
    changed = _output(["git", "status", "--porcelain", "--untracked-files=no"])
    return (_output(["git", "rev-parse", "--short", "HEAD"]) or "unknown") + "+" * bool(changed)
