"""NumPy arrays."""

from __future__ import annotations

from typing import Any

import numpy as np

from .base import (
    CPU,
    Device,
    Library,
    View,
    dtype_name,
    numpy_dtype,
    settle,
    splits_elements,
)


class NumPy(Library):
    """NumPy arrays, read-only ones and subclasses too; results are `numpy.ndarray`."""

    name = "NumPy"
    root = "numpy"

    def view(self, array: Any, argument: str) -> View:
        if type(array) is not np.ndarray:
            if isinstance(array, np.ma.MaskedArray):
                raise TypeError(
                    f"{argument} is a masked array, whose mask attention would not see; give "
                    f"{argument}.filled(0) and say by `mask=` which keys to attend"
                )
            array = np.asarray(array)
        return numpy_view(array, argument, array)

    def stream(self, device: Device) -> int:
        return 0

    def empty(self, shape: tuple[int, ...], dtype: str, device: Device) -> np.ndarray:
        return np.empty(shape, numpy_dtype(dtype))


def numpy_view(array: np.ndarray, argument: str, owner: Any) -> View:
    """The View of a plain NumPy array; strides that split elements cost one copy."""
    dtype = dtype_name(array.dtype, argument)
    size = array.itemsize
    steps = array.strides
    if splits_elements(array.shape, steps, size):
        array = owner = np.array(array, order="C")
        steps = array.strides
    shape = array.shape
    strides = settle(shape, tuple([step // size for step in steps]))
    return View(array.ctypes.data, shape, strides, dtype, CPU, array, owner)
