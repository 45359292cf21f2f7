"""JAX: cuflash as a callback on XLA's own buffers and stream, under `jit` and without.

XLA allocates the results and the workspaces, orders the launch among its own and keeps the inputs
alive; nothing crosses by DLPack. On JAX's CPU platform the callback gets the host buffers.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, Protocol

import jax
import numpy as np
from jax.experimental.buffer_callback import buffer_callback

from .arrays import CPU, Device, View, device, numpy_dtype
from .arrays.base import c_strides
from .arrays.captured import HostCache, host_key
from .arrays.dlpack import borrow
from .arrays.numpy import numpy_view
from .errors import Unsupported

Output = tuple[Any, ...]  # ends in shape, dtype; what comes before, such as a name, is not read

# Operands that XLA might cut to 32 bits (as it does unless jax_enable_x64 is set) travel as pairs.
_WIDE = ("int64", "uint64", "float64")

_placed = HostCache()


class Run(Protocol):
    """What to compute: hashable, and equal for calls that compute alike.

    The first of equal ones is kept with its compiled program, so it should not hold arrays.
    """

    def __hash__(self) -> int: ...

    def workspaces(self, device: Device) -> Sequence[Output]:
        """Shape and dtype of each workspace that the kernels for this device need."""

    def __call__(self, inputs: list[View], outputs: list[View], stream: int) -> None:
        """Write the outputs, launching on this stream; the workspaces follow the outputs."""


def call(run: Run, outputs: Sequence[Output], *operands: Any) -> list[Any]:
    """Run cuflash inside JAX: eager or traced, on whatever device XLA places it.

    Parameters
    ----------
    run : the computation, see `Run`
    outputs : shape and dtype of each result, in C order
    operands : JAX arrays or tracers; NumPy arrays (captured by masks) are placed once and kept as
        long as they live, so later changes in place are not seen

    Returns
    -------
    results : list of JAX arrays, one for each of `outputs`

    Raises
    ------
    Unsupported: under `jax.grad`, `jax.jvp` and their kin. TypeError: under `jax.vmap`.
    """
    where = next((_device(item) for item in operands if isinstance(item, jax.Array)), None)
    arrays = [item if isinstance(item, jax.Array) else _place(item, where) for item in operands]
    wide = tuple([_wide_dtype(item) for item in operands])
    index = 0 if where is None or where.platform == "cpu" else where.local_hardware_id or 0
    shapes = tuple([(tuple(shape), dtype) for *_, shape, dtype in outputs])
    return list(_compiled(run, shapes, wide, index)(*arrays))


def _device(array: Any) -> Any:
    """The device of a concrete array; None for a tracer."""
    if isinstance(array, jax.core.Tracer):
        return None
    (where,) = array.devices()
    return where


def _wide_dtype(operand: Any) -> str | None:
    """The dtype of an operand that travels as pairs of 32 bits, else None."""
    if isinstance(operand, jax.Array):
        return None
    name = operand.dtype.name
    return name if name in _WIDE else None


def _place(array: np.ndarray, where: Any) -> Any:
    """A NumPy array as a JAX array on this device (None: JAX's default), made once."""
    key = host_key(array, array, where)
    placed = _placed.get(key)
    if placed is None:
        copy = np.array(array, order="C")  # or JAX on the CPU might keep the caller's own memory
        if _wide_dtype(array):
            copy = copy[..., None].view(np.int32)
        with jax.ensure_compile_time_eval():  # an array that outlives the trace we may be in
            placed = jax.device_put(copy, where)
        _placed.ended.clear()  # XLA keeps alive what its programs still read
        _placed.put(key, array, placed)
    return placed


# One jitted callable for each static configuration: with a fresh one a call, JAX would compile
# anew every time (27 ms).
@lru_cache(maxsize=1024)
def _compiled(
    run: Run, outputs: tuple[Output, ...], wide: tuple[str | None, ...], index: int
) -> Any:
    """The jitted callable: picks the platform when XLA lowers, refuses grad and vmap."""

    def branch(place: Device) -> Any:
        workspaces = run.workspaces(place) if place.kind == "cuda" else ()
        results = [
            jax.ShapeDtypeStruct(tuple(shape), numpy_dtype(dtype))
            for *_, shape, dtype in (*outputs, *workspaces)
        ]
        launch = buffer_callback(_callback(run, wide), results)
        return lambda *operands: launch(*operands)[: len(outputs)]

    def compute(*operands: Any) -> Any:
        branches = {"cpu": branch(CPU)}
        if _has_cuda():
            branches["cuda"] = branch(device("cuda", index))
        return jax.lax.platform_dependent(*operands, **branches)

    batched = jax.custom_batching.custom_vmap(compute)
    batched.def_vmap(_refuse_vmap)
    differentiable = jax.custom_jvp(batched)
    differentiable.defjvp(_refuse_grad)
    return jax.jit(differentiable)


def _has_cuda() -> bool:
    try:
        return bool(jax.devices("cuda"))
    except RuntimeError:
        return False


def _callback(run: Run, wide: tuple[str | None, ...]) -> Any:
    """The function that XLA calls with its buffers, on whatever thread it likes."""

    def callback(context: Any, results: Any, *buffers: Any) -> None:
        inputs = [_input(buffer, dtype) for buffer, dtype in zip(buffers, wide)]
        outputs = [_buffer(buffer) for buffer in results]
        on_gpu = bool(outputs) and outputs[0].device.kind == "cuda"
        run(inputs, outputs, context.stream if on_gpu else 0)

    return callback


def _buffer(buffer: Any) -> View:
    if int(buffer.__dlpack_device__()[0]) == 1:
        return numpy_view(np.asarray(buffer), "buffer", buffer)
    return borrow(buffer, "buffer")


def _input(buffer: Any, wide: str | None) -> View:
    """An input buffer; on the host NumPy would refuse to write it."""
    view = _buffer(buffer)
    host = view.host
    if host is not None:
        host = host.view()
        host.flags.writeable = False
    shape, dtype = view.shape, view.dtype
    if wide is not None:
        shape, dtype = shape[:-1], wide
        host = None if host is None else host.view(wide)[..., 0]
    return View(view.pointer, shape, c_strides(shape), dtype, view.device, host, view.owner)


def _refuse_grad(primals: Any, tangents: Any) -> Any:
    raise Unsupported(
        "JAX differentiation of cuflash is not there yet: use cuflash.attention_vjp or "
        "cuflash.attention_backward, which work on JAX arrays, also under jax.jit"
    )


def _refuse_vmap(axis_size: int, in_batched: Any, *operands: Any) -> Any:
    raise TypeError(
        "jax.vmap over cuflash is not there yet: make the mapped axis part of the batch axis of "
        "q, k and v, or use jax.lax.map"
    )
