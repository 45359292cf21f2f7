"""What every array library becomes inside cuflash: a `View` on a `Device`, made by a `Library`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from operator import itemgetter
from typing import Any

import numpy as np

FLOATS = ("float16", "bfloat16", "float32", "float64")
INTEGERS = ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")
DTYPES = (*FLOATS, "bool", *INTEGERS)

_NUMPY_NAMES = {np.dtype(name): name for name in DTYPES if name != "bfloat16"}


@dataclass(frozen=True, slots=True)
class Device:
    """Where an array lies; made by `device()`, which gives the same object for the same place."""

    kind: str  # "cpu", "cuda", or "traced" for a JAX tracer, whose place XLA knows later
    index: int

    def __str__(self) -> str:
        return f"cuda:{self.index}" if self.kind == "cuda" else self.kind


@cache
def device(kind: str, index: int = 0) -> Device:
    """The one Device of this kind and index."""
    return Device(kind, index)


# From a tuple to one of its items in this order; for at least two.
_pick = cache(lambda axes: itemgetter(*axes))

CPU = device("cpu")
TRACED = device("traced")


# Not frozen: a frozen dataclass takes four times as long to make, and a call makes a dozen of them.
@dataclass(slots=True, eq=False)
class View:
    """An array as the kernels see it; treat it as immutable.

    Strides count elements. An axis of one element is never stepped along, so its stride says
    nothing: it is 0, or 1 on the last axis, whatever the library claimed.
    """

    pointer: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: str
    device: Device
    # the same memory as a NumPy array, only where device is the CPU
    host: np.ndarray | None = field(repr=False)
    owner: Any = field(repr=False)  # whatever must live as long as the memory is used

    @property
    def ndim(self) -> int:
        return len(self.shape)

    def transpose(self, axes: tuple[int, ...]) -> View:
        """The same memory with the axes in this order."""
        if len(axes) < 2:
            return self
        pick = _pick(axes)
        return View(
            self.pointer,
            pick(self.shape),
            pick(self.strides),
            self.dtype,
            self.device,
            None if self.host is None else self.host.transpose(axes),
            self.owner,
        )

    def with_axes(self, positions: Sequence[int]) -> View:
        """The same memory with axes of one element at these positions of the result, ascending."""
        shape, strides = list(self.shape), list(self.strides)
        for position in positions:
            shape.insert(position, 1)
            strides.insert(position, 0)
        host = None if self.host is None else np.expand_dims(self.host, tuple(positions))
        return View(
            self.pointer, tuple(shape), tuple(strides), self.dtype, self.device, host, self.owner
        )


class Library:
    """One array library: how to look at its arrays, and how to make more of the same kind."""

    name = ""  # as in messages: "NumPy", "CuPy", "torch", "JAX", or the module of a DLPack producer
    root = ""  # the top module of its types

    def view(self, array: Any, argument: str) -> View:
        """The array as the kernels see it, without a copy wherever that is possible."""
        raise NotImplementedError

    def signature(self, array: Any) -> Any:
        """What tells arrays on a GPU apart beside their address; None: look at it anew each time.

        Hashable. Equal ones have equal views but for the address, whose last 4 bits count.
        """
        return None

    def pointer(self, array: Any) -> int:
        """The address of an array that has a signature."""
        raise NotImplementedError

    def stream(self, device: Device) -> int:
        """Raw pointer of the caller's current stream on this device; 0 on the CPU."""
        raise NotImplementedError

    def empty(self, shape: tuple[int, ...], dtype: str, device: Device) -> Any:
        """A new array in C order from the library's own allocator, on the current stream."""
        raise NotImplementedError

    def give(self, array: Any) -> Any:
        """What the caller gets for an array that `empty` made."""
        return array

    def cast(self, array: Any, dtype: str) -> Any:
        """A copy in another float dtype, on the current stream."""
        return array.astype(numpy_dtype(dtype))

    def host(self, array: Any, argument: str) -> np.ndarray | None:
        """The array as NumPy sees it where it lies in host memory, else None."""
        return self.view(array, argument).host

    def check_autograd(self, named: Mapping[str, Any]) -> None:
        """Refuse arrays whose gradients the library is recording."""

    def deterministic(self) -> bool:
        """Whether the library's own switch asks for deterministic results."""
        return False


def numpy_dtype(name: str) -> np.dtype:
    """The NumPy dtype of this name; bfloat16 is the one of ml_dtypes."""
    return _bfloat16() if name == "bfloat16" else np.dtype(name)


@cache
def _bfloat16() -> np.dtype:
    try:
        import ml_dtypes
    except ImportError as error:
        raise ImportError(
            "bfloat16 in host memory needs the package ml_dtypes: pip install ml-dtypes"
        ) from error
    return np.dtype(ml_dtypes.bfloat16)


def dtype_name(dtype: np.dtype, argument: str) -> str:
    """The name of a NumPy dtype, or a TypeError if cuflash does not know it."""
    name = _NUMPY_NAMES.get(dtype)
    if name is None:
        # Only now the slow `dtype.name`: bfloat16 is known once ml_dtypes has been met.
        if dtype.kind not in "fiu?" and dtype.name == "bfloat16":
            name = _NUMPY_NAMES[dtype] = "bfloat16"
        elif not dtype.isnative:
            raise TypeError(
                f"{argument} has the byte order of another machine ({dtype.str}); "
                f"convert it: {argument}.astype({argument}.dtype.newbyteorder('='))"
            )
        else:
            raise TypeError(unknown_dtype(argument, dtype.name))
    return name


def unknown_dtype(argument: str, dtype: str) -> str:
    """The text for a dtype that cuflash does not read."""
    return (
        f"{argument} has dtype {dtype}, which cuflash does not support; it reads "
        f"{', '.join(FLOATS)}, bool and integers of 8 to 64 bits"
    )


def settle(shape: tuple[int, ...], strides: tuple[int, ...]) -> tuple[int, ...]:
    """The strides, with 0 (last axis: 1) on axes of one element, whose strides are arbitrary."""
    if 1 not in shape:
        return strides
    last = len(shape) - 1
    return tuple(
        [
            (1 if axis == last else 0) if size == 1 else step
            for axis, (size, step) in enumerate(zip(shape, strides))
        ]
    )


def splits_elements(shape: tuple[int, ...], steps: tuple[int, ...], size: int) -> bool:
    """Whether strides in bytes step to the middle of elements, as in a field of a record."""
    if not any([step % size for step in steps]):
        return False
    return any(count > 1 and step % size for count, step in zip(shape, steps))


def c_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Strides in elements of an array of this shape in C order."""
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return settle(tuple(shape), tuple(reversed(strides)))
