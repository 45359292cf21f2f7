"""Arrays that masks capture: from any library, brought to where the call computes."""

from __future__ import annotations

import weakref
from typing import Any

import numpy as np

from .base import Device, Library, View
from .dlpack import read
from .numpy import numpy_view


class HostCache:
    """What was made of arrays in host memory, each kept as long as its array lives."""

    def __init__(self) -> None:
        self._made: dict[tuple, tuple[Any, Any]] = {}
        # Made of arrays that are gone. Kernels may still read these, so the owner says when to
        # forget them.
        self.ended: list[Any] = []

    def get(self, key: tuple) -> Any:
        found = self._made.get(key)
        return None if found is None else found[0]

    def put(self, key: tuple, array: Any, made: Any) -> None:
        def end(_: Any) -> None:
            entry = self._made.pop(key, None)
            if entry is not None:
                self.ended.append(entry[0])

        try:
            self._made[key] = (made, weakref.ref(array, end))
        except TypeError:  # its type takes no weak references: made anew in every call
            self.ended.append(made)


def host_key(array: Any, host: np.ndarray, *more: Any) -> tuple:
    """Key of a host array: which object it is, and how it looks at its memory."""
    pointer = host.__array_interface__["data"][0]
    return (id(array), pointer, host.shape, host.strides, host.dtype.str, *more)


_copies = HostCache()


def capture(array: Any, argument: str, device: Device, library: Library) -> View:
    """An array captured by a mask, readable where the call computes.

    On the CPU it must lie in host memory. For a call on a GPU, an array on that GPU is read in
    place, in every call, so its values may change; one of another library is first ordered on the
    caller's stream. An array in host memory is copied to the GPU once and kept as long as it
    lives: later changes in place are NOT seen (give a device array, or a new one, for that). The
    first call with it waits for the GPU; under CUDA graph capture it is a ValueError.

    Parameters
    ----------
    array : array of any library
    argument : how messages name it
    device : where the call computes
    library : of q, k and v; its allocator holds the copy. With JAX the View has no pointer: give
        `owner`, a JAX or NumPy array, to `cuflash.jax.call` as an operand.
    """
    from . import library_of

    own = library_of(array, argument)
    if library.name == "JAX":
        return _for_jax(array, argument, own, device)
    if own is library:
        library.check_autograd({argument: array})
        view = library.view(array, argument)
        if view.device is device:
            return view
    host = own.host(array, argument)
    if host is None:
        if device.kind == "cpu" or int(array.__dlpack_device__()[1]) != device.index:
            raise _misplaced(argument, array, device)
        return read(array, argument, library.stream(device))
    if device.kind == "cpu":
        return numpy_view(host, argument, array)
    return _copy(array, host, argument, device, library)


def _misplaced(argument: str, array: Any, device: Device) -> ValueError:
    kind, index = (int(item) for item in array.__dlpack_device__())
    where = "the CPU" if kind == 1 else f"cuda:{index}"
    fix = "copy it to host memory" if device.kind == "cpu" else f"copy it to {device}"
    return ValueError(f"{argument} is on {where}, but q, k and v are on {device}; {fix} first")


def _for_jax(array: Any, argument: str, own: Library, device: Device) -> View:
    """An operand of a JAX call: a JAX array as it is, a NumPy array for XLA to place."""
    if own.name not in ("JAX", "NumPy"):
        raise TypeError(
            f"{argument} is of {own.name}, but q, k and v are JAX arrays; masks in a JAX call "
            "capture JAX or NumPy arrays"
        )
    view = own.view(array, argument)
    if own.name == "JAX" and {view.device.kind, device.kind} == {"cpu", "cuda"}:
        raise _misplaced(argument, array, device)
    return view


def _copy(array: Any, host: np.ndarray, argument: str, device: Device, library: Library) -> View:
    """The copy of a host array on this GPU, made at the first call and kept while it lives."""
    key = host_key(array, host, device, library)
    found = _copies.get(key)
    if found is not None:
        return found
    from .cupy import is_capturing, load_cupy, on_device

    runtime = load_cupy().cuda.runtime
    stream = library.stream(device)
    if is_capturing(stream):
        raise ValueError(
            f"{argument} is in host memory and would be copied to {device} while a CUDA graph is "
            "being captured; make the same call once before the capture, or give a device array"
        )
    view = numpy_view(host, argument, array)
    source = np.ascontiguousarray(view.host)
    target = library.view(library.empty(view.shape, view.dtype, device), argument)
    over = [view for view in _copies.ended if view.device is device]
    with on_device(device.index):
        if source.nbytes:
            # 1: host to device. The source is pageable, so it is staged before this returns.
            runtime.memcpyAsync(target.pointer, source.ctypes.data, source.nbytes, 1, stream)
        # From now on any stream may read this copy, and none reads those that were over before.
        runtime.deviceSynchronize()
    for old in over:
        _copies.ended.remove(old)
    _copies.put(key, array, target)
    return target
