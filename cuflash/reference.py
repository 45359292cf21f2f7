"""The definition of attention in float64, forward and backward, formula by formula.

It is the oracle of every test and the first file to read. It holds whole N x N arrays, loops over
heads, and does nothing clever. Equations are numbered as the tests and kernels cite them.

    (1)  x = scale q k^T
    (2)  s = score(x) where the mask allows the pair, -inf elsewhere; without a score s = x
    (3)  lse = log(sum_j exp(s) + exp(sink))       -inf in a row that sees no key and has no sink
    (4)  o = sum_j exp(s - lse) v                  0 in a row that sees no key
    (5)  p = exp(min(s - lse, 0))
    (6)  dv = p^T do
    (7)  delta = <do, o> - dlse
    (8)  ds = p (do v^T - delta)
    (9)  dq = scale dx k, dx = ds * score'(x)
    (10) dk = scale dx^T q
    (11) dsink = - sum_i exp(sink - lse) delta
    (12) d param = sum ds * d score / d param      left to the caller, who gets ds

A masked pair is left out of every sum, so what it holds (NaN, inf) reaches nothing. A pair whose
score is -inf counts as masked.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

Score = Callable[[np.ndarray, int, int], tuple[np.ndarray, np.ndarray]]
"""From x (seqlen_q, seqlen_k), batch item and head: s and the derivative ds/dx."""


class Gradients(NamedTuple):
    """What backward returns. dsink is None without a sink; ds is (batch, heads_q, pairs)."""

    dq: np.ndarray
    dk: np.ndarray
    dv: np.ndarray
    dsink: np.ndarray | None
    ds: np.ndarray


def forward(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, *, scale: float, allowed: np.ndarray | None = None,
    score: Score | None = None, sink: np.ndarray | None = None, dtype: Any = np.float64,
) -> tuple[np.ndarray, np.ndarray]:  # fmt: skip
    """Equations 1 to 4.

    Parameters
    ----------
    q : (batch, seqlen_q, heads_q, head_dim); k, v : (batch, seqlen_k, heads_k, head_dim or _v)
    allowed : bool, broadcast to (batch, heads_q, seqlen_q, seqlen_k); None allows all pairs
    score : what is done to x, or None; sink : (heads_q,) or None
    dtype : float64, or longdouble to judge float64 results

    Returns
    -------
    o : (batch, seqlen_q, heads_q, head_dim_v); lse : (batch, heads_q, seqlen_q); both in `dtype`
    """
    batch, seqlen_q, heads_q, _ = q.shape
    o = np.zeros((batch, seqlen_q, heads_q, v.shape[3]), dtype)
    lse = np.full((batch, heads_q, seqlen_q), -np.inf, dtype)
    for b, h, q_h, k_h, v_h, mask in _heads(q, k, v, allowed, dtype):
        s, _ = _scores(q_h, k_h, scale, mask, score, b, h)  # (1) (2)
        drain = -np.inf if sink is None else dtype(sink[h])
        for row in range(seqlen_q):
            seen = np.flatnonzero(s[row] != -np.inf)
            top = max([drain, *s[row, seen]])
            if top == -np.inf:
                continue
            e = np.exp(s[row, seen] - top)
            total = e.sum() + np.exp(drain - top)
            lse[b, h, row] = top + np.log(total)  # (3)
            o[b, row, h] = (e / total) @ v_h[seen]  # (4)
    return o, lse


def backward(
    do: np.ndarray, q: np.ndarray, k: np.ndarray, v: np.ndarray, *, scale: float,
    allowed: np.ndarray | None = None, score: Score | None = None, sink: np.ndarray | None = None,
    dlse: np.ndarray | None = None, dtype: Any = np.float64,
) -> Gradients:  # fmt: skip
    """Equations 5 to 11; o and lse are computed again here in `dtype`.

    Parameters
    ----------
    do : (batch, seqlen_q, heads_q, head_dim_v); dlse : (batch, heads_q, seqlen_q) or None
    the rest as in `forward`

    Returns
    -------
    Gradients : in `dtype`; dk and dv are sums over the heads of a group
    """
    o, lse = forward(q, k, v, scale=scale, allowed=allowed, score=score, sink=sink, dtype=dtype)
    group = q.shape[2] // max(k.shape[2], 1)
    dq, dk, dv = (np.zeros(array.shape, dtype) for array in (q, k, v))
    all_ds = np.zeros((*lse.shape, k.shape[1]), dtype)
    dsink = None if sink is None else np.zeros(q.shape[2], dtype)
    for b, h, q_h, k_h, v_h, mask in _heads(q, k, v, allowed, dtype):
        do_h = do[b, :, h].astype(dtype)
        s, slope = _scores(q_h, k_h, scale, mask, score, b, h)
        for row in np.flatnonzero(lse[b, h] != -np.inf):
            seen = np.flatnonzero(s[row] != -np.inf)
            p = np.exp(np.minimum(s[row, seen] - lse[b, h, row], 0))  # (5)
            dv[b, seen, h // group] += np.outer(p, do_h[row])  # (6)
            delta = do_h[row] @ o[b, row, h]  # (7)
            if dlse is not None:
                delta = delta - dlse[b, h, row].astype(dtype)
            if dsink is not None and sink is not None:
                dsink[h] -= np.exp(sink[h] - lse[b, h, row]) * delta  # (11)
            if not seen.size:
                continue
            ds = p * (v_h[seen] @ do_h[row] - delta)  # (8)
            all_ds[b, h, row, seen] = ds
            dx = ds * slope[row, seen]
            dq[b, row, h] = scale * (dx @ k_h[seen])  # (9)
            dk[b, seen, h // group] += scale * np.outer(dx, q_h[row])  # (10)
    return Gradients(dq, dk, dv, dsink, all_ds)


def _heads(q: Any, k: Any, v: Any, allowed: np.ndarray | None, dtype: Any) -> Any:
    """For each batch item and query head: q, k, v of that head, and its mask, all pairs."""
    batch, seqlen_q, heads_q, _ = q.shape
    seqlen_k = k.shape[1]
    group = heads_q // max(k.shape[2], 1)
    shape = (batch, heads_q, seqlen_q, seqlen_k)
    mask = np.broadcast_to(True if allowed is None else allowed, shape)
    for b in range(batch):
        for h in range(heads_q):
            parts = q[b, :, h], k[b, :, h // group], v[b, :, h // group]
            yield b, h, *(part.astype(dtype) for part in parts), mask[b, h]


def _scores(
    q: np.ndarray,
    k: np.ndarray,
    scale: float,
    mask: np.ndarray,
    score: Score | None,
    b: int,
    h: int,
) -> tuple[np.ndarray, np.ndarray]:
    """s of all pairs of a head, -inf where masked, and ds/dx."""
    with np.errstate(all="ignore"):
        x = (q * q.dtype.type(scale)) @ k.T
        s, slope = (x, np.ones_like(x)) if score is None else score(x, b, h)
    return np.where(mask, s, -np.inf), slope
