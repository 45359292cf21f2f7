"""The backward pass on the CPU: Dao 2023, arXiv:2307.08691, Algorithm 2, in NumPy."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from cuflash.cpu import careful
from cuflash.cpu.careful import is_finite
from cuflash.cpu.tiles import SLAB_ROWS, Call, Part, times

if TYPE_CHECKING:
    from cuflash.expr.bounds import TileMask
    from cuflash.problem import Problem


def backward(
    problem: Problem,
    mask: TileMask | None,
    do: np.ndarray,
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    o: np.ndarray,
    lse: np.ndarray,
    dlse: np.ndarray | None,
    dq: np.ndarray,
    dk: np.ndarray,
    dv: np.ndarray,
) -> None:
    """Write dq, dk and dv: `reference.backward`, tile by tile.

    One pass over the key tiles, five products a tile; dq is summed over the pass. The order of
    every sum is fixed, so the gradients are bit-reproducible.

    Parameters
    ----------
    do, q, k, v, o, dq, dk, dv : (batch, seqlen, heads, head_dim) views of any strides
    lse, dlse : (batch, heads_q, seqlen_q); dlse may be None
    """
    call = Call(problem, mask)
    with np.errstate(all="ignore"):
        for item, heads_k in call.slabs(SLAB_ROWS):
            terms = _row_terms(call, item, call.query_heads(heads_k), do, o, lse, dlse)
            for total in (call.dtype, careful.wider(call.dtype)):
                if _backward_slab(call, item, heads_k, (do, q, k, v), terms, (dq, dk, dv), total):
                    break


def _row_terms(
    call: Call,
    item: int,
    heads: slice,
    do: np.ndarray,
    o: np.ndarray,
    lse: np.ndarray,
    dlse: np.ndarray | None,
) -> tuple[np.ndarray, np.ndarray]:
    """Return lse, +inf in a row that sees no key, and delta in the wider type, (heads, rows)."""
    row_lse = lse[item, heads].astype(call.dtype)
    empty = np.isneginf(row_lse)
    row_lse[empty] = np.inf
    delta = np.empty(row_lse.shape, careful.wider(call.dtype))
    for rows in call.tiles_q:
        # delta = <do, o> - dlse
        product = do[item, rows, heads].astype(delta.dtype)
        product *= o[item, rows, heads]
        delta[:, rows] = product.sum(axis=-1).T
    if dlse is not None:
        delta -= dlse[item, heads]
    delta[empty] = 0
    return row_lse, delta


def _backward_slab(
    call: Call,
    item: int,
    heads_k: slice,
    operands: tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray],
    terms: tuple[np.ndarray, np.ndarray],
    gradients: tuple[np.ndarray, np.ndarray, np.ndarray],
    total: np.dtype,
) -> bool:
    """Write the gradients of one slab, summed in type `total`; return whether all are finite."""
    dq, dk, dv = gradients
    k, v = operands[2:]
    heads_q = call.query_heads(heads_k)
    dq_heads = dq[item, :, heads_q].transpose(1, 0, 2)
    dq_sum = dq_heads if dq.dtype == total else np.empty(dq_heads.shape, total)
    dq_sum[...] = 0
    sound = True
    for tile, columns in enumerate(call.tiles_k):
        shape = (heads_k.stop - heads_k.start, columns.stop - columns.start)
        dk_sum = np.zeros((*shape, k.shape[3]), total)
        dv_sum = np.zeros((*shape, v.shape[3]), total)
        for part in call.parts(item, heads_k):
            heads = slice(part.heads_q.start - heads_q.start, part.heads_q.stop - heads_q.start)
            k_tile = part.keys(k, columns, call.dtype, call.scale, "k")
            v_tile = part.keys(v, columns, call.dtype, name="v")
            for rows, is_cut in call.visits(part.place, tile, of_key=True):
                lse, delta = (x[heads, rows].reshape(shape[0], -1, 1) for x in terms)
                dq_tile, dk_tile, dv_tile = _differentiate(
                    part, operands, (k_tile, v_tile), (lse, delta), (rows, columns), is_cut
                )
                dq_sum[heads, rows] += part.unstack(dq_tile)
                dk_sum += dk_tile
                dv_sum += dv_tile
        times(dk_sum, call.scale)  # dk = scale dS^T Q; dq has its scale from k
        sound = sound and is_finite(dk_sum) and is_finite(dv_sum)
        dk[item, columns, heads_k] = dk_sum.transpose(1, 0, 2)
        dv[item, columns, heads_k] = dv_sum.transpose(1, 0, 2)
    if dq_sum is not dq_heads:
        dq_heads[...] = dq_sum
    return sound and is_finite(dq_sum)


def _differentiate(
    part: Part,
    operands: tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray],
    key_tiles: tuple[np.ndarray, np.ndarray],
    terms: tuple[np.ndarray, np.ndarray],
    place: tuple[slice, slice],
    is_cut: bool,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return what one tile adds to dq, dk / scale and dv. key_tiles: scale * k, and v."""
    call, (do, q, k, v), (k_tile, v_tile), (rows, columns) = part.call, operands, key_tiles, place
    dtype, (lse, delta) = call.dtype, terms
    q_tile = part.queries(q, rows, dtype, name="q")
    do_tile = part.queries(do, rows, dtype, name="do")
    shape = (*q_tile.shape[:2], k_tile.shape[1])
    # S = scale Q K^T; P = exp(min(S - lse, 0)), 0 where masked
    s = np.matmul(q_tile, k_tile.transpose(0, 2, 1), out=call.buffer("s", *shape))
    sound = is_finite(s)
    s -= lse
    np.minimum(s, 0, out=s)
    p = np.exp(s, out=s)
    allowed = part.allowed(rows, columns) if is_cut else None
    if allowed is not None:
        p_rows = part.unstack(p)
        p_rows *= allowed  # p <= 1 here or NaN, and NaN shows in the products
    # dV = P^T dO; dP = dO V^T; dS = P (dP - delta)
    dv_tile = np.matmul(p.transpose(0, 2, 1), do_tile, out=call.buffer("dv", *v_tile.shape))
    ds = np.matmul(do_tile, v_tile.transpose(0, 2, 1), out=call.buffer("ds", *shape))
    ds -= delta.astype(dtype)
    ds *= p
    # dK = scale dS^T Q; dQ = scale dS K
    dk_tile = np.matmul(ds.transpose(0, 2, 1), q_tile, out=call.buffer("dk", *k_tile.shape))
    dq_tile = np.matmul(ds, k_tile, out=call.buffer("dq", *q_tile.shape))
    result = dq_tile, dk_tile, dv_tile
    if sound and all(is_finite(x) for x in result):
        return result
    loaders = (
        partial(part.queries, do, rows),
        partial(part.queries, q, rows),
        partial(part.keys, k, columns, scale=call.scale),
        partial(part.keys, v, columns),
    )
    return careful.gradients(loaders, lse, delta, part.restack(allowed, s), dtype)
