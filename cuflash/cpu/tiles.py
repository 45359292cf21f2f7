"""What all tiles of a call share: sizes, the mask's answers, and matrices that BLAS can read."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from cuflash.expr.bounds import TileMask
    from cuflash.problem import Problem

Place = tuple[int, int]  # (b, h) at which to ask the mask
Visits = list[tuple[slice, bool]]  # the tiles to compute, and whether the mask cuts them

NEVER, PERHAPS = 0, 1  # states of a tile; 2 is always

# Pairs of one tile, over all its heads: see `blocks`.
TILE_PAIRS = 256 * 512
# Rows (query heads x seqlen_q) whose dq may be summed at once for more than one key head.
SLAB_ROWS = 1 << 15


def blocks(problem: Problem) -> tuple[int, int]:
    """Return (block_q, block_k), the tile with which the caller builds the mask of `problem`.

    Without a mask wide tiles are best; with one, smaller tiles waste fewer masked pairs. The heads
    of a group are stacked, so block_q shrinks as the group grows.
    """
    group = problem.heads_q // max(problem.heads_k, 1)
    block_q = max(32, 256 // max(group, 1) // 16 * 16)
    return block_q, (512 if problem.mask is None else 256)


class Call:
    """What all tiles of one call share: sizes, the mask, and buffers that are used again."""

    def __init__(self, problem: Problem, mask: TileMask | None) -> None:
        block_q, block_k = blocks(problem)
        self.problem = problem
        self.mask: Any = mask
        self.group = problem.heads_q // max(problem.heads_k, 1)
        self.dtype = np.dtype(problem.accumulation)
        self.scale = problem.scale
        self.tiles_q = cut(problem.seqlen_q, block_q)
        self.tiles_k = cut(problem.seqlen_k, block_k)
        self.by_head = mask is not None and mask.depends_on_head
        self.ones = np.ones((block_k, 1), self.dtype)
        self._buffers: dict[str, np.ndarray] = {}

    def buffer(self, name: str, *shape: int) -> np.ndarray:
        """Return uninitialised memory, the same for each use of a name."""
        size = math.prod(shape)
        flat = self._buffers.get(name)
        if flat is None or flat.size < size:
            flat = self._buffers[name] = np.empty(size, self.dtype)
        return flat[:size].reshape(shape)

    def slabs(self, rows_limit: int | None = None) -> Iterator[tuple[int, slice]]:
        """Yield batch item and key heads: as many heads as fill one tile."""
        problem = self.problem
        rows = self.group * max((s.stop - s.start for s in self.tiles_q), default=1)
        columns = max((s.stop - s.start for s in self.tiles_k), default=1)
        count = min(TILE_PAIRS // max(rows * columns, 1), SLAB_ROWS // max(rows, columns) // 8)
        if rows_limit is not None:
            count = min(count, rows_limit // max(self.group * problem.seqlen_q, 1))
        count = 1 if self.by_head else max(count, 1)
        for item in range(problem.batch):
            for start in range(0, problem.heads_k, count):
                yield item, slice(start, min(start + count, problem.heads_k))

    def query_heads(self, heads_k: slice) -> slice:
        """Return the query heads that use the key heads `heads_k`."""
        return slice(heads_k.start * self.group, heads_k.stop * self.group)

    def parts(self, item: int, heads_k: slice) -> Iterator[Part]:
        """Yield the query heads of `heads_k` that share one answer of the mask."""
        heads_q = self.query_heads(heads_k)
        step = 1 if self.by_head else max(heads_q.stop - heads_q.start, 1)
        for start in range(heads_q.start, heads_q.stop, step):
            yield Part(self, item, heads_k, slice(start, start + step))

    def ceiling(self, allowed: np.ndarray) -> np.ndarray:
        """Return +inf where allowed and -inf where not, without a branch."""
        ceiling = self.buffer("ceiling", *allowed.shape)
        np.subtract(allowed, self.dtype.type(0.5), out=ceiling)
        return np.multiply(ceiling, np.inf, out=ceiling)

    def visits(self, place: Place, tile: int, of_key: bool) -> Visits:
        """Return which tiles meet tile `tile` of queries (or keys) and whether only in part."""
        others = self.tiles_q if of_key else self.tiles_k
        if self.mask is None:
            return [(other, False) for other in others]
        ask = self.mask.states_k if of_key else self.mask.states
        states = ask(*place, tile)
        return [(others[i], bool(states[i] == PERHAPS)) for i in np.flatnonzero(states != NEVER)]


class Part:
    """Query heads of one batch item, with their key heads, that share the mask's answers.

    Its tiles are (key heads, stack * rows, columns): the `stack` query heads of a key head are rows
    of the same product.
    """

    def __init__(self, call: Call, item: int, heads_k: slice, heads_q: slice) -> None:
        self.call, self.item, self.heads_k, self.heads_q = call, item, heads_k, heads_q
        self.stack = (heads_q.stop - heads_q.start) // (heads_k.stop - heads_k.start)
        mask = call.mask
        by_batch = mask is not None and mask.depends_on_batch
        self.place = (item if by_batch else 0, heads_q.start if call.by_head else 0)

    def queries(self, x, rows, dtype, scale=None, name=None) -> np.ndarray:
        """Return rows of q, do or o times scale, (key heads, stack * rows, head_dim)."""
        view = x[self.item, rows, self.heads_q].transpose(1, 0, 2)
        return _load(self.call, view, self.stack, dtype, scale, name)

    def keys(self, x, columns, dtype, scale=None, name=None) -> np.ndarray:
        """Return rows of k or v times scale, (key heads, columns, head_dim)."""
        view = x[self.item, columns, self.heads_k].transpose(1, 0, 2)
        return _load(self.call, view, 1, dtype, scale, name)

    def unstack(self, x: np.ndarray) -> np.ndarray:
        """Return (key heads, stack * rows, n) as (query heads, rows, n)."""
        return x.reshape(x.shape[0] * self.stack, x.shape[1] // self.stack, x.shape[2])

    def allowed(self, rows: slice, columns: slice) -> np.ndarray:
        """Return the mask of one tile, (rows, columns), True = attend."""
        return self.call.mask.values(*self.place, rows, columns)

    def restack(self, allowed: np.ndarray | None, s: np.ndarray) -> np.ndarray | None:
        """Return the mask of one tile in the shape of the tile s."""
        return None if allowed is None else np.tile(allowed, (s.shape[0], self.stack, 1))


def _load(
    call: Call,
    view: np.ndarray,
    stack: int,
    dtype: np.dtype,
    scale: float | None,
    name: str | None,
) -> np.ndarray:
    """Return view (heads, rows, head_dim) times scale in a type, `stack` heads a matrix.

    The view itself where BLAS can read it; else a copy, in the buffer `name` if given.
    """
    heads, rows, head_dim = view.shape
    if scale is None and stack == 1 and view.dtype == dtype and _blas_reads(view):
        return view
    copy = call.buffer(name, *view.shape) if name else np.empty(view.shape, dtype)
    np.copyto(copy, view, casting="unsafe")
    if scale is not None:
        copy *= scale
    return copy.reshape(heads // stack, stack * rows, head_dim)


def _blas_reads(view: np.ndarray) -> bool:
    """Return whether each matrix of view has unit stride in a row and rows that do not overlap."""
    row, element = view.strides[1:]
    size = view.itemsize
    return (
        element == size and row >= size * view.shape[2] and row % size == 0 and view.flags.aligned
    )


def cut(length: int, block: int) -> list[slice]:
    """Return the tiles of a sequence."""
    return [slice(start, min(start + block, length)) for start in range(0, length, block)]
