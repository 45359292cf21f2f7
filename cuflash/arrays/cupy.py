"""CuPy arrays, and the few things that cuflash needs of CuPy for every library on a GPU."""

from __future__ import annotations

import atexit
import os
import shutil
import sys
import tempfile
import warnings
from contextlib import nullcontext
from typing import Any

from .base import (
    Device,
    Library,
    View,
    device,
    dtype_name,
    numpy_dtype,
    settle,
    splits_elements,
)


def load_cupy() -> Any:
    """The module cupy, or an ImportError that says what to install."""
    _ensure_cache_folder()
    try:
        import cupy
    except ImportError as error:
        raise ImportError(
            "arrays on a GPU need CuPy 14 or newer: pip install 'cuflash[cuda13]' "
            f"(CUDA 12: 'cuflash[cuda12]'); importing it gave: {error}"
        ) from error
    return cupy


def _ensure_cache_folder() -> None:
    """Before the first import of CuPy, which fails where it cannot make its cache folder."""
    if "cupy" in sys.modules:
        return
    folder = os.environ.get("CUPY_CACHE_DIR", os.path.expanduser("~/.cupy/kernel_cache"))
    try:
        os.makedirs(folder, exist_ok=True)
    except OSError as error:
        private = tempfile.mkdtemp(prefix="cuflash-kernels-")
        atexit.register(shutil.rmtree, private, ignore_errors=True)
        os.environ["CUPY_CACHE_DIR"] = private
        warnings.warn(
            f"cuflash: the kernel cache {folder} cannot be made ({error}); this process uses "
            f"{private}, and the next one compiles again. CUPY_CACHE_DIR names another folder",
            RuntimeWarning,
            stacklevel=3,
        )


def on_device(index: int) -> Any:
    """A context in which this GPU is the current one; the caller's comes back afterwards."""
    cupy = load_cupy()
    if cupy.cuda.runtime.getDevice() == index:
        return nullcontext()
    return cupy.cuda.Device(index)


def is_capturing(stream: int) -> bool:
    """Whether a CUDA graph is being captured on this stream."""
    return bool(load_cupy().cuda.runtime.streamIsCapturing(stream))


class CuPy(Library):
    """CuPy arrays; results come from CuPy's current allocator."""

    name = "CuPy"
    root = "cupy"

    def __init__(self) -> None:
        self._cupy = load_cupy()

    def view(self, array: Any, argument: str) -> View:
        dtype = dtype_name(array.dtype, argument)
        shape = array.shape
        data = array.data
        size = array.itemsize
        steps = array.strides
        if splits_elements(shape, steps, size):
            with on_device(data.device_id):
                array = array.copy(order="C")
            data = array.data
            steps = array.strides
        strides = settle(shape, tuple([step // size for step in steps]))
        return View(data.ptr, shape, strides, dtype, device("cuda", data.device_id), None, array)

    def signature(self, array: Any) -> Any:
        data = array.data
        pointer = data.ptr
        if type(array) is not self._cupy.ndarray or not pointer:
            return None
        return array.shape, array.strides, array.dtype, data.device_id, pointer & 15

    def pointer(self, array: Any) -> int:
        return array.data.ptr

    def stream(self, device: Device) -> int:
        return self._cupy.cuda.get_current_stream(device.index).ptr

    def cast(self, array: Any, dtype: str) -> Any:
        with on_device(array.data.device_id):
            return array.astype(numpy_dtype(dtype))

    def empty(self, shape: tuple[int, ...], dtype: str, device: Device) -> Any:
        with on_device(device.index):
            return self._cupy.empty(shape, numpy_dtype(dtype))
