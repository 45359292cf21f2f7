"""What all tiles of a call share: sizes, the mask's answers, and matrices that BLAS can read."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from cuflash.cpu.careful import wider

if TYPE_CHECKING:
    from cuflash.expr.bounds import TileMask
    from cuflash.expr.scoring import TileScore
    from cuflash.problem import Problem

Place = tuple[int, int]  # (b, h) at which to ask the mask
Visits = list[tuple[slice, bool]]  # the tiles to compute, and whether the mask cuts them

NEVER, PERHAPS, ALWAYS = 0, 1, 2  # states of a tile

# Pairs of one product, over all its heads, and its longest side. In ns a pair on one core of a Xeon
# (Sapphire Rapids, 2 MiB of L2 a core), OpenBLAS 0.3.31, float32, head_dim 64, forward | backward:
# 128 x 128 6.6 | 13.6, 128 x 512 4.4 | 9.6, 256 x 256 4.4 | 9.3, 256 x 512 3.9 | 9.1,
# 512 x 512 3.9 | 8.5, 512 x 1024 3.8 | 9.9; the formula in whole arrays takes 5.9 forward.
TILE_PAIRS = 256 * 512
TILE_SIDE = 2048
# Rows (query heads x seqlen_q) whose dq may be summed at once for more than one key head.
SLAB_ROWS = 1 << 15


def blocks(problem: Problem) -> tuple[int, int]:
    """Return (block_q, block_k), the tile with which the caller builds the mask of `problem`.

    It is half a product (`TILE_PAIRS`), so that a mask's edge wastes less; neighbours of the same
    state are computed together. The query heads of a key head are stacked, so block_q shrinks as
    their number grows.
    """
    return max(32, 256 // max(problem.group, 1) // 16 * 16), 256


class Call:
    """What all tiles of one call share: sizes, mask, score, sink, and buffers used again."""

    def __init__(
        self,
        problem: Problem,
        mask: TileMask | None,
        score: TileScore | None,
        sink: np.ndarray | None,
    ) -> None:
        block_q, block_k = blocks(problem)
        self.problem = problem
        self.mask: Any = mask
        self.score, self.sink = score, sink
        self.group = problem.group
        self.dtype = np.dtype(problem.accumulation)
        self.scale = problem.scale
        self.tiles_q = cut(problem.seqlen_q, block_q)
        self.tiles_k = cut(problem.seqlen_k, block_k)
        self.by_head = mask is not None and mask.depends_on_head
        self.ones = np.ones((TILE_SIDE, 1), self.dtype)
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
        pairs = TILE_PAIRS if self.score is None else 2 * TILE_PAIRS  # heads share its indices
        count = min(pairs // max(rows * columns, 1), SLAB_ROWS // max(rows, columns) // 8)
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
        """Return what tile `tile` of queries (or keys) is to be multiplied with, and whether cut.

        Neighbours of one state are joined until a product has `TILE_PAIRS` pairs.
        """
        others, own = (self.tiles_q, self.tiles_k) if of_key else (self.tiles_k, self.tiles_q)
        stack = 1 if self.by_head else self.group
        length = TILE_PAIRS // (stack * (own[tile].stop - own[tile].start))
        length = min(length, TILE_SIDE // (stack if of_key else 1))
        if self.mask is None:
            states = np.full(len(others), ALWAYS)
        else:
            states = (self.mask.states_k if of_key else self.mask.states)(*place, tile)
        joined: Visits = []
        for index in np.flatnonzero(states != NEVER):
            part, partial = others[index], bool(states[index] == PERHAPS)
            if joined and joined[-1][0].stop == part.start and joined[-1][1] == partial:
                if part.stop - joined[-1][0].start <= length:
                    part = slice(joined.pop()[0].start, part.stop)
            joined.append((part, partial))
        return joined


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

    def queries(
        self,
        x: np.ndarray,
        rows: slice,
        dtype: np.dtype,
        scale: float | None = None,
        name: str | None = None,
    ) -> np.ndarray:
        """Return rows of q, do or o times scale, (key heads, stack * rows, head_dim)."""
        view = x[self.item, rows, self.heads_q].transpose(1, 0, 2)
        return _load(self.call, view, self.stack, dtype, scale, name)

    def keys(
        self,
        x: np.ndarray,
        columns: slice,
        dtype: np.dtype,
        scale: float | None = None,
        name: str | None = None,
    ) -> np.ndarray:
        """Return rows of k or v times scale, (key heads, columns, head_dim)."""
        view = x[self.item, columns, self.heads_k].transpose(1, 0, 2)
        return _load(self.call, view, 1, dtype, scale, name)

    def unstack(self, x: np.ndarray) -> np.ndarray:
        """Return (key heads, stack * rows, n) as (query heads, rows, n)."""
        return x.reshape(x.shape[0] * self.stack, x.shape[1] // self.stack, x.shape[2])

    def sink(self, rows: slice) -> np.ndarray | None:
        """Return each row's sink, (key heads, stack * rows, 1), or None."""
        if self.call.sink is None:
            return None
        of_rows = np.repeat(self.call.sink[self.heads_q], rows.stop - rows.start)
        return of_rows.reshape(self.heads_k.stop - self.heads_k.start, -1, 1)

    def score(self, rows: slice, columns: slice, x: np.ndarray) -> np.ndarray:
        """Return s of the tile x, which is x itself without a score."""
        score = self.call.score
        if score is None:
            return x
        return score.apply(self.item, self.heads_q, rows, columns, self.unstack(x)).reshape(x.shape)

    def unscore(
        self, rows: slice, columns: slice, x: np.ndarray, ds: np.ndarray, add: bool
    ) -> np.ndarray:
        """Return dx of the tile x from its ds; `add`: what the score's Params get is summed too."""
        score = self.call.score
        if score is None:
            return ds
        tile = self.item, self.heads_q, rows, columns
        return score.backward(*tile, self.unstack(x), self.unstack(ds), add=add).reshape(x.shape)

    def allowed(self, rows: slice, columns: slice) -> np.ndarray:
        """Return the mask of one tile, (rows, columns), True = attend."""
        return self.call.mask.values(*self.place, rows, columns)

    def restack(self, allowed: np.ndarray | None, s: np.ndarray) -> np.ndarray | None:
        """Return the mask of one tile in the shape of the tile s."""
        return None if allowed is None else np.tile(allowed, (s.shape[0], self.stack, 1))


def times(x: np.ndarray, scale: float) -> None:
    """Multiply x in place, in the wider type: a scale that x's type does not hold stays exact."""
    np.multiply(x, scale, out=x, dtype=wider(x.dtype), casting="same_kind")


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
        times(copy, scale)
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
