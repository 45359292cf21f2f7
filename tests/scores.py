"""The table of scores: each as options of a call, and as a plain NumPy definition beside it.

A row gives the numbers of its parameters, the options made of them (all as `cuflash.Param`), and
what it does to x of one head in plain NumPy: s, ds/dx, and for each parameter at which index it is
read and the derivative there. A new score is one row and so meets every back end and every mask.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

import cuflash

Arrays = dict[str, np.ndarray]
Reads = dict[str, tuple[tuple[Any, ...], Any]]
"""Of each parameter the index at which a pair reads it, and ds/d(parameter) there."""
Plain = Callable[[Any, Arrays, np.ndarray, int, int], tuple[np.ndarray, Any, Reads]]


@dataclass(frozen=True)
class ScoreCase:
    """One score: its parameters, its options, its plain definition, the dtype of parameters."""

    arrays: Callable[[Any, np.random.Generator], Arrays]
    options: Callable[[dict[str, cuflash.Param]], dict[str, Any]]
    plain: Plain | None
    dtype: str | None = None  # None: float32, float64 for float64 calls


def indices(case: Any) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """row, column and the logical q, k of all pairs."""
    row, column = np.arange(case.seqlen_q)[:, None], np.arange(case.seqlen_k)[None, :]
    return row, column, row + case.seqlen_k - case.seqlen_q, column


def _bias(*shape_of: str, dtype: str | None = None) -> ScoreCase:
    """A bias that varies along the named axes of ("b", "h", "q", "k") and is 1 along the others."""
    axes = tuple(name in shape_of for name in "bhqk")
    first = axes.index(True)

    def arrays(case: Any, rng: np.random.Generator) -> Arrays:
        shape = tuple(n if there else 1 for n, there in zip(case.pairs, axes))
        return {"bias": rng.standard_normal(shape[first:])}

    def plain(case: Any, arrays: Arrays, x: np.ndarray, b: int, h: int) -> Any:
        row, column, _, _ = indices(case)
        at = [index if there else 0 for index, there in zip((b, h, row, column), axes)][first:]
        bias = np.broadcast_to(arrays["bias"][tuple(at)], x.shape)
        return x + bias.astype(x.dtype), 1.0, {"bias": (tuple(at), 1.0)}

    return ScoreCase(arrays, lambda p: {"bias": p["bias"]}, plain, dtype)


def _softcap(case: Any, arrays: Arrays, x: np.ndarray, b: int, h: int) -> Any:
    capped = 3 * np.tanh(x / 3)
    return capped, 1 - (capped / 3) ** 2, {}


def _alibi(case: Any, arrays: Arrays, x: np.ndarray, b: int, h: int) -> Any:
    _, _, q, k = indices(case)
    slopes, distance = arrays["slopes"], np.abs(q - k)
    at = (h,) if slopes.ndim == 1 else (b, h)
    return x - (slopes[at] * distance).astype(x.dtype), 1.0, {"slopes": (at, -distance)}


def _table(shape: tuple[int, ...] | None, lengths: tuple[int, ...]) -> ScoreCase:
    """RelativeBias; on a grid by the difference of coordinates."""

    def plain(case: Any, arrays: Arrays, x: np.ndarray, b: int, h: int) -> Any:
        _, _, q, k = indices(case)
        q, k = (np.unravel_index(i, shape) if shape else (i,) for i in (q, k))
        table = arrays["table"]
        at = [h if table.shape[0] > 1 else 0]
        for q_axis, k_axis, length in zip(q, k, lengths):
            at.append(np.clip(q_axis - k_axis + length // 2, 0, length - 1))
        return x + table[tuple(at)].astype(x.dtype), 1.0, {"table": (tuple(at), 1.0)}

    def arrays(case: Any, rng: np.random.Generator) -> Arrays:
        return {"table": rng.standard_normal((1 if len(lengths) == 3 else case.heads_q, *lengths))}

    return ScoreCase(arrays, lambda p: {"score": cuflash.RelativeBias(p["table"], shape)}, plain)


def _codon(case: Any, arrays: Arrays, x: np.ndarray, b: int, h: int) -> Any:
    _, _, q, k = indices(case)
    at = ((q - k) % 3,)
    return x + arrays["phase"][at].astype(x.dtype), 1.0, {"phase": (at, 1.0)}


def _codon_options(p: dict[str, cuflash.Param]) -> dict[str, Any]:
    phase = p["phase"]
    return {"score": cuflash.Score(lambda x, b, h, q, k: x + phase[(q - k) % 3])}


def _number(case: Any, arrays: Arrays, x: np.ndarray, b: int, h: int) -> Any:
    factor = arrays["factor"]
    return x * factor.astype(x.dtype), float(factor), {"factor": ((), x)}


def _number_options(p: dict[str, cuflash.Param]) -> dict[str, Any]:
    factor = p["factor"]
    return {"score": cuflash.Score(lambda x, b, h, q, k: factor * x)}


def _functions(case: Any, arrays: Arrays, x: np.ndarray, b: int, h: int) -> Any:
    """where(q > k, |x| a, log(1 + exp(x / 2))) + sqrt(2 + a^2) + min(x, 1) + sin(x) cos(a)"""
    _, _, q, k = indices(case)
    a = float(arrays["a"][h])
    after, low = q > k, x < 1
    e = np.exp(x / 2)
    s = np.where(after, np.abs(x) * a, np.log(1 + e)) + np.sqrt(2 + a * a)
    s = s + np.minimum(x, 1) + np.sin(x) * np.cos(a)
    slope = np.where(after, np.sign(x) * a, 0.5 * e / (1 + e)) + low + np.cos(x) * np.cos(a)
    by_a = np.where(after, np.abs(x), 0) + a / np.sqrt(2 + a * a) - np.sin(x) * np.sin(a)
    return s.astype(x.dtype), slope, {"a": ((h,), by_a)}


def _functions_options(p: dict[str, cuflash.Param]) -> dict[str, Any]:
    values = p["a"]

    def score(x: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        a = values[h]
        bent = cuflash.where(q > k, abs(x) * a, cuflash.log(1 + cuflash.exp(x / 2)))
        shift = cuflash.sqrt(2 + a * a) + cuflash.minimum(x, 1.0)
        return bent + shift + cuflash.sin(x) * cuflash.cos(a)

    return {"score": cuflash.Score(score)}


def _chain(case: Any, arrays: Arrays, x: np.ndarray, b: int, h: int) -> Any:
    """softcap, bias, then ALiBi >> codon, in this order."""
    s, slope, _ = _softcap(case, arrays, x, b, h)
    reads: Reads = {}
    for plain in (SCORES["bias"].plain, _alibi, _codon):
        s, _, more = plain(case, arrays, s, b, h)
        reads |= more
    return s, slope, reads


def _chain_arrays(case: Any, rng: np.random.Generator) -> Arrays:
    return {
        **SCORES["bias"].arrays(case, rng),
        "slopes": rng.random(case.heads_q) / 10,
        "phase": rng.standard_normal(3),
    }


def _chain_options(p: dict[str, cuflash.Param]) -> dict[str, Any]:
    after = cuflash.ALiBi(p["slopes"]) >> _codon_options(p)["score"]
    return {"softcap": 3.0, "bias": p["bias"], "score": after}


def _slopes(case: Any, rng: np.random.Generator) -> Arrays:
    return {"slopes": rng.random(case.heads_q) / 10}


SCORES: dict[str, ScoreCase] = {
    "none": ScoreCase(lambda case, rng: {}, lambda p: {}, None),
    "softcap": ScoreCase(lambda case, rng: {}, lambda p: {"softcap": 3.0}, _softcap),
    "bias": _bias("q", "k"),
    "bias-heads": _bias("h", "q", "k", dtype="float16"),
    "bias-all": _bias("b", "h", "q", "k"),
    "bias-padding": _bias("b", "k"),
    "bias-keys": _bias("k", dtype="bfloat16"),
    "bias-rows": _bias("b", "h", "q"),
    "alibi": ScoreCase(_slopes, lambda p: {"score": cuflash.ALiBi(p["slopes"])}, _alibi),
    "alibi-batch": ScoreCase(
        lambda case, rng: {"slopes": rng.random((case.batch, case.heads_q)) / 10},
        lambda p: {"score": cuflash.ALiBi(p["slopes"])}, _alibi,
    ),
    "table": _table(None, (41,)),
    "table-2d": _table((12, 11), (5, 8)),
    "table-3d": _table((6, 4, 6), (3, 4, 5)),
    "codon": ScoreCase(
        lambda case, rng: {"phase": rng.standard_normal(3)}, _codon_options, _codon
    ),
    "number": ScoreCase(
        lambda case, rng: {"factor": rng.random(()) + 0.5}, _number_options, _number
    ),
    "functions": ScoreCase(
        lambda case, rng: {"a": rng.random(case.heads_q)}, _functions_options, _functions
    ),
    "chain": ScoreCase(_chain_arrays, _chain_options, _chain),
    "sink": ScoreCase(
        lambda case, rng: {"sink": rng.standard_normal(case.heads_q)},
        lambda p: {"sink": p["sink"]}, None,
    ),
    "chain-sink": ScoreCase(
        lambda case, rng: {**_chain_arrays(case, rng), "sink": rng.standard_normal(case.heads_q)},
        lambda p: {**_chain_options(p), "sink": p["sink"]}, _chain,
    ),
}  # fmt: skip

NEEDS_KEYS = ("table-2d", "table-3d")  # coordinates of q, which must not be negative


class Scored:
    """The score of a case with its numbers: for the call, and for the oracle."""

    def __init__(self, case: Any) -> None:
        from cases import numpy_dtype, round_to

        self.case, self.row = case, SCORES[case.score]
        self.dtype = self.row.dtype or ("float64" if case.dtype == "float64" else "float32")
        rng = np.random.default_rng(len(case.score) + case.seqlen_q)
        made = self.row.arrays(case, rng)
        self.arrays = {name: round_to(array, self.dtype) for name, array in made.items()}
        self._numpy_dtype = numpy_dtype(self.dtype)

    def params(self, convert: Callable[[np.ndarray], Any]) -> dict[str, cuflash.Param]:
        """The parameters in the caller's library."""
        return {
            name: cuflash.Param(convert(array.astype(self._numpy_dtype)))
            for name, array in self.arrays.items()
        }

    def score(self, x: np.ndarray, b: int, h: int) -> tuple[np.ndarray, np.ndarray]:
        """s and ds/dx, for `reference.py`."""
        s, slope, _ = self.row.plain(self.case, self.arrays, x, b, h)  # type: ignore[misc]
        return s, np.broadcast_to(slope, x.shape)

    def gradients(
        self, ds: np.ndarray, x_of: Callable[[int, int], np.ndarray]
    ) -> dict[str, tuple[np.ndarray, np.ndarray, np.ndarray]]:
        """Of each parameter read by the score: gradient, sum of squares and of magnitudes."""
        found: Mapping[str, Any] = {
            name: tuple(np.zeros(array.shape) for _ in range(3))
            for name, array in self.arrays.items()
            if name != "sink"
        }
        for b, h in np.ndindex(*ds.shape[:2]):
            if self.row.plain is None:
                continue
            _, _, reads = self.row.plain(self.case, self.arrays, x_of(b, h), b, h)
            for name, (at, partial) in reads.items():
                total, squares, sizes = found[name]
                terms = ds[b, h] * partial
                spread = np.broadcast_to(partial, ds.shape[2:])
                if at == ():
                    total += terms.sum()
                    squares += (spread**2).sum()
                    sizes += np.abs(terms).sum()
                    continue
                at = tuple(np.broadcast_to(index, ds.shape[2:]) for index in at)
                np.add.at(total, at, terms.astype(np.float64))
                np.add.at(squares, at, spread.astype(np.float64) ** 2)
                np.add.at(sizes, at, np.abs(terms).astype(np.float64))
        return dict(found)
