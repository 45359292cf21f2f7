"""The definition of attention in float64, forward and backward, formula by formula.

It is the oracle of every test and the first file to read. It holds whole N x N arrays, loops over
heads, and does nothing clever. Equations are numbered as the tests and kernels cite them.

    (1)  x = scale q k^T
    (2)  s = x where the mask allows the pair, -inf elsewhere
    (3)  lse = log sum_j exp(s)                    -inf in a row that sees no key
    (4)  o = sum_j exp(s - lse) v                  0 in such a row
    (5)  p = exp(min(s - lse, 0))
    (6)  dv = p^T do
    (7)  delta = <do, o> - dlse
    (8)  ds = p (do v^T - delta)
    (9)  dq = scale ds k
    (10) dk = scale ds^T q

A masked pair is left out of every sum, so what it holds (NaN, inf) reaches nothing.
"""

from __future__ import annotations

from typing import Any

import numpy as np


def forward(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, *, scale: float, allowed: np.ndarray | None = None,
    dtype: Any = np.float64,
) -> tuple[np.ndarray, np.ndarray]:  # fmt: skip
    """Equations 1 to 4.

    Parameters
    ----------
    q : (batch, seqlen_q, heads_q, head_dim); k, v : (batch, seqlen_k, heads_k, head_dim or _v)
    allowed : bool, broadcast to (batch, heads_q, seqlen_q, seqlen_k); None allows all pairs
    dtype : float64, or longdouble to judge float64 results

    Returns
    -------
    o : (batch, seqlen_q, heads_q, head_dim_v); lse : (batch, heads_q, seqlen_q); both in `dtype`
    """
    batch, seqlen_q, heads_q, _ = q.shape
    o = np.zeros((batch, seqlen_q, heads_q, v.shape[3]), dtype)
    lse = np.full((batch, heads_q, seqlen_q), -np.inf, dtype)
    for b, h, q_h, k_h, v_h, mask in _heads(q, k, v, allowed, dtype):
        s = _scores(q_h, k_h, scale, mask)  # (1) (2)
        for row in np.flatnonzero(mask.any(axis=1)):
            seen = mask[row]
            top = s[row, seen].max()
            if top == -np.inf:
                continue
            e = np.exp(s[row, seen] - top)
            lse[b, h, row] = top + np.log(e.sum())  # (3)
            o[b, row, h] = (e / e.sum()) @ v_h[seen]  # (4)
    return o, lse


def backward(
    do: np.ndarray, q: np.ndarray, k: np.ndarray, v: np.ndarray, *, scale: float,
    allowed: np.ndarray | None = None, dlse: np.ndarray | None = None, dtype: Any = np.float64,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:  # fmt: skip
    """Equations 5 to 10; o and lse are computed again here in `dtype`.

    Parameters
    ----------
    do : (batch, seqlen_q, heads_q, head_dim_v); dlse : (batch, heads_q, seqlen_q) or None
    the rest as in `forward`

    Returns
    -------
    dq, dk, dv : shapes of q, k, v, in `dtype`; dk and dv are sums over the heads of a group
    """
    o, lse = forward(q, k, v, scale=scale, allowed=allowed, dtype=dtype)
    group = q.shape[2] // max(k.shape[2], 1)
    dq, dk, dv = (np.zeros(array.shape, dtype) for array in (q, k, v))
    for b, h, q_h, k_h, v_h, mask in _heads(q, k, v, allowed, dtype):
        do_h = do[b, :, h].astype(dtype)
        s = _scores(q_h, k_h, scale, mask)
        for row in np.flatnonzero(lse[b, h] != -np.inf):
            seen = np.flatnonzero(mask[row])
            p = np.exp(np.minimum(s[row, seen] - lse[b, h, row], 0))  # (5)
            dv[b, seen, h // group] += np.outer(p, do_h[row])  # (6)
            delta = do_h[row] @ o[b, row, h]  # (7)
            if dlse is not None:
                delta = delta - dlse[b, h, row].astype(dtype)
            ds = p * (v_h[seen] @ do_h[row] - delta)  # (8)
            dq[b, row, h] = scale * (ds @ k_h[seen])  # (9)
            dk[b, seen, h // group] += scale * np.outer(ds, q_h[row])  # (10)
    return dq, dk, dv


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


def _scores(q: np.ndarray, k: np.ndarray, scale: float, mask: np.ndarray) -> np.ndarray:
    with np.errstate(invalid="ignore", over="ignore"):
        x = (q * q.dtype.type(scale)) @ k.T
    return np.where(mask, x, -np.inf)
