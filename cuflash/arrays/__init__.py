"""The only place that knows array libraries: look at arrays, and make more of the same kind.

`take` turns the arrays of one call into views and their library, `capture` those that masks hold.
A library is recognised by the module of its types, so none is imported here that the caller has
not imported.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from functools import cache
from importlib import import_module
from typing import Any

from .base import CPU, TRACED, Device, Library, View, device, numpy_dtype
from .captured import capture

__all__ = [
    "CPU",
    "TRACED",
    "Device",
    "Library",
    "View",
    "capture",
    "device",
    "is_tracer",
    "known",
    "library_named",
    "library_of",
    "numpy_dtype",
    "take",
]

# Top module of the types -> (file of its row, class, name of the array type in that module)
_ROWS = {
    "numpy": ("numpy", "NumPy", "ndarray"),
    "cupy": ("cupy", "CuPy", "ndarray"),
    "torch": ("torch", "Torch", "Tensor"),
    "jax": ("jax", "Jax", "Array"),
}
_ALIASES = {"jaxlib": "jax"}

_known: dict[type, Library] = {}


@cache
def library_named(root: str) -> Library:
    """The one Library of this top module: a row of the table, or else known by DLPack only."""
    if root in _ROWS:
        file, row, _ = _ROWS[root]
        return getattr(import_module(f".{file}", __name__), row)()
    return import_module(".dlpack", __name__).Generic(root)


def library_of(array: Any, argument: str) -> Library:
    """The library of an array, or a TypeError that says which kinds there are."""
    library = _known.get(type(array))
    if library is None:
        library = _known[type(array)] = _recognise(array, argument)
    return library


def _recognise(array: Any, argument: str) -> Library:
    kind = type(array)
    for parent in kind.__mro__:
        root = parent.__module__.partition(".")[0]
        root = _ALIASES.get(root, root)
        if root in _ROWS and root in sys.modules:
            array_type = getattr(sys.modules[root], _ROWS[root][2], None)
            if array_type is not None and isinstance(array, array_type):
                return library_named(root)
    if hasattr(kind, "__dlpack__") and hasattr(kind, "__dlpack_device__"):
        return library_named(kind.__module__.partition(".")[0])
    raise TypeError(
        f"{argument} must be an array of NumPy, CuPy, PyTorch, JAX or a library with __dlpack__, "
        f"got {kind.__module__}.{kind.__qualname__}; numpy.asarray makes one of lists and numbers"
    )


def known(array: Any) -> Library | None:
    """The library of an array, None if none of its type has been met."""
    return _known.get(type(array))


def is_tracer(array: Any) -> bool:
    """Whether this is a JAX tracer; imports nothing unless JAX is there already."""
    if "jax" not in sys.modules:
        return False
    from .jax import is_tracer as check

    return check(array)


def take(named: Mapping[str, Any], *, manual: bool = False) -> tuple[Library, dict[str, View]]:
    """Look at the arrays of one call, which must share one library and one device.

    Parameters
    ----------
    named : the arrays by the names with which the caller gave them
    manual : the caller handles gradients by hand, so arrays that require grad are no error
    """
    library: Library | None = None
    first = ""
    for argument, array in named.items():
        own = _known.get(type(array)) or library_of(array, argument)
        if library is None:
            library, first = own, argument
        elif own is not library:
            raise TypeError(
                f"all arrays of one call must come from one library, but {first} is of "
                f"{library.name} and {argument} of {own.name}; convert one of them"
            )
    if library is None:
        raise TypeError("no arrays given")
    if not manual:
        library.check_autograd(named)
    views = {argument: library.view(array, argument) for argument, array in named.items()}
    place = views[first].device
    for argument, view in views.items():
        if not view.shape:
            raise TypeError(f"{argument} must be an array with at least 1 axis, got a 0-d one")
        if view.device is not place:
            if place is TRACED:
                place, first = view.device, argument
            elif view.device is not TRACED:
                raise ValueError(
                    f"all arrays of one call must be on one device, but {first} is on {place} "
                    f"and {argument} on {view.device}; move one of them, nothing is moved silently"
                )
    return library, views
