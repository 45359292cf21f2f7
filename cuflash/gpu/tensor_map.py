"""Tensor maps: what Hopper's copy engine has to know of an array (cuTensorMapEncodeTiled).

The driver's own function is called by ctypes: no package beside CuPy is needed. A map is 128
bytes that the driver alone understands; it holds address, shape and strides.
"""

from __future__ import annotations

import ctypes
import sys
import threading
from functools import cache
from typing import Any

from cuflash.arrays import View
from cuflash.sm90 import PANEL  # a row of 128 bytes, the widest that a swizzle takes

BYTES = 128

_TYPES = {"float16": 6, "bfloat16": 9}  # CUtensorMapDataType
_SWIZZLE_128B, _PROMOTION_256B = 3, 3
_KEPT = 512

_maps: dict[tuple[Any, ...], bytes] = {}
_lock = threading.Lock()


def is_readable(view: View) -> bool:
    """Whether the engine reads an array (batch, seqlen, heads, dim) of 16-bit numbers in place.

    It wants numbers of a row side by side, rows and the start of the array at multiples of 16
    bytes, and steps between rows that are neither negative nor 0.
    """
    *outer, last = view.strides
    return (
        (last == 1 or view.shape[-1] == 1)
        and view.pointer % 16 == 0
        and all(
            n == 1 or (0 < stride < 1 << 39 and stride % 8 == 0)
            for n, stride in zip(view.shape, outer)
        )
        and all(n < 1 << 31 for n in view.shape)
    )


def encode(view: View, rows: int) -> bytes:
    """The map of a readable array for boxes of `rows` tokens and 64 numbers of one head.

    What a box holds beyond the ends of the array is loaded as zero.
    """
    key = view.pointer, view.shape, view.strides, view.dtype, rows
    found = _maps.get(key)
    if found is not None:
        return found
    batch, seqlen, heads, dim = view.shape
    sizes = dim, seqlen, heads, batch
    # a step that is never taken may be anything: make it one that the driver accepts
    steps = [
        2 * view.strides[axis] if view.shape[axis] > 1 else 16 * -(-dim // 8) for axis in (1, 2, 0)
    ]
    storage = (ctypes.c_uint64 * 32)()
    start = ctypes.addressof(storage)
    aligned = start + -start % 64
    status = _encode()(
        ctypes.c_void_p(aligned), _TYPES[view.dtype], 4, ctypes.c_void_p(view.pointer),
        (ctypes.c_uint64 * 4)(*sizes), (ctypes.c_uint64 * 3)(*steps),
        (ctypes.c_uint32 * 4)(PANEL, rows, 1, 1), (ctypes.c_uint32 * 4)(1, 1, 1, 1),
        0, _SWIZZLE_128B, _PROMOTION_256B, 0,
    )  # fmt: skip
    if status != 0:
        raise RuntimeError(
            f"cuTensorMapEncodeTiled: error {status} of the driver for an array of shape "
            f"{view.shape}, strides {view.strides}"
        )
    encoded = ctypes.string_at(aligned, BYTES)
    with _lock:
        if len(_maps) >= _KEPT:
            _maps.clear()
        _maps[key] = encoded
    return encoded


@cache
def _encode() -> Any:
    library = ctypes.CDLL("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1")
    function = library.cuTensorMapEncodeTiled
    function.restype = ctypes.c_int
    function.argtypes = [
        ctypes.c_void_p, ctypes.c_int, ctypes.c_uint32, ctypes.c_void_p,
        *(ctypes.c_void_p,) * 4, *(ctypes.c_int,) * 4,
    ]  # fmt: skip
    return function
