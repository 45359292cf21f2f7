"""Orders of tokens: permutations that make sparse masks dense in tiles.

Attention does not care in which order tokens are stored, as long as masks know each token's logical
index: give `positions=order.positions`. Neighbours on a grid that are stored together, or global
tokens put first, fill few tiles instead of many.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import numpy as np

__all__ = ["Order", "first", "tiles"]


class Order:
    """A permutation of the tokens of a sequence.

    Attributes
    ----------
    positions : int32 array (n,), the logical index of each stored token; for `positions=`
    """

    def __init__(self, positions: np.ndarray) -> None:
        self.positions = np.ascontiguousarray(positions, dtype=np.int32)
        self.positions.flags.writeable = False
        self._inverse = np.argsort(positions, kind="stable").astype(np.int32)

    def __len__(self) -> int:
        return self.positions.size

    def apply(self, x: Any, axis: int | None = None) -> Any:
        """The array with its tokens in this order; a copy, in the library of x.

        Parameters
        ----------
        x : array of any library
        axis : axis of the tokens; None is 1 for 4-D arrays (batch, seqlen, heads, dim), else 0

        Raises
        ------
        ValueError: the axis has another length than the order.
        """
        return self._take(x, self.positions, axis)

    def undo(self, x: Any, axis: int | None = None) -> Any:
        """The array back in logical order: `undo(apply(x))` is x. Parameters as for `apply`."""
        return self._take(x, self._inverse, axis)

    def _take(self, x: Any, index: np.ndarray, axis: int | None) -> Any:
        axis = (1 if x.ndim == 4 else 0) if axis is None else axis % x.ndim
        if x.shape[axis] != len(self):
            raise ValueError(
                f"axis {axis} of x must have the {len(self)} tokens of the order, got {x.shape}"
            )
        root = type(x).__module__.partition(".")[0]
        if root == "torch":
            index = sys.modules["torch"].as_tensor(index.astype(np.int64), device=x.device)
        elif root == "cupy":
            index = sys.modules["cupy"].asarray(index)
        return x[(slice(None),) * axis + (index,)]


def tiles(shape: int | Sequence[int], tile: int | Sequence[int]) -> Order:
    """The points of a grid, box by box: a box's points are stored together.

    Parameters
    ----------
    shape : points of the grid along each axis, tokens in C order
    tile : points of a box along each axis; best with as many points as a kernel's tile has tokens
        (64 or 128), such as (4, 4, 8). Boxes at the far borders may be cut

    Returns
    -------
    Order

    Raises
    ------
    ValueError: another number of axes, or a size below 1.
    """
    shape = (shape,) if isinstance(shape, int) else tuple(int(n) for n in shape)
    tile = (tile,) * len(shape) if isinstance(tile, int) else tuple(int(n) for n in tile)
    if len(shape) != len(tile) or min((*shape, *tile), default=0) < 1:
        raise ValueError(f"tile must have an axis, of at least 1, for each of {shape}, got {tile}")
    points = np.indices(shape).reshape(len(shape), -1)
    boxes = [at // n for at, n in zip(points, tile)]
    # lexsort sorts by its last key first: boxes in C order, then points in C order (stable)
    return Order(np.lexsort(boxes[::-1]))


def first(indices: Any, n: int) -> Order:
    """The given tokens first, in their order, then all the others.

    Parameters
    ----------
    indices : integer array of tokens, such as the global ones, each once
    n : length of the sequence

    Returns
    -------
    Order

    Raises
    ------
    ValueError: an index outside of 0..n-1, or one that is there twice.
    """
    chosen = np.asarray(indices).ravel()
    if chosen.size and (chosen.min() < 0 or chosen.max() >= n):
        raise ValueError(f"indices must lie in 0..{n - 1}, got {chosen.min()}..{chosen.max()}")
    if np.unique(chosen).size != chosen.size:
        raise ValueError("indices must each be there once")
    rest = np.ones(n, bool)
    rest[chosen.astype(np.int64)] = False
    return Order(np.concatenate([chosen.astype(np.int64), np.flatnonzero(rest)]))
