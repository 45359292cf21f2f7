"""How far a result may be from the definition: the rules of DESIGN.md 6, for every back end.

    16 bit   twice the error of the naive formula whose S, P, O, dP, dS are each rounded once to the
             input's dtype, with float32 sums, plus 1e-5
    float32  twice the error of the naive formula in float32, plus 2e-6
    float64  1e-12 of the largest value, against longdouble
    lse      1e-5 * max(1, |lse|); float64 1e-12 of that
    gradients add |lse| * 2^-24 (2^-53) of what they sum, for backward computes s again

A float32 sum of the naive formula is taken in the order of its terms, so that its error does not
depend on which kernel a BLAS chooses for a shape (they differ by a factor of 5 at head_dim 256).
NaN never passes, on either side; infinities have to be equal. Arrays are NumPy copies in the order
(batch, seqlen, heads, head_dim), lse (batch, heads, seqlen_q), whatever made them.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property

import numpy as np
from cases import Case, numpy_dtype
from scores import Scored

from cuflash import reference

FLOOR = {"float16": 1e-5, "bfloat16": 1e-5, "float32": 2e-6, "float64": 0.0}
LSE = {"float16": 1e-5, "bfloat16": 1e-5, "float32": 1e-5, "float64": 1e-12}
NAMES = ("o", "lse", "dq", "dk", "dv", "dsink", "ds")


def close(name: str, got: np.ndarray, want: np.ndarray, limit: np.ndarray | float) -> None:
    """Fail unless |got - want| <= limit everywhere, in the type of want; say where and how far."""
    got = np.asarray(got).astype(want.dtype)
    if got.shape != want.shape:
        raise AssertionError(f"{name}: shape {got.shape}, not {want.shape}")
    if np.isnan(want).any():
        raise AssertionError(f"{name}: the oracle is NaN, so nothing can be judged by it")
    with np.errstate(invalid="ignore"):
        error = np.where(got == want, 0, np.abs(got - want))  # infinities of one sign are equal
        bad = ~(error <= limit)  # a NaN compares false and so is bad
    if bad.any():
        at = tuple(int(i) for i in np.argwhere(bad)[0])
        limit_at = float(np.broadcast_to(limit, bad.shape)[at])
        raise AssertionError(
            f"{name}: {bad.sum()} of {bad.size} are wrong; at {at} got {got[at]}, want {want[at]}, "
            f"error {float(error[at]):.3g} over the limit {limit_at:.3g}; "
            f"largest error {float(np.max(error)):.3g}"
        )


def product(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """The matrix product in the type of a, summed in order; float64 by BLAS."""
    if a.dtype != np.float32:
        return a @ b
    total = np.zeros((a.shape[0], b.shape[1]), a.dtype)
    for index in range(a.shape[1]):
        total += a[:, index, None] * b[index]
    return total


class Judge:
    """The oracle and the naive formula of one call.

    Parameters
    ----------
    inputs : q, k, v (and do, dlse for gradients) of values that `dtype` holds, of any wider type
    scale, dtype : of the call, dtype by name
    allowed : bool, broadcast to (batch, heads_q, seqlen_q, seqlen_k); None allows all pairs
    score, sink : as `reference.forward` takes them. The gradient of a bias, ds summed over what it
        broadcasts to, is within the sum of the limits of ds
    """

    def __init__(
        self, inputs: Mapping[str, np.ndarray], *, scale: float, dtype: str,
        allowed: np.ndarray | None = None, score: reference.Score | None = None,
        sink: np.ndarray | None = None,
    ) -> None:  # fmt: skip
        self.inputs, self.scale, self.dtype = inputs, scale, dtype
        batch, seqlen_q, heads_q, _ = inputs["q"].shape
        pairs = (batch, heads_q, seqlen_q, inputs["k"].shape[1])
        self.allowed = np.broadcast_to(True if allowed is None else allowed, pairs)
        self.score, self.sink = score, sink
        self.scored: Scored | None = None
        self._wide = np.longdouble if dtype == "float64" else np.float64

    @classmethod
    def of(cls, case: Case, inputs: Mapping[str, np.ndarray] | None = None) -> Judge:
        """The judge of a case of `cases.py`."""
        inputs = case.inputs() if inputs is None else inputs
        scored = Scored(case)
        judge = cls(
            inputs, scale=case.scale_value, dtype=case.dtype, allowed=case.allowed(),
            score=None if scored.row.plain is None else scored.score,
            sink=scored.arrays.get("sink"),
        )  # fmt: skip
        judge.scored = scored
        return judge

    def check(self, **results: np.ndarray | None) -> None:
        """Fail if a result (one of NAMES; None is skipped) is too far off."""
        for name, got in results.items():
            if name not in NAMES:
                raise TypeError(f"{name} is none of {', '.join(NAMES)}")
            if got is not None:
                close(name, got, self.oracle[name], self.limit(name))

    def check_params(self, **gradients: np.ndarray) -> None:
        """Fail if the gradient of a parameter of a case's score, by name, is too far off.

        It is a sum of ds times a derivative: errors of ds add up like random ones, of 4 sigma; the
        sum itself is taken in float32; what is returned is rounded to the parameter's dtype.
        """
        if self.scored is None:
            raise TypeError("no case, no parameters: make the judge by Judge.of")
        q, k = (self.inputs[name].astype(self._wide) for name in "qk")
        group = q.shape[2] // max(k.shape[2], 1)

        def x_of(b: int, h: int) -> np.ndarray:
            return self.scale * q[b, :, h] @ k[b, :, h // group].T

        wanted = self.scored.gradients(self.oracle["ds"], x_of)
        eps = {"float16": 2e-3, "bfloat16": 1.6e-2, "float32": 4e-6, "float64": 1e-12}
        stored = eps[self.scored.dtype]
        for name, got in gradients.items():
            if name == "sink":
                want = self.oracle["dsink"]
                limit = self.limit("dsink") + self._of_delta() + stored * np.max(np.abs(want))
                close(name, got, want, limit)
                continue
            want, squares, sizes = wanted[name]
            summed = (1e-12 if self.dtype == "float64" else 4e-6) * sizes
            limit = 4 * np.max(self.limit("ds")) * np.sqrt(squares) + summed
            least = 6e-8 if self.scored.dtype == "float16" else 0  # its smallest step
            close(name, got, want, limit + stored * np.abs(want) + least)

    def _of_delta(self) -> np.ndarray:
        """4 sigma of dsink for what o's rounding does to delta, a limit of o being 8 sigma."""
        weights = np.exp(self.sink[:, None] - self.oracle["lse"])  # (batch, heads, seqlen_q)
        sizes = np.square(self.inputs["do"].astype(float)).sum(axis=3).transpose(0, 2, 1)
        spread = np.sqrt((np.square(weights) * sizes).sum(axis=(0, 2)))
        return self.limit("o") / 2 * spread

    def limit(self, name: str) -> np.ndarray | float:
        """The largest error that a result may have."""
        want = self.oracle[name]
        if name == "lse":
            return LSE[self.dtype] * np.maximum(1, np.where(np.isinf(want), 0, np.abs(want)))
        if self.dtype == "float64":
            base = 1e-12 * float(np.max(np.abs(want), initial=0))
        else:
            naive = np.max(np.abs(self.naive[name] - want), initial=0)
            base = 2 * float(naive) + FLOOR[self.dtype]
        return base if name == "o" else base + self._again[name]

    @cached_property
    def oracle(self) -> dict[str, np.ndarray]:
        """`reference.py` in float64, in longdouble for float64."""
        options = {"scale": self.scale, "allowed": self.allowed, "dtype": self._wide}
        options |= {"score": self.score, "sink": self.sink}
        o, lse = reference.forward(*(self.inputs[name] for name in "qkv"), **options)
        if "do" not in self.inputs:
            return {"o": o, "lse": lse}
        arrays = (self.inputs[name] for name in ("do", "q", "k", "v"))
        gradients = reference.backward(*arrays, **options, dlse=self.inputs.get("dlse"))
        found = zip(NAMES, (o, lse, *gradients), strict=True)
        return {name: array for name, array in found if array is not None}

    @cached_property
    def naive(self) -> dict[str, np.ndarray]:
        """The formula in whole arrays in the dtype of the call, as float64."""
        return self._in_whole_arrays(np.float32, self.dtype)

    @cached_property
    def _again(self) -> dict[str, float]:
        """What the gradients owe to |lse|: 2^-24 |lse| of the sums of magnitudes."""
        return self._in_whole_arrays(np.float64, "float64", magnitude=True)

    def _in_whole_arrays(self, real: type, dtype: str, magnitude: bool = False) -> dict:
        """The naive formula with sums in `real`, each matrix rounded once to `dtype`.

        magnitude : instead, per gradient the largest sum of |lse| eps |term|
        """

        def rounded(x: np.ndarray) -> np.ndarray:
            return x.astype(numpy_dtype(dtype)).astype(real)

        q, k, v = (self.inputs[name].astype(real) for name in "qkv")
        group = q.shape[2] // max(k.shape[2], 1)
        with_do = "do" in self.inputs
        pairs = self.allowed.shape
        shapes = {"o": (*q.shape[:3], v.shape[3]), "lse": pairs[:3]}
        if with_do:
            shapes |= {"dq": q.shape, "dk": k.shape, "dv": v.shape, "ds": pairs}
            shapes["dsink"] = pairs[1:2]
        result = {name: np.zeros(shape, real) for name, shape in shapes.items()}
        eps = 2.0 ** (-53 if self.dtype == "float64" else -24)
        for b, h in np.ndindex(*self.allowed.shape[:2]):
            k_h, v_h, mask = k[b, :, h // group], v[b, :, h // group], self.allowed[b, h]
            if not mask.size:
                continue
            s = rounded(real(self.scale) * product(q[b, :, h], k_h.T))
            s, slope = (s, 1) if self.score is None else self.score(s, b, h)
            s = np.where(mask, rounded(s), -np.inf)
            drain = real(-np.inf if self.sink is None else self.sink[h])
            top = np.maximum(s.max(axis=1, keepdims=True), drain)
            seen = top != -np.inf
            top = np.where(seen, top, 0)
            e = np.exp(s - top)
            total = np.where(seen, e.sum(axis=1, keepdims=True) + np.exp(drain - top), 1)
            p, lse = rounded(e / total), np.where(seen, top + np.log(total), -np.inf)
            o = rounded(product(p, v_h))
            result["o"][b, :, h], result["lse"][b, h] = o, lse[:, 0]
            if not with_do:
                continue
            do = self.inputs["do"][b, :, h].astype(real)
            delta = (do * o).sum(axis=1, keepdims=True)
            if self.inputs.get("dlse") is not None:
                delta = delta - self.inputs["dlse"][b, h, :, None].astype(real)
            ds = np.where(mask, rounded(p * (rounded(product(do, v_h.T)) - delta)), 0)
            to_sink = np.where(seen, np.exp(drain - np.where(seen, lse, 0)) * delta, 0)
            scale, q_h = real(self.scale), q[b, :, h]
            if magnitude:
                share = np.where(seen, np.abs(lse), 0) * eps
                ds, p, to_sink = np.abs(ds) * share, p * share, -np.abs(to_sink) * share
                slope = np.abs(slope)
                do, q_h, k_h, scale = np.abs(do), np.abs(q_h), np.abs(k_h), abs(scale)
            result["ds"][b, h] = ds
            result["dsink"][h] -= to_sink.sum()
            ds = np.where(mask, ds * slope, 0).astype(real)
            result["dv"][b, :, h // group] += product(p.T, do)
            result["dq"][b, :, h] = scale * product(ds, k_h)
            result["dk"][b, :, h // group] += scale * product(ds.T, q_h)
        if magnitude:
            return {n: float(np.max(result.get(n, 0), initial=0)) for n in NAMES[2:]}
        unrounded = ("lse", "dsink", "ds")
        stored = {name: x if name in unrounded else rounded(x) for name, x in result.items()}
        return {name: x.astype(np.float64) for name, x in stored.items()}
