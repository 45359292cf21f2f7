"""Arrays of any library that speaks DLPack, read through ctypes.

The capsule is borrowed: it is never renamed, so its own destructor tells the producer when the
memory is free again, and an array may be read any number of times.
https://dmlc.github.io/dlpack/latest/c_api.html
"""

from __future__ import annotations

import sys
from collections import deque
from ctypes import (
    POINTER,
    PYFUNCTYPE,
    Structure,
    c_char_p,
    c_int32,
    c_int64,
    c_uint8,
    c_uint16,
    c_uint32,
    c_uint64,
    c_void_p,
    py_object,
    pythonapi,
)
from typing import Any

import numpy as np

from ..errors import Unsupported
from .base import (
    CPU,
    Device,
    Library,
    View,
    c_strides,
    device,
    numpy_dtype,
    settle,
    unknown_dtype,
)

# DLDeviceType
_CPU, _CUDA, _CUDA_HOST, _CUDA_MANAGED = 1, 2, 3, 13
_KINDS = {_CPU: "cpu", _CUDA: "cuda", _CUDA_HOST: "cpu", _CUDA_MANAGED: "cuda"}

# DLDataTypeCode -> name; float8 and narrower are named only to be refused by name
_CODES = {0: "int", 1: "uint", 2: "float", 4: "bfloat", 5: "complex", 6: "bool"}
_NARROW = {
    7: "float8_e3m4",
    8: "float8_e4m3",
    9: "float8_e4m3b11fnuz",
    10: "float8_e4m3fn",
    11: "float8_e4m3fnuz",
    12: "float8_e5m2",
    13: "float8_e5m2fnuz",
    14: "float8_e8m0fnu",
    15: "float6_e2m3fn",
    16: "float6_e3m2fn",
    17: "float4_e2m1fn",
}
_DTYPES = {
    (2, 16): "float16",
    (4, 16): "bfloat16",
    (2, 32): "float32",
    (2, 64): "float64",
    (6, 8): "bool",
    **{(0, bits): f"int{bits}" for bits in (8, 16, 32, 64)},
    **{(1, bits): f"uint{bits}" for bits in (8, 16, 32, 64)},
}

_MAX_VERSION = (1, 1)
_LEGACY_STREAM = 1  # how DLPack writes the null stream
_NO_SYNC = -1


class _DLTensor(Structure):
    _fields_ = (
        ("data", c_void_p),
        ("device_type", c_int32),
        ("device_id", c_int32),
        ("ndim", c_int32),
        ("code", c_uint8),
        ("bits", c_uint8),
        ("lanes", c_uint16),
        ("shape", POINTER(c_int64)),
        ("strides", POINTER(c_int64)),
        ("byte_offset", c_uint64),
    )


class _Versioned(Structure):
    _fields_ = (
        ("major", c_uint32),
        ("minor", c_uint32),
        ("manager_ctx", c_void_p),
        ("deleter", c_void_p),
        ("flags", c_uint64),
        ("tensor", _DLTensor),
    )


# Prototypes of our own: the attributes of `pythonapi` are shared by the whole process.
_is_valid = PYFUNCTYPE(c_int32, py_object, c_char_p)(("PyCapsule_IsValid", pythonapi))
_get_pointer = PYFUNCTYPE(c_void_p, py_object, c_char_p)(("PyCapsule_GetPointer", pythonapi))


class _Memory:
    """Host memory of a producer, for NumPy; as the base of an array it keeps the owner alive."""

    def __init__(self, interface: dict[str, Any], owner: Any) -> None:
        self.__array_interface__ = interface
        self.owner = owner


class _Borrowed:
    """Device memory of a producer on a stream of its own, which knows nothing of our stream.

    When the last View goes, our kernels may still be reading. So the capsule waits in `_held` for
    an event on our stream; later calls let go of what has been reached.
    """

    __slots__ = ("capsule", "index", "producer", "stream")

    def __init__(self, capsule: Any, producer: Any, index: int, stream: int) -> None:
        self.capsule, self.producer = capsule, producer
        self.index, self.stream = index, stream

    def __del__(self) -> None:
        if sys.is_finalizing():
            return
        from .cupy import load_cupy, on_device

        cuda = load_cupy().cuda
        with on_device(self.index):
            event = cuda.Event(disable_timing=True)
            try:
                cuda.runtime.eventRecord(event.ptr, self.stream)
            except cuda.runtime.CUDARuntimeError:  # the caller has destroyed the stream
                cuda.runtime.deviceSynchronize()
                return
        _held.append((event, self.capsule, self.producer))


_held: deque[tuple[Any, Any, Any]] = deque()


def _release() -> None:
    """Let go of the borrowed memory whose event has passed, oldest first."""
    while _held:
        try:
            event = _held[0][0]
            if not event.done:
                return
            _held.popleft()
        except IndexError:  # another thread took it
            return


def read(array: Any, argument: str, stream: int | None) -> View:
    """The View of any array with `__dlpack__`.

    stream : the CUDA stream that will read it, which the producer is asked to order after its own
        work; None takes CuPy's current one.
    """
    kind, index = array.__dlpack_device__()
    kind, index = int(kind), int(index)
    if kind not in _KINDS:
        raise Unsupported(
            f"{argument} is on a device of DLPack type {kind}; cuflash computes on the CPU (1), "
            "CUDA (2) and CUDA's host (3) and managed (13) memory"
        )
    place = CPU if _KINDS[kind] == "cpu" else device("cuda", index)
    owner: Any
    if kind == _CPU or kind == _CUDA_HOST:
        capsule = _export(array, argument, {})
        owner = (capsule, array)
    else:
        from .cupy import is_capturing, load_cupy, on_device

        if stream is None:
            stream = load_cupy().cuda.get_current_stream(index).ptr
        # In a capture an event from outside would break the graph: the order is the caller's then.
        capturing = is_capturing(stream)
        if not capturing:
            _release()
        with on_device(index):
            wait = _NO_SYNC if capturing else stream or _LEGACY_STREAM
            capsule = _export(array, argument, {"stream": wait})
        owner = (capsule, array) if capturing else _Borrowed(capsule, array, index, stream)
    return _view(_tensor(capsule, argument), argument, place, owner)


def borrow(array: Any, argument: str) -> View:
    """The View of device memory whose order on the stream its producer has seen to."""
    index = int(array.__dlpack_device__()[1])
    capsule = array.__dlpack__()
    return _view(_tensor(capsule, argument), argument, device("cuda", index), (capsule, array))


def _export(array: Any, argument: str, keywords: dict[str, Any]) -> Any:
    try:
        try:
            return array.__dlpack__(max_version=_MAX_VERSION, **keywords)
        except TypeError:  # a producer from before DLPack 1.0
            return array.__dlpack__(**keywords)
    except (BufferError, RuntimeError, TypeError, ValueError) as error:
        raise TypeError(
            f"{argument}: its library ({type(array).__module__}) refuses to share it through "
            f"DLPack: {error}"
        ) from error


def _tensor(capsule: Any, argument: str) -> _DLTensor:
    """The DLTensor in a capsule of either form."""
    if _is_valid(capsule, b"dltensor_versioned"):
        managed = _Versioned.from_address(_get_pointer(capsule, b"dltensor_versioned"))
        if managed.major != _MAX_VERSION[0]:
            raise TypeError(
                f"{argument} comes as DLPack {managed.major}.{managed.minor}; cuflash reads "
                f"version {_MAX_VERSION[0]}"
            )
        return managed.tensor
    if _is_valid(capsule, b"dltensor"):
        return _DLTensor.from_address(_get_pointer(capsule, b"dltensor"))
    raise TypeError(f"{argument}: __dlpack__ gave no fresh DLPack capsule but {capsule!r}")


def _view(tensor: _DLTensor, argument: str, place: Device, owner: Any) -> View:
    dtype = _DTYPES.get((tensor.code, tensor.bits)) if tensor.lanes == 1 else None
    if dtype is None:
        code = _CODES.get(tensor.code)
        text = f"{code}{tensor.bits}" if code else _NARROW.get(tensor.code, f"code {tensor.code}")
        lanes = f" x {tensor.lanes} lanes" if tensor.lanes != 1 else ""
        raise TypeError(unknown_dtype(argument, text + lanes))
    ndim = tensor.ndim
    shape = tuple(tensor.shape[:ndim])
    # NULL strides mean C order
    strides = settle(shape, tuple(tensor.strides[:ndim])) if tensor.strides else c_strides(shape)
    pointer = (tensor.data or 0) + tensor.byte_offset
    host = _host(pointer, shape, strides, dtype, owner) if place is CPU else None
    return View(pointer, shape, strides, dtype, place, host, owner)


def _host(
    pointer: int,
    shape: tuple[int, ...],
    strides: tuple[int, ...],
    dtype: str,
    owner: Any,
) -> np.ndarray:
    """A NumPy array over memory in host reach, which keeps its owner alive.

    Always read-only: only inputs come this way, and not every producer can say that its are.
    """
    target = numpy_dtype(dtype)
    if 0 in shape:
        return np.empty(shape, target)
    # NumPy's interface has no word for bfloat16: it goes as the integer of its size.
    plain = np.dtype("uint16") if dtype == "bfloat16" else target
    interface = {
        "version": 3,
        "data": (pointer, True),
        "shape": shape,
        "strides": tuple([step * plain.itemsize for step in strides]),
        "typestr": plain.str,
    }
    array = np.asarray(_Memory(interface, owner))
    return array if plain is target else array.view(target)


class Generic(Library):
    """A library known only by DLPack; one object for each top module.

    Results are made by CuPy on a GPU and by NumPy on the CPU, and given back through the
    `from_dlpack` of the producer's top module where it has one; else, or where that refuses (NumPy
    cannot export bfloat16), the caller gets the CuPy or NumPy array. The stream is CuPy's current.
    """

    def __init__(self, root: str) -> None:
        self.name = self.root = root

    def view(self, array: Any, argument: str) -> View:
        maker = _maker(array)
        return read(array, argument, None) if maker is None else maker.view(array, argument)

    def host(self, array: Any, argument: str) -> np.ndarray | None:
        if _KINDS.get(int(array.__dlpack_device__()[0])) == "cuda":
            return None  # without exporting it, which would order it on a stream
        return self.view(array, argument).host

    def stream(self, device: Device) -> int:
        return _backing(device).stream(device)

    def empty(self, shape: tuple[int, ...], dtype: str, device: Device) -> Any:
        return _backing(device).empty(shape, dtype, device)

    def cast(self, array: Any, dtype: str) -> Any:
        host = self.host(array, "array")
        if host is not None:
            return host.astype(numpy_dtype(dtype))
        backing = _backing(device("cuda"))
        return backing.cast(sys.modules["cupy"].from_dlpack(array), dtype)

    def give(self, array: Any) -> Any:
        convert = getattr(sys.modules.get(self.root), "from_dlpack", None)
        if convert is None or _maker(array) is None:
            return array
        try:
            return convert(array)
        except (BufferError, RuntimeError, TypeError, ValueError):
            return array


def _maker(array: Any) -> Library | None:
    """The library of an array that `Generic.empty` made; None for a producer's own array."""
    root = type(array).__module__.partition(".")[0]
    if root == "numpy":
        return _backing(CPU)
    if root == "cupy":
        return _backing(device("cuda"))
    return None


def _backing(device: Device) -> Library:
    """The library that makes arrays for those that we know only by DLPack."""
    from . import library_named

    return library_named("numpy" if device.kind == "cpu" else "cupy")
