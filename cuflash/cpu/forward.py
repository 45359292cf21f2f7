"""The forward pass on the CPU: Dao 2023, arXiv:2307.08691, Algorithm 1, in NumPy."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from cuflash.cpu import careful
from cuflash.cpu.careful import is_finite
from cuflash.cpu.tiles import Call, Part, Visits

if TYPE_CHECKING:
    from cuflash.expr.bounds import TileMask
    from cuflash.expr.scoring import TileScore
    from cuflash.problem import Problem


def forward(
    problem: Problem,
    mask: TileMask | None,
    score: TileScore | None,
    sink: np.ndarray | None,
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    o: np.ndarray,
    lse: np.ndarray | None,
) -> None:
    """Write o and, unless it is None, lse: `reference.forward`, tile by tile.

    Parameters
    ----------
    q, k, v, o : (batch, seqlen, heads, head_dim) views of any strides
    lse : (batch, heads_q, seqlen_q) in the accumulation type, or None
    sink : (heads_q,) in the accumulation type, or None
    """
    call = Call(problem, mask, score, sink)
    with np.errstate(all="ignore"):
        for tile, rows in enumerate(call.tiles_q):
            asked, visits = None, []
            for item, heads_k in call.slabs():
                for part in call.parts(item, heads_k):
                    if part.place != asked:
                        asked, visits = part.place, call.visits(part.place, tile, of_key=False)
                    for total in (call.dtype, careful.wider(call.dtype)):
                        o_sum, row_max, row_sum = _attend(part, (q, k, v), rows, visits, total)
                        if is_finite(o_sum):
                            break
                    row_sum[row_sum == 0] = 1  # a row without key and sink: o = 0, lse = -inf
                    o_sum /= row_sum
                    o[item, rows, part.heads_q] = part.unstack(o_sum).transpose(1, 0, 2)
                    if lse is not None:
                        row_lse = part.unstack(row_max + np.log(row_sum))[..., 0]
                        lse[item, part.heads_q, rows] = row_lse


def _attend(
    part: Part,
    operands: tuple[np.ndarray, np.ndarray, np.ndarray],
    rows: slice,
    visits: Visits,
    total: np.dtype,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return sum of exp(s - max) v in the type `total`, max and sum of exp(s - max) of each row."""
    call, (q, k, v) = part.call, operands
    dtype, scale = call.dtype, call.scale
    q_tile = part.queries(q, rows, dtype, scale, "q")
    stacked = q_tile.shape[:2]
    sink = part.sink(rows)
    row_max = np.full((*stacked, 1), -np.inf, dtype) if sink is None else sink
    row_sum = (row_max > -np.inf).astype(dtype)
    o_sum = np.zeros((*stacked, v.shape[3]), total)
    o_tile = call.buffer("o", *o_sum.shape)
    for columns, is_cut in visits:
        k_tile = part.keys(k, columns, dtype, name="k")
        v_tile = part.keys(v, columns, dtype, name="v")
        # X = scale Q K^T, S = score(X)
        shape = (*stacked, k_tile.shape[1])
        x = np.matmul(q_tile, k_tile.transpose(0, 2, 1), out=call.buffer("s", *shape))
        # What a score makes of an infinity may be finite; without one, the maximum shows +inf.
        sound = x.min() > -np.inf and (call.score is None or x.max() < np.inf)
        s = x
        if call.score is not None:
            s[...] = part.score(rows, columns, x)
        allowed = part.allowed(rows, columns) if is_cut else None
        if allowed is not None:
            # Selection: a minimum with +inf or -inf. A masked copy takes up to 14 times as long
            # (its branches are predicted badly): 545 us against 39 us for 256 x 256 random pairs.
            s_rows = part.unstack(s)
            np.minimum(s_rows, call.ceiling(allowed), out=s_rows)
        tile_max = s.max(axis=-1, keepdims=True)
        seen = None
        if not (sound and tile_max.max() < np.inf):
            s[...] = careful.scores(
                partial(part.queries, q, rows, scale=scale),
                partial(part.keys, k, columns),
                partial(part.score, rows, columns),
                part.restack(allowed, s),
                dtype,
            )
            tile_max = s.max(axis=-1, keepdims=True)
            seen = ~np.isneginf(s)
        elif call.score is not None and s.min() == -np.inf:
            # A score of -inf hides what v holds, as a mask does.
            seen = ~np.isneginf(s)
        new_max = np.maximum(row_max, tile_max)
        # P = exp(S - max); while a row has seen no key, exp(-inf - 0) = 0
        reference = np.where(np.isneginf(new_max), 0, new_max)
        s -= reference
        p = np.exp(s, out=s)
        kept = np.exp(row_max - reference)
        row_sum *= kept
        row_sum += p @ call.ones[: p.shape[2]]
        # O = O exp(old max - max) + P V
        o_new = np.matmul(p, v_tile, out=o_tile)
        if not is_finite(o_new):
            seen = part.restack(allowed, s) if seen is None else seen
            o_new = careful.weigh(p, partial(part.keys, v, columns), seen, dtype)
        o_sum *= kept
        o_sum += o_new
        row_max = new_max
    return o_sum, row_max, row_sum
