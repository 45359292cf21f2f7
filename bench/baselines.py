"""The contenders: cuflash, standard attention, and the rivals that are installed.

A contender gets the case's arrays and gives back two calls, ``forward()`` -> o and ``backward()``
-> (dq, dk, dv), of whatever kind; ``numbers`` turns such a result into the machine's own arrays,
in (batch, seqlen, heads, head_dim) order, for the check. What a rival cannot do raises ``Skip``
with the reason, which goes into the table.

References: PyTorch's scaled_dot_product_attention and flex_attention, jax.nn.dot_product_attention.
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from .cases import Case
from .machine import Machine

Arrays = dict[str, Any]  # q, k, v, do


class Skip(Exception):
    """This contender cannot run this case; the text says why."""


@dataclass
class Contender:
    """Two calls on one case; ``wait`` for a result where CUDA events cannot see the work."""

    forward: Callable[[], Any]
    backward: Callable[[], Any]
    numbers: Callable[[Any], Any]
    wait: Callable[[Any], Any] | None = None


def cuflash(machine: Machine, case: Case, arrays: Arrays) -> Contender:
    """This project."""
    import cuflash as package

    q, k, v, do = (arrays[name] for name in "q k v do".split())
    options = case.options()
    o, lse = package.attention(q, k, v, return_lse=True, **options)
    return Contender(
        forward=lambda: package.attention(q, k, v, **options),
        backward=lambda: tuple(package.attention_backward(do, q, k, v, o, lse, **options)),
        numbers=lambda array: array,
    )


def standard(machine: Machine, case: Case, arrays: Arrays) -> Contender:
    """The formula written out with its (seqlen_q, seqlen_k) matrices, sums in float32 or wider."""
    if machine.kind != "cpu" or case.heads_q != case.heads_k:
        raise Skip("CPU only, one key head a query head")
    work = np.float64 if case.dtype == "float64" else np.float32
    order = (0, 2, 1, 3)  # a head at a time
    q, k, v, do = (
        np.ascontiguousarray(arrays[name].astype(work).transpose(order)) for name in _NAMES
    )
    scale = work(1 / math.sqrt(case.head_dim))
    first, stop = case.key_range(np.arange(case.seqlen_q))
    columns = np.arange(case.seqlen_k)
    masked = (columns < first[:, None]) | (columns >= stop[:, None])

    def weights(item: int, head: int) -> np.ndarray:
        s = (q[item, head] * scale) @ k[item, head].T
        if masked.any():
            s[masked] = -np.inf
        s -= s.max(axis=1, keepdims=True)
        np.exp(s, out=s)
        s /= s.sum(axis=1, keepdims=True)
        return s

    def forward() -> np.ndarray:
        o = np.empty(q.shape, work)
        for at in np.ndindex(*q.shape[:2]):
            o[at] = weights(*at) @ v[at]
        return o

    kept = forward()

    def backward() -> tuple[np.ndarray, ...]:
        dq, dk, dv = (np.empty(q.shape, work) for _ in range(3))
        for at in np.ndindex(*q.shape[:2]):
            p = weights(*at)
            dv[at] = p.T @ do[at]
            ds = do[at] @ v[at].T
            ds -= (do[at] * kept[at]).sum(axis=1, keepdims=True)
            ds *= p
            ds *= scale
            dq[at], dk[at] = ds @ k[at], ds.T @ q[at]
        return dq, dk, dv

    return Contender(forward, backward, lambda array: array.transpose(order))


def sdpa(backend: str) -> Callable[[Machine, Case, Arrays], Contender]:
    """scaled_dot_product_attention held to one back end: FLASH, CUDNN, EFFICIENT or MATH."""

    def build(machine: Machine, case: Case, arrays: Arrays) -> Contender:
        import torch
        from torch.nn.attention import SDPBackend, sdpa_kernel

        if case.window is not None:
            raise Skip("no window without a mask matrix")
        if case.causal and case.seqlen_q != case.seqlen_k:
            raise Skip("causal is aligned top-left")
        scores = 4 * case.batch * case.heads_q * case.seqlen_q * case.seqlen_k
        if backend == "MATH" and scores > 2**33:
            raise Skip(f"its score matrices take {scores / 2**30:.0f} GiB each")
        names = {"FLASH": "FLASH_ATTENTION", "CUDNN": "CUDNN_ATTENTION"}
        names |= {"EFFICIENT": "EFFICIENT_ATTENTION", "MATH": "MATH"}
        held = [getattr(SDPBackend, names[backend])]
        q, k, v, do = (_to_torch(arrays[name]).transpose(1, 2) for name in _NAMES)
        grouped = {"enable_gqa": True} if case.heads_q != case.heads_k else {}

        def attend() -> Any:
            with sdpa_kernel(held):
                return torch.nn.functional.scaled_dot_product_attention(
                    q, k, v, is_causal=case.causal, **grouped
                )

        return _torch_contender(machine, attend, (q, k, v), do)

    return build


def flex(machine: Machine, case: Case, arrays: Arrays) -> Contender:
    """FlexAttention, compiled for the case."""
    import torch
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    if machine.kind == "cpu":
        raise Skip("compiled on a GPU only")
    torch._dynamo.reset()
    q, k, v, do = (_to_torch(arrays[name]).transpose(1, 2) for name in _NAMES)
    shift = case.seqlen_k - case.seqlen_q
    left, right = case.window if case.window is not None else (None, None)
    left = case.seqlen_k + case.seqlen_q if left is None else left
    right = case.seqlen_k + case.seqlen_q if right is None else right
    right = min(right, 0) if case.causal else right
    block_mask = None
    if case.causal or case.window is not None:
        block_mask = create_block_mask(
            lambda b, h, i, j: (j <= i + shift + right) & (j >= i + shift - left),
            None,
            None,
            case.seqlen_q,
            case.seqlen_k,
            device="cuda",
        )
    compiled = torch.compile(flex_attention, dynamic=False)
    grouped = case.heads_q != case.heads_k

    def attend() -> Any:
        return compiled(q, k, v, block_mask=block_mask, enable_gqa=grouped)

    return _torch_contender(machine, attend, (q, k, v), do)


def jax_attention(machine: Machine, case: Case, arrays: Arrays) -> Contender:
    """jax.nn.dot_product_attention, by cuDNN on a GPU where it takes the case, else by XLA."""
    import jax

    if case.dtype == "float64":
        raise Skip("float64 is off in JAX by default")
    if case.causal and case.seqlen_q != case.seqlen_k:
        raise Skip("causal is aligned top-left")
    if case.window is not None and None in case.window:
        raise Skip("a window needs both sides")
    q, k, v, do = (_to_jax(arrays[name]) for name in _NAMES)
    half = case.dtype in ("float16", "bfloat16")
    library = "cudnn" if machine.kind == "cuda" and half else "xla"

    def attend(q: Any, k: Any, v: Any) -> Any:
        return jax.nn.dot_product_attention(
            q,
            k,
            v,
            is_causal=case.causal,
            local_window_size=case.window,
            implementation=library,
        )

    forward = jax.jit(attend)
    # The pullback is a pytree of what forward keeps, so it can leave one jit and enter another.
    _, pullback = jax.jit(lambda q, k, v: jax.vjp(attend, q, k, v))(q, k, v)
    backward = jax.jit(lambda pull, do: pull(do))

    def numbers(array: Any) -> Any:
        return machine.xp.asarray(np.asarray(array.astype(np.float32)))

    return Contender(
        forward=lambda: forward(q, k, v),
        backward=lambda: backward(pullback, do),
        numbers=numbers,
        wait=jax.block_until_ready,
    )


_NAMES = ("q", "k", "v", "do")


def _torch_contender(
    machine: Machine, attend: Callable[[], Any], inputs: tuple[Any, ...], do: Any
) -> Contender:
    """Forward without a graph, backward through one that is kept."""
    import torch

    for tensor in inputs:
        tensor.requires_grad_(True)
    kept = attend()

    def forward() -> Any:
        with torch.no_grad():
            return attend()

    def numbers(tensor: Any) -> Any:
        wide = tensor.detach().transpose(1, 2).to(torch.float64).contiguous()
        return machine.xp.from_dlpack(wide)

    return Contender(
        forward=forward,
        backward=lambda: torch.autograd.grad(kept, inputs, do, retain_graph=True),
        numbers=numbers,
    )


def _to_torch(array: Any) -> Any:
    """The same memory as a PyTorch tensor; bfloat16 travels as int16."""
    import torch

    if array.dtype.name == "bfloat16":
        return torch.from_dlpack(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_dlpack(array)


def _to_jax(array: Any) -> Any:
    """A JAX array of the same numbers; bfloat16 travels as int16."""
    import jax

    if array.dtype.name == "bfloat16":
        bits = jax.numpy.from_dlpack(array.view(np.int16))
        return jax.lax.bitcast_convert_type(bits, jax.numpy.bfloat16)
    return jax.numpy.from_dlpack(array)


GPU_ONLY = ("torch CUDNN", "torch EFFICIENT", "torch flex")
ALL: dict[str, Callable[[Machine, Case, Arrays], Contender]] = {
    "cuflash": cuflash,
    "standard": standard,
    "torch FLASH": sdpa("FLASH"),
    "torch CUDNN": sdpa("CUDNN"),
    "torch EFFICIENT": sdpa("EFFICIENT"),
    "torch MATH": sdpa("MATH"),
    "torch flex": flex,
    "jax": jax_attention,
}


def installed(machine: Machine, wanted: list[str] | None, quick: bool = False) -> list[str]:
    """Names of the contenders this machine can try; ``wanted`` are parts of names."""
    names = []
    for name in ALL:
        library = name.split()[0]
        if library in ("torch", "jax") and importlib.util.find_spec(library) is None:
            continue
        if name == "standard" and machine.kind != "cpu":
            continue
        if name in GPU_ONLY and machine.kind == "cpu":
            continue
        if quick and name == "torch flex" and wanted is None:
            continue  # compiling it takes longer than all else
        if name == "cuflash" or wanted is None or any(w.lower() in name.lower() for w in wanted):
            names.append(name)
    return names
