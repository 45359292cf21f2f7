"""JAX arrays and tracers. Their memory is XLA's: `cuflash.jax.call` gets it inside a callback."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

from ..errors import Unsupported
from .base import (
    CPU,
    DTYPES,
    TRACED,
    Device,
    Library,
    View,
    c_strides,
    device,
    unknown_dtype,
)

_PLATFORMS = {"cpu": "cpu", "gpu": "cuda", "cuda": "cuda"}


def is_tracer(array: Any) -> bool:
    """Whether this is a JAX tracer: a stand-in under jit, grad or vmap, without memory."""
    jax = sys.modules.get("jax")
    return jax is not None and isinstance(array, jax.core.Tracer)


class Jax(Library):
    """JAX arrays, concrete or traced.

    A view has shape, dtype and place but never a pointer: XLA may move or reuse the memory at any
    time outside its own programs. `owner` is the array itself, the operand for `cuflash.jax.call`.
    """

    name = "JAX"
    root = "jax"

    def view(self, array: Any, argument: str) -> View:
        dtype = str(array.dtype)
        if dtype not in DTYPES:
            raise TypeError(unknown_dtype(argument, dtype))
        shape = tuple(array.shape)
        place = TRACED if is_tracer(array) else _place(array, argument)
        return View(0, shape, c_strides(shape), dtype, place, None, array)

    def stream(self, device: Device) -> int:
        raise RuntimeError("XLA owns the stream of JAX arrays: go through cuflash.jax.call")

    def empty(self, shape: tuple[int, ...], dtype: str, device: Device) -> Any:
        raise RuntimeError("XLA allocates JAX arrays: go through cuflash.jax.call")

    def host(self, array: Any, argument: str) -> np.ndarray | None:
        if is_tracer(array):
            raise TypeError(
                f"{argument} is a JAX tracer, but the other arrays are not JAX's; a traced array "
                "has no values yet: make the call with JAX arrays, or outside of jit"
            )
        return np.asarray(array) if _place(array, argument) is CPU else None


def _place(array: Any, argument: str) -> Device:
    devices = array.devices()
    if len(devices) != 1:
        raise Unsupported(
            f"{argument} is spread over {len(devices)} devices; cuflash computes on one: use "
            "jax.shard_map, or jax.device_put(array, device)"
        )
    (where,) = devices
    kind = _PLATFORMS.get(where.platform)
    if kind is None:
        raise Unsupported(
            f"{argument} is on {where.platform}; cuflash computes on the CPU and on CUDA devices"
        )
    return CPU if kind == "cpu" else device("cuda", where.local_hardware_id or 0)
