"""The one table of what is tested: sizes, dtypes, layouts, masks. Tests and benches draw from it.

Longer than other files, because there is to be one table. A mask stands here twice: as the options
of a call, and as `allowed`, a plain NumPy definition that knows nothing of expressions. A new mask
is one row in `MASKS` and so meets every other feature.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from scores import SCORES, Scored

import cuflash

DTYPES = ("float16", "bfloat16", "float32", "float64")


@dataclass(frozen=True)
class Case:
    """One call: sizes, dtype, layout, number of axes, and the name of its mask."""

    seqlen_q: int = 100
    seqlen_k: int = 131
    batch: int = 2
    heads_q: int = 4
    heads_k: int = 2
    head_dim: int = 16
    head_dim_v: int = 16
    dtype: str = "float32"
    mask: str = "none"
    score: str = "none"
    layout: str = "bshd"
    ndim: int = 4
    scale: float | None = None

    @property
    def id(self) -> str:
        parts = [
            f"b{self.batch}h{self.heads_q}:{self.heads_k}",
            f"s{self.seqlen_q}x{self.seqlen_k}",
        ]
        parts += [f"d{self.head_dim}:{self.head_dim_v}", self.dtype, self.mask]
        parts += [self.score] * (self.score != "none")
        parts += [self.layout] * (self.layout != "bshd") + [f"{self.ndim}d"] * (self.ndim != 4)
        return "-".join(parts)

    @property
    def rng(self) -> np.random.Generator:
        """A generator of this case's own: no two cases share random numbers."""
        return np.random.default_rng(zlib.crc32(self.id.encode()))

    @property
    def pairs(self) -> tuple[int, int, int, int]:
        return self.batch, self.heads_q, self.seqlen_q, self.seqlen_k

    @property
    def scale_value(self) -> float:
        return self.head_dim**-0.5 if self.scale is None else self.scale

    def inputs(self) -> dict[str, np.ndarray]:
        """q, k, v, do, dlse as float64 (b, s, h, d) arrays of values that the dtype holds exactly.

        Offset by 0.5, so that a wrong sum or a swapped operand does not average away.
        """
        rng = self.rng
        shapes = {
            "q": (self.batch, self.seqlen_q, self.heads_q, self.head_dim),
            "k": (self.batch, self.seqlen_k, self.heads_k, self.head_dim),
            "v": (self.batch, self.seqlen_k, self.heads_k, self.head_dim_v),
            "do": (self.batch, self.seqlen_q, self.heads_q, self.head_dim_v),
        }
        arrays = {
            name: round_to(rng.standard_normal(shape) + 0.5, self.dtype)
            for name, shape in shapes.items()
        }
        dlse = rng.standard_normal((self.batch, self.heads_q, self.seqlen_q)) + 0.5
        accumulation = "float64" if self.dtype == "float64" else "float32"
        return {**arrays, "dlse": round_to(dlse, accumulation)}

    def options(self, convert: Callable[[np.ndarray], Any] = np.asarray) -> dict[str, Any]:
        """Options of the call; `convert` makes the caller's arrays of those that masks capture."""
        options = MASKS[self.mask].options(self, convert)
        if self.score != "none":
            options |= SCORES[self.score].options(Scored(self).params(convert))
        if self.layout != "bshd":
            options["layout"] = self.layout
        return options if self.scale is None else {**options, "scale": self.scale}

    def allowed(self) -> np.ndarray:
        """(batch, heads_q, seqlen_q, seqlen_k) bool by the plain definition."""
        return np.broadcast_to(MASKS[self.mask].allowed(self), self.pairs)

    def to_caller(self, array: np.ndarray) -> np.ndarray:
        """A (b, s, h, d) array in the caller's layout and number of axes (a view)."""
        array = array.transpose([{"b": 0, "s": 1, "h": 2, "d": 3}[axis] for axis in self.layout])
        drop = {4: "", 3: "b", 2: "bh"}[self.ndim]
        return array.squeeze(tuple(self.layout.index(axis) for axis in drop))

    def from_caller(self, array: np.ndarray) -> np.ndarray:
        """Back to (b, s, h, d)."""
        drop = {4: "", 3: "b", 2: "bh"}[self.ndim]
        array = np.expand_dims(array, tuple(sorted(self.layout.index(axis) for axis in drop)))
        return array.transpose([self.layout.index(axis) for axis in "bshd"])


@dataclass(frozen=True)
class MaskCase:
    """A mask as options of a call, and the same by a plain definition."""

    options: Callable[[Case, Callable[[np.ndarray], Any]], dict[str, Any]]
    allowed: Callable[[Case], np.ndarray]


def numpy_dtype(name: str) -> np.dtype:
    """The NumPy dtype of that name; bfloat16 is the one of ml_dtypes."""
    if name == "bfloat16":
        import ml_dtypes

        return np.dtype(ml_dtypes.bfloat16)
    return np.dtype(name)


def round_to(array: np.ndarray, dtype: str) -> np.ndarray:
    """Values rounded to a dtype, kept as float64."""
    return array.astype(numpy_dtype(dtype)).astype(np.float64)


def logical(case: Case, offset: int | None = None) -> tuple[np.ndarray, np.ndarray]:
    """q (seqlen_q, 1) and k (1, seqlen_k), logical; `offset` None is bottom-right."""
    offset = case.seqlen_k - case.seqlen_q if offset is None else offset
    return np.arange(case.seqlen_q)[:, None] + offset, np.arange(case.seqlen_k)[None, :]


def _causal(case: Case, offset: int | None = None) -> np.ndarray:
    q, k = logical(case, offset)
    return k <= q


def _window(case: Case, left: int | None, right: int | None) -> np.ndarray:
    q, k = logical(case)
    allowed = np.ones(np.broadcast_shapes(q.shape, k.shape), bool)
    if left is not None:
        allowed &= k >= q - left
    if right is not None:
        allowed &= k <= q + right
    return allowed


def _random(case: Case, *shape: int) -> np.ndarray:
    rng = np.random.default_rng(zlib.crc32(repr(("mask", case.pairs, shape)).encode()))
    return rng.random(shape) < 0.4


def _empty_rows(case: Case) -> np.ndarray:
    """Random pairs; every third row, and a whole tile of rows where there is one, sees no key."""
    allowed = _random(case, case.seqlen_q, case.seqlen_k)
    allowed[::3] = False
    allowed[64:] = False
    return allowed


def _ids(case: Case) -> np.ndarray:
    """Document of each logical position, by batch item; not sorted."""
    length = max(case.seqlen_q, case.seqlen_k)
    return (np.arange(length)[None, :] // 23 + np.arange(case.batch)[:, None]) % 3


def _documents(case: Case) -> np.ndarray:
    q, k = logical(case)
    ids = _ids(case)
    return (ids[:, q] == ids[:, k])[:, None]


def _flags(case: Case) -> np.ndarray:
    return np.arange(max(case.seqlen_q, case.seqlen_k)) % 50 == 7


def _global(case: Case) -> np.ndarray:
    q, k = logical(case)
    flags = _flags(case)
    return (abs(q - k) <= 9) | flags[q] | flags[k]


def _by_head(case: Case) -> np.ndarray:
    q, k = logical(case)
    h = np.arange(case.heads_q)[:, None, None]
    return (((q - k) % (h + 2)) == 0)[None]


def _neighborhood(case: Case, shape: tuple[int, ...], window: tuple[int, ...]) -> np.ndarray:
    """NATTEN's rule by coordinates: every window is moved inside the grid."""
    q, k = logical(case)
    allowed = np.ones(np.broadcast_shapes(q.shape, k.shape), bool)
    for axis, (size, width) in enumerate(zip(shape, window)):
        stride = int(np.prod(shape[axis + 1 :], dtype=int))
        at_q, at_k = (index // stride % size if axis else index // stride for index in (q, k))
        first = np.clip(at_q - width // 2, 0, max(size - width, 0))
        allowed &= (first <= at_k) & (at_k < first + width)
    return allowed


def _ends(case: Case) -> tuple[np.ndarray, np.ndarray]:
    at = np.arange(max(case.seqlen_q, case.seqlen_k))
    return at * 7 % 90, at * 7 % 90 + at % 40


def _intervals(case: Case) -> np.ndarray:
    q, k = logical(case)
    start, end = _ends(case)
    return (start[q] <= k) & (k < end[q])


def _prefix(case: Case) -> np.ndarray:
    q, k = logical(case)
    length = (20 + 13 * np.arange(case.batch))[:, None, None, None]
    return (k < length) | (k <= q)


def _positions(case: Case) -> tuple[np.ndarray, np.ndarray]:
    """Logical indices: queries by batch item, shuffled; keys in an order of their own."""
    length = max(case.seqlen_q, case.seqlen_k)
    rng = np.random.default_rng(length)
    queries = np.stack([rng.permutation(length)[: case.seqlen_q] for _ in range(case.batch)])
    return queries, rng.permutation(length)[: case.seqlen_k].astype(np.int32)


def _at(case: Case, rule: Callable[[np.ndarray, np.ndarray], np.ndarray]) -> np.ndarray:
    """A rule of logical indices at the positions of `_positions`."""
    queries, keys = _positions(case)
    return rule(queries[:, None, :, None], keys[None, None, None, :])


def _documents_options(case: Case, convert: Callable[[np.ndarray], Any]) -> dict[str, Any]:
    ids = convert(_ids(case))
    return {"mask": cuflash.Mask(lambda b, h, q, k: ids[b, q] == ids[b, k])}


def _global_options(case: Case, convert: Callable[[np.ndarray], Any]) -> dict[str, Any]:
    flags = convert(_flags(case))
    near = cuflash.SlidingWindow(9, 9)
    return {"mask": near | cuflash.Mask(lambda b, h, q, k: flags[q] | flags[k])}


def _blocks(case: Case) -> np.ndarray:
    length = max(case.seqlen_q, case.seqlen_k)
    return _random(case, 2, length // 24 + 1, length // 24 + 1)


def _block_sparse(case: Case) -> np.ndarray:
    q, k = logical(case)
    return _blocks(case)[1, q // 24, k // 24]


def _blocks_options(case: Case, convert: Callable[[np.ndarray], Any]) -> dict[str, Any]:
    blocks = convert(_blocks(case))
    return {"mask": cuflash.Mask(lambda b, h, q, k: blocks[1, q // 24, k // 24])}


MASKS: dict[str, MaskCase] = {
    "none": MaskCase(lambda case, convert: {}, lambda case: np.ones((1, 1), bool)),
    "causal": MaskCase(lambda case, convert: {"causal": True}, _causal),
    "top-left": MaskCase(
        lambda case, convert: {"causal": "top-left"}, lambda case: _causal(case, 0)
    ),
    "window": MaskCase(
        lambda case, convert: {"window": (8, 16)}, lambda case: _window(case, 8, 16)
    ),
    "window-left": MaskCase(
        lambda case, convert: {"window": (30, None), "causal": True},
        lambda case: _window(case, 30, 0),
    ),
    "outside": MaskCase(  # a band turned inside out: whole tiles near the diagonal are empty
        lambda case, convert: {"mask": ~cuflash.SlidingWindow(40, 40)},
        lambda case: ~_window(case, 40, 40),
    ),
    "by-head": MaskCase(
        lambda case, convert: {"mask": cuflash.Mask(lambda b, h, q, k: (q - k) % (h + 2) == 0)},
        _by_head,
    ),
    "documents": MaskCase(_documents_options, _documents),
    "documents-causal": MaskCase(
        lambda case, convert: {**_documents_options(case, convert), "causal": True},
        lambda case: _documents(case) & _causal(case),
    ),
    "global": MaskCase(_global_options, _global),
    "blocks": MaskCase(_blocks_options, _block_sparse),
    "array": MaskCase(
        lambda case, convert: {"mask": convert(_random(case, *case.pairs))},
        lambda case: _random(case, *case.pairs),
    ),
    "array-keys": MaskCase(  # padding: one row of keys for each batch item
        lambda case, convert: {"mask": convert(_random(case, case.batch, 1, 1, case.seqlen_k))},
        lambda case: _random(case, case.batch, 1, 1, case.seqlen_k),
    ),
    "array-empty-rows": MaskCase(
        lambda case, convert: {"mask": convert(_empty_rows(case))}, _empty_rows
    ),
    "prefix": MaskCase(
        lambda case, convert: {"mask": cuflash.PrefixLM(convert(20 + 13 * np.arange(case.batch)))},
        _prefix,
    ),
    "documents-1d": MaskCase(
        lambda case, convert: {"mask": cuflash.Documents(convert(_ids(case)[0]))},
        lambda case: _documents(case)[0],
    ),
    "block-local": MaskCase(
        lambda case, convert: {"mask": cuflash.BlockLocal(24)},
        lambda case: np.equal(*(at // 24 for at in logical(case))),
    ),
    "local-global": MaskCase(
        lambda case, convert: {
            "mask": cuflash.SlidingWindow(9, 9) | cuflash.GlobalTokens(convert(_flags(case)))
        },
        _global,
    ),
    "dilated": MaskCase(
        lambda case, convert: {"mask": cuflash.Dilated(4), "window": (40, 40)},
        lambda case: (np.subtract(*logical(case)) % 4 == 0) & _window(case, 40, 40),
    ),
    "intervals": MaskCase(
        lambda case, convert: {"mask": cuflash.Intervals(*map(convert, _ends(case)))}, _intervals
    ),
    "block-sparse": MaskCase(
        lambda case, convert: {"mask": cuflash.BlockSparse(convert(_blocks(case)[1:]), 24)},
        lambda case: _block_sparse(case),
    ),
    "neighborhood-2d": MaskCase(
        lambda case, convert: {"mask": cuflash.Neighborhood((12, 11), (5, 4))},
        lambda case: _neighborhood(case, (12, 11), (5, 4)),
    ),
    "neighborhood-3d": MaskCase(
        lambda case, convert: {"mask": cuflash.Neighborhood((6, 4, 6), 3)},
        lambda case: _neighborhood(case, (6, 4, 6), (3, 3, 3)),
    ),
    "positions-causal": MaskCase(
        lambda case, convert: {"causal": True, "positions": tuple(map(convert, _positions(case)))},
        lambda case: _at(case, lambda q, k: k <= q),
    ),
    "positions-global": MaskCase(
        lambda case, convert: {
            **_global_options(case, convert),
            "positions": tuple(map(convert, _positions(case))),
        },
        lambda case: _at(case, lambda q, k: (abs(q - k) <= 9) | _flags(case)[q] | _flags(case)[k]),
    ),
    "nothing": MaskCase(
        lambda case, convert: {"mask": cuflash.Mask(lambda b, h, q, k: k < -1)},
        lambda case: np.zeros((1, 1), bool),
    ),
}

# Masks whose captured arrays are indexed by q need q >= 0: no more queries than keys.
NEEDS_KEYS = (
    "documents", "documents-1d", "documents-causal", "global", "local-global", "blocks",
    "block-sparse", "intervals", "neighborhood-2d", "neighborhood-3d",
)  # fmt: skip

LENGTHS = (
    (1, 1), (1, 63), (1, 200), (16, 17), (63, 64), (64, 65), (65, 64), (127, 127), (129, 33),
    (33, 129), (200, 2), (2, 200), (64, 127), (100, 131), (192, 192),
)  # fmt: skip
HEAD_DIMS = (
    (1, 1), (8, 8), (40, 40), (64, 64), (72, 72), (80, 96), (96, 80), (128, 128), (128, 24),
    (192, 128), (24, 192), (256, 256), (512, 512),
)  # fmt: skip
HEADS = ((1, 1), (3, 1), (9, 3), (8, 1), (4, 4), (12, 4))


def _table() -> list[Case]:
    small = Case()
    rows = [replace(small, dtype=dtype, mask=mask) for dtype in DTYPES for mask in MASKS]
    for seqlen_q, seqlen_k in LENGTHS:
        for mask in ("none", "causal", "window", "top-left"):
            rows.append(replace(small, seqlen_q=seqlen_q, seqlen_k=seqlen_k, mask=mask))
    for head_dim, head_dim_v in HEAD_DIMS:
        for dtype in DTYPES:
            dims = {"head_dim": head_dim, "head_dim_v": head_dim_v, "dtype": dtype}
            rows.append(replace(small, seqlen_q=70, seqlen_k=70, mask="causal", **dims))
    for heads_q, heads_k in HEADS:
        heads = {"heads_q": heads_q, "heads_k": heads_k, "seqlen_q": 65, "seqlen_k": 70}
        rows.append(replace(small, mask="causal", **heads))
        rows.append(replace(small, mask="by-head", **heads))
    for layout in ("bshd", "bhsd", "sbhd"):
        rows.append(replace(small, layout=layout, mask="documents-causal"))
        rows.append(replace(small, layout=layout, ndim=3, batch=1, mask="causal"))
        rows.append(replace(small, layout=layout, ndim=2, batch=1, heads_q=1, heads_k=1))
    for score in SCORES:
        rows += [replace(small, dtype=dtype, score=score) for dtype in DTYPES]
        for mask in ("causal", "documents", "array-empty-rows"):
            rows.append(replace(small, mask=mask, score=score))
    for score in ("chain-sink", "table"):
        gqa = {"heads_q": 9, "heads_k": 3, "seqlen_q": 65, "seqlen_k": 70, "score": score}
        rows.append(replace(small, mask="window", **gqa))
        rows.append(replace(small, mask="causal", layout="bhsd", ndim=3, batch=1, score=score))
        rows.append(replace(small, seqlen_q=129, seqlen_k=33, mask="causal", score=score))
        rows.append(replace(small, seqlen_q=1, seqlen_k=200, score=score))
        rows.append(replace(small, head_dim=72, head_dim_v=130, dtype="bfloat16", score=score))
    for scale in (0.0, -0.3, 9e15, 1e-20):
        rows.append(replace(small, scale=scale, mask="causal"))
    return list({row.id + str(row.scale): row for row in rows}.values())


CASES = _table()
