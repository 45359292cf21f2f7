"""Numbers before times: each result against the definition in float64, on one group of heads."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from .cases import Case

LIMITS = {"float16": 5e-3, "bfloat16": 3e-2, "float32": 1e-4, "float64": 1e-10}
ROWS = 1024  # rows of the score matrix at a time


def group(case: Case) -> tuple[int, slice, int]:
    """Batch item, query heads and key head that are checked: the last of each."""
    size = case.heads_q // case.heads_k
    return case.batch - 1, slice(case.heads_q - size, case.heads_q), case.heads_k - 1


def cut(case: Case, name: str, array: Any) -> Any:
    """The checked part of an array, (seqlen, heads, head_dim) or (seqlen, head_dim) of a key's."""
    item, queries, key = group(case)
    return array[item, :, key if name in ("k", "v", "dk", "dv") else queries]


def wide(array: Any) -> Any:
    """The same numbers in float64; by way of float32, which every 16 bit type converts to."""
    narrow = array.dtype.itemsize < 4
    return (array.astype(np.float32) if narrow else array).astype(np.float64)


def definition(xp: Any, case: Case, arrays: dict[str, Any]) -> dict[str, Any]:
    """o, dq, dk, dv of the checked group in float64, a block of rows at a time."""
    q, k, v, do = (wide(cut(case, name, arrays[name])) for name in "q k v do".split())
    scale = 1 / math.sqrt(case.head_dim)
    o, dq = xp.zeros(q.shape), xp.zeros(q.shape)
    dk, dv = xp.zeros(k.shape), xp.zeros(v.shape)
    columns = xp.arange(case.seqlen_k)
    for start in range(0, case.seqlen_q, ROWS):
        rows = np.arange(start, min(start + ROWS, case.seqlen_q))
        first, stop = (xp.asarray(edge)[:, None] for edge in case.key_range(rows))
        masked = (columns < first) | (columns >= stop)
        here = slice(start, start + ROWS)
        for head in range(q.shape[1]):
            s = q[here, head] @ k.T * scale
            s[masked] = -math.inf
            p = xp.exp(s - s.max(axis=1, keepdims=True))
            p /= p.sum(axis=1, keepdims=True)
            o[here, head] = p @ v
            dv += p.T @ do[here, head]
            delta = (do[here, head] * o[here, head]).sum(axis=1, keepdims=True)
            ds = p * (do[here, head] @ v.T - delta) * scale
            dq[here, head] = ds @ k
            dk += ds.T @ q[here, head]
    return {"o": o, "dq": dq, "dk": dk, "dv": dv}


def error(xp: Any, case: Case, name: str, result: Any, exact: dict[str, Any]) -> float:
    """Norm of the difference over norm of the truth; NaN where the result has one."""
    mine = wide(cut(case, name, result))
    return float(xp.linalg.norm(mine - exact[name]) / xp.linalg.norm(exact[name]))
