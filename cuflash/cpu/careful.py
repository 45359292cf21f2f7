"""Tiles whose plain result is not finite, computed again by selection and in wider types.

The CPU back end calls these functions only where one test of a product failed, so they are written
to be right, not fast. Each tries the type of the call first (enough where the cause is what a
masked pair holds) and then the next wider one (where a finite answer needs a sum that overflows).
For float64 the wider type is longdouble; where a platform makes that float64 again, float64 dot
products that overflow although scale * dot would not stay infinite.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

Loader = Callable[[np.dtype], np.ndarray]


def wider(dtype: np.dtype) -> np.dtype:
    """Return the float type after `dtype`."""
    return np.dtype(np.float64 if dtype == np.float32 else np.longdouble)


def is_finite(x: np.ndarray) -> bool:
    """Return whether no element is NaN or infinite, without a temporary array."""
    return bool(x.min(initial=0) > -np.inf and x.max(initial=0) < np.inf)


def scores(
    load_q: Loader,
    load_k: Loader,
    score: Callable[[np.ndarray], np.ndarray],
    allowed: np.ndarray | None,
    dtype: np.dtype,
) -> np.ndarray:
    """Return score(scale * q k^T), -inf where not `allowed`, (heads, rows, columns) in `dtype`.

    load_q, load_k : return the tile in a type, (heads, rows or columns, head_dim), q times scale
    """
    for kind in (dtype, wider(dtype)):
        x = load_q(kind) @ load_k(kind).transpose(0, 2, 1)
        if is_finite(x if allowed is None else x[allowed]):
            break
    s = score(x).astype(dtype)
    if allowed is not None:
        s[~allowed] = -np.inf
    return s


def weigh(
    weights: np.ndarray, load: Loader, seen: np.ndarray | None, dtype: np.dtype
) -> np.ndarray:
    """Return weights @ x where row c of x counts in row r only where `seen`.

    weights : (heads, rows, columns), 0 where not seen
    load : returns x, (heads, columns, n), in a type
    """
    for kind in (dtype, wider(dtype)):
        result = _weigh(weights.astype(kind, copy=False), load(kind), seen)
        if is_finite(result):
            break
    return result


def _weigh(weights: np.ndarray, x: np.ndarray, seen: np.ndarray | None) -> np.ndarray:
    """Return the product in one type: rows of x that are not finite join one by one."""
    sound = np.isfinite(x).all(axis=-1)
    result = weights @ np.where(sound[..., None], x, 0)
    for head, column in np.argwhere(~sound):
        rows = slice(None) if seen is None else seen[head, :, column]
        result[head, rows] += weights[head, rows, column, None] * x[head, column]
    return result


def gradients(
    loaders: tuple[Loader, Loader, Loader, Loader],
    score: Callable[[np.ndarray], np.ndarray],
    unscore: Callable[..., np.ndarray],
    lse: np.ndarray,
    delta: np.ndarray,
    allowed: np.ndarray | None,
    dtype: np.dtype,
    add: bool,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return what one tile adds to dq, dk / scale and dv; see `reference.backward`.

    loaders : of do, q, k and v; k comes times scale
    score, unscore : from x to s, and from x and ds to dx; the latter `add`s to Params' gradients
    lse, delta : (heads, rows, 1); lse +inf in a row that sees no key
    """
    for kind in (dtype, wider(dtype)):
        do, q, k, v = (load(kind) for load in loaders)
        x = q @ k.transpose(0, 2, 1)
        s = score(x)
        seen = ~np.isneginf(s) & (lse != np.inf)
        if allowed is not None:
            seen &= allowed
        p = np.where(seen, np.exp(np.minimum(s - lse, 0)), 0)
        dp = do @ v.transpose(0, 2, 1)
        ds = np.where(seen, p * (dp - delta), 0)
        dx = unscore(x, ds, add=False)
        seen_t = seen.transpose(0, 2, 1)
        result = (
            _weigh(dx, k, seen),
            _weigh(dx.transpose(0, 2, 1), q, seen_t),
            _weigh(p.transpose(0, 2, 1), do, seen_t),
        )
        if is_finite(x[seen]) and all(is_finite(x) for x in result):
            break
    if add:
        unscore(x, ds, add=True)
    return result
