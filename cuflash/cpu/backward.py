"""The backward pass on the CPU: Dao 2023, arXiv:2307.08691, Algorithm 2, in NumPy."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from cuflash.cpu import careful
from cuflash.cpu.careful import is_finite
from cuflash.cpu.tiles import SLAB_ROWS, Call, Part, times

if TYPE_CHECKING:
    from cuflash.expr.bounds import TileMask
    from cuflash.expr.scoring import TileScore
    from cuflash.problem import Problem


def backward(
    problem: Problem,
    mask: TileMask | None,
    score: TileScore | None,
    sink: np.ndarray | None,
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
) -> np.ndarray | None:
    """Write dq, dk and dv and return dsink: `reference.backward`, tile by tile.

    One pass over the key tiles, five products a tile; dq is summed over the pass. The order of
    every sum is fixed, so the gradients are bit-reproducible.

    Parameters
    ----------
    do, q, k, v, o, dq, dk, dv : (batch, seqlen, heads, head_dim) views of any strides
    lse, dlse : (batch, heads_q, seqlen_q); dlse may be None
    score : its `gradients` receive what its Params get
    sink, dsink : (heads_q,) or None
    """
    call = Call(problem, mask, score, sink)
    dsink = None if sink is None else np.zeros(sink.shape, careful.wider(call.dtype))
    with np.errstate(all="ignore"):
        for item, heads_k in call.slabs(SLAB_ROWS):
            heads_q = call.query_heads(heads_k)
            row_lse, delta = _row_terms(call, item, heads_q, do, o, lse, dlse)
            if sink is not None and dsink is not None:
                # dsink = - sum exp(sink - lse) delta
                share = np.exp(np.minimum(sink[heads_q, None] - row_lse, 0).astype(delta.dtype))
                dsink[heads_q] -= (share * delta).sum(axis=1)
            for total in (call.dtype, careful.wider(call.dtype)):
                slab = _Slab(call, item, heads_k, (do, q, k, v), (row_lse, delta), total)
                if slab.run(dq, dk, dv):
                    break
    return dsink


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
        o_rows = o[item, rows, heads].astype(delta.dtype)
        product = do[item, rows, heads].astype(delta.dtype) * o_rows
        product[o_rows == 0] = 0  # what do holds in a row that sees no key does not count
        delta[:, rows] = product.sum(axis=-1).T
    if dlse is not None:
        delta -= dlse[item, heads]
    delta[empty] = 0
    return row_lse, delta


@dataclass
class _Slab:
    """Key heads of one batch item: one pass over their keys, sums of the type `total`."""

    call: Call
    item: int
    heads_k: slice
    operands: tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]  # do, q, k, v
    terms: tuple[np.ndarray, np.ndarray]  # lse, delta: (query heads, rows)
    total: np.dtype

    def run(self, dq: np.ndarray, dk: np.ndarray, dv: np.ndarray) -> bool:
        """Write the gradients of these heads; return whether all are finite."""
        call, item, heads_k = self.call, self.item, self.heads_k
        k, v = self.operands[2:]
        heads_q = call.query_heads(heads_k)
        dq_heads = dq[item, :, heads_q].transpose(1, 0, 2)
        dq_sum = dq_heads if dq.dtype == self.total else np.empty(dq_heads.shape, self.total)
        dq_sum[...] = 0
        sound = True
        for tile, columns in enumerate(call.tiles_k):
            shape = (heads_k.stop - heads_k.start, columns.stop - columns.start)
            dk_sum = np.zeros((*shape, k.shape[3]), self.total)
            dv_sum = np.zeros((*shape, v.shape[3]), self.total)
            for part in call.parts(item, heads_k):
                heads = slice(part.heads_q.start - heads_q.start, part.heads_q.stop - heads_q.start)
                k_tile = part.keys(k, columns, call.dtype, call.scale, "k")
                v_tile = part.keys(v, columns, call.dtype, name="v")
                for rows, is_cut in call.visits(part.place, tile, of_key=True):
                    terms = tuple(x[heads, rows].reshape(shape[0], -1, 1) for x in self.terms)
                    dq_tile, dk_tile, dv_tile = self.differentiate(
                        part, (k_tile, v_tile), terms, (rows, columns), is_cut
                    )
                    dq_sum[heads, rows] += part.unstack(dq_tile)
                    dk_sum += dk_tile
                    dv_sum += dv_tile
            times(dk_sum, call.scale)  # dk = scale dX^T Q; dq has its scale from k
            sound = sound and is_finite(dk_sum) and is_finite(dv_sum)
            dk[item, columns, heads_k] = dk_sum.transpose(1, 0, 2)
            dv[item, columns, heads_k] = dv_sum.transpose(1, 0, 2)
        if dq_sum is not dq_heads:
            dq_heads[...] = dq_sum
        return sound and is_finite(dq_sum)

    def differentiate(
        self,
        part: Part,
        key_tiles: tuple[np.ndarray, np.ndarray],
        terms: tuple[np.ndarray, ...],
        place: tuple[slice, slice],
        is_cut: bool,
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return what one tile adds to dq, dk / scale and dv. key_tiles: scale * k, and v."""
        call, (k_tile, v_tile), (rows, columns) = self.call, key_tiles, place
        dtype, (lse, delta), (do, q, k, v) = call.dtype, terms, self.operands
        add = self.total == dtype  # a second run, in a wider type, adds nothing to Params
        q_tile = part.queries(q, rows, dtype, name="q")
        do_tile = part.queries(do, rows, dtype, name="do")
        shape = (*q_tile.shape[:2], k_tile.shape[1])
        # X = scale Q K^T; S = score(X); P = exp(min(S - lse, 0)), 0 where masked
        x = np.matmul(q_tile, k_tile.transpose(0, 2, 1), out=call.buffer("x", *shape))
        sound = is_finite(x)
        p = x if call.score is None else call.buffer("s", *shape)
        np.subtract(part.score(rows, columns, x), lse, out=p)
        np.minimum(p, 0, out=p)
        np.exp(p, out=p)
        allowed = part.allowed(rows, columns) if is_cut else None
        if allowed is not None:
            p_rows = part.unstack(p)
            p_rows *= allowed  # p <= 1 here or NaN, and NaN shows in the products
        # dV = P^T dO; dP = dO V^T; dS = P (dP - delta); dX = dS score'(X)
        dv_tile = np.matmul(p.transpose(0, 2, 1), do_tile, out=call.buffer("dv", *v_tile.shape))
        ds = np.matmul(do_tile, v_tile.transpose(0, 2, 1), out=call.buffer("ds", *shape))
        ds -= delta.astype(dtype)
        ds *= p
        if call.score is not None and sound:
            sound = is_finite(ds) and is_finite(dv_tile)
            ds[...] = part.unscore(rows, columns, x, ds, add=add and sound)
            add = add and not sound
        # dK = scale dX^T Q; dQ = scale dX K
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
        score, unscore = partial(part.score, rows, columns), partial(part.unscore, rows, columns)
        seen = part.restack(allowed, p)
        return careful.gradients(loaders, score, unscore, lse, delta, seen, dtype, add)
