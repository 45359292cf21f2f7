"""A tiny library that shares arrays by DLPack alone, and can be as odd as the standard allows.

`Array` has just `__dlpack__` and `__dlpack_device__`. `freed` counts the deleters that ran, so a
test sees when its memory would be free again. A foreign module for `from_dlpack` is made by
`module()`.
"""

from __future__ import annotations

import ctypes
import sys
import types
from ctypes import c_char_p, c_int32, c_int64, c_uint8, c_uint16, c_uint32, c_uint64, c_void_p

import numpy as np

CPU, CUDA, CUDA_HOST, ROCM, CUDA_MANAGED = 1, 2, 3, 10, 13
INT, UINT, FLOAT, BFLOAT, COMPLEX, BOOL, FLOAT8_E4M3FN, FLOAT4 = 0, 1, 2, 4, 5, 6, 10, 17
CODES = {"i": INT, "u": UINT, "f": FLOAT, "c": COMPLEX, "b": BOOL, "V": BFLOAT}


class Tensor(ctypes.Structure):
    _fields_ = (
        ("data", c_void_p),
        ("device_type", c_int32),
        ("device_id", c_int32),
        ("ndim", c_int32),
        ("code", c_uint8),
        ("bits", c_uint8),
        ("lanes", c_uint16),
        ("shape", ctypes.POINTER(c_int64)),
        ("strides", ctypes.POINTER(c_int64)),
        ("byte_offset", c_uint64),
    )


class Managed(ctypes.Structure):
    _fields_ = (("tensor", Tensor), ("context", c_void_p), ("deleter", c_void_p))


class Versioned(ctypes.Structure):
    _fields_ = (
        ("major", c_uint32),
        ("minor", c_uint32),
        ("context", c_void_p),
        ("deleter", c_void_p),
        ("flags", c_uint64),
        ("tensor", Tensor),
    )


_destructor = ctypes.PYFUNCTYPE(None, c_void_p)
_new = ctypes.PYFUNCTYPE(ctypes.py_object, c_void_p, c_char_p, _destructor)(
    ("PyCapsule_New", ctypes.pythonapi)
)
_is_valid = ctypes.PYFUNCTYPE(c_int32, c_void_p, c_char_p)(("PyCapsule_IsValid", ctypes.pythonapi))
_pointer = ctypes.PYFUNCTYPE(c_void_p, c_void_p, c_char_p)(
    ("PyCapsule_GetPointer", ctypes.pythonapi)
)

alive: dict[int, tuple] = {}  # address of a managed tensor -> all that it points to
freed = 0


@_destructor
def _drop(capsule: int) -> None:
    global freed
    for name in (b"dltensor", b"dltensor_versioned"):
        if _is_valid(capsule, name):
            del alive[_pointer(capsule, name)]
            freed += 1


class Array:
    """An array shared by DLPack; keywords change what the capsule says.

    strides : "null" for none, else in elements; code, bits, lanes : the DLPack dtype
    versioned : False is a producer from before DLPack 1.0, whose __dlpack__ knows no max_version
    refuse : an exception that __dlpack__ raises
    """

    def __init__(self, memory: np.ndarray, **odd) -> None:
        self.memory, self.odd = memory, odd
        self.exports: list[dict] = []

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.odd.get("device", CPU), self.odd.get("index", 0)

    def __dlpack__(self, **keywords):
        self.exports.append(keywords)
        versioned = self.odd.get("versioned", True)
        if not versioned and "max_version" in keywords:
            raise TypeError("unexpected keyword argument 'max_version'")
        if "refuse" in self.odd:
            raise self.odd["refuse"]
        memory, odd = self.memory, self.odd
        offset = odd.get("byte_offset", 0)
        ndim = odd.get("ndim", memory.ndim)
        steps = odd.get("strides", tuple(step // memory.itemsize for step in memory.strides))
        tensor = Tensor(
            memory.ctypes.data - offset if memory.size else None,
            *self.__dlpack_device__(),
            ndim,
            odd.get("code", CODES[memory.dtype.kind]),
            odd.get("bits", 8 * memory.itemsize),
            odd.get("lanes", 1),
            (c_int64 * max(ndim, 1))(*memory.shape[:ndim]),
            None if steps == "null" else (c_int64 * max(ndim, 1))(*steps[:ndim]),
            offset,
        )
        if versioned:
            major = odd.get("major", 1)
            managed = Versioned(major, 0, None, None, int(odd.get("read_only", False)), tensor)
        else:
            managed = Managed(tensor, None, None)
        address = ctypes.addressof(managed)
        alive[address] = (managed, tensor, memory)
        return _new(address, b"dltensor_versioned" if versioned else b"dltensor", _drop)


def module(name: str, from_dlpack=None) -> type[Array]:
    """A library of this name in sys.modules; gives its array type. Remove it after the test."""
    library = types.ModuleType(name)
    if from_dlpack is not None:
        library.from_dlpack = from_dlpack
    sys.modules[name] = library
    return type("Array", (Array,), {"__module__": f"{name}.core"})
