"""The simt kernels against the float64 definition, run on a CPU by the emulator (no GPU needed)."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from cases import MASKS, Case, numpy_dtype

from cuflash import reference
from cuflash.problem import Problem, make

sys.path.insert(0, str(Path(__file__).parent / "emulator"))
import emulator

pytestmark = pytest.mark.skipif(
    emulator.compiler() is None, reason="g++ is not installed: the emulator needs it"
)

# Error allowed relative to the largest number of a result, by dtype.
TOLERANCE = {"float16": 2e-3, "bfloat16": 1.6e-2, "float32": 2e-6, "float64": 1e-14}
SMALL = Case(seqlen_q=100, seqlen_k=131, batch=2, heads_q=4, heads_k=2, head_dim=16, head_dim_v=16)


def arrays_of(case: Case) -> dict[str, np.ndarray]:
    """q, k, v, do in the dtype of the case and dlse in that of its sums."""
    dtype = numpy_dtype(case.dtype)
    sums = np.float64 if case.dtype == "float64" else np.float32
    return {
        name: array.astype(sums if name == "dlse" else dtype)
        for name, array in case.inputs().items()
    }


class Named:
    """An array's shape and the name of its dtype, as `make` reads them."""

    def __init__(self, array: np.ndarray, dtype: str) -> None:
        self.shape, self.dtype = array.shape, dtype


def problem_of(case: Case, arrays: dict[str, np.ndarray]) -> Problem:
    return make(*(Named(arrays[name], case.dtype) for name in "qkv"), **case.options())[0]


def check(
    case: Case,
    arrays: dict[str, np.ndarray] | None = None,
    allowed: np.ndarray | None = None,
    arch: int = 90,
    tolerance: float = 1.0,
    **options,
) -> dict[str, np.ndarray]:
    """Run both passes and compare every result with the definition; NaN never passes."""
    arrays = arrays_of(case) if arrays is None else arrays
    allowed = case.allowed() if allowed is None else allowed
    problem = problem_of(case, arrays)
    captures = [] if problem.mask is None else [c.array for c in problem.mask.arrays]
    results = emulator.attention(problem, arrays, captures=captures, arch=arch, **options)
    oracle = np.longdouble if case.dtype == "float64" else np.float64
    known = {"scale": problem.scale, "allowed": allowed, "dtype": oracle}
    o, lse = reference.forward(*(arrays[name] for name in "qkv"), **known)
    expected = {"o": o, "lse": lse}
    if "do" in arrays:
        gradients = reference.backward(
            *(arrays[name] for name in ("do", "q", "k", "v")), dlse=arrays.get("dlse"), **known
        )
        expected.update(zip(("dq", "dk", "dv"), gradients))
    for name, right in expected.items():
        close(name, results[name], right, case.dtype, tolerance)
    return results


def close(name: str, got: np.ndarray, right: np.ndarray, dtype: str, tolerance: float) -> None:
    empty = np.isneginf(right)
    assert np.array_equal(np.isneginf(got), empty), f"{name}: -inf in other places"
    got, right = np.where(empty, 0, got.astype(right.dtype)), np.where(empty, 0, right)
    if name == "lse" and dtype != "float64":
        dtype = "float32"
    limit = tolerance * TOLERANCE[dtype] * max(1.0, float(np.abs(right).max(initial=0)))
    error = float(np.abs(got - right).max(initial=0))
    assert error <= limit, f"{name}: error {error:.3g}, allowed {limit:.3g}"


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
@pytest.mark.parametrize("arch", [75, 90])
def test_dtypes(dtype: str, arch: int) -> None:
    check(replace(SMALL, dtype=dtype, head_dim=64, head_dim_v=64, mask="causal"), arch=arch)


@pytest.mark.parametrize(
    ("head_dim", "head_dim_v", "dtype"),
    [(1, 1, "float32"), (8, 40, "float32"), (72, 8, "float32"), (96, 130, "float32"),
     (130, 96, "float16"), (300, 20, "float32"), (20, 300, "bfloat16"), (512, 512, "float32"),
     (130, 72, "float64")],
)  # fmt: skip
def test_head_dims(head_dim: int, head_dim_v: int, dtype: str) -> None:
    dims = {"head_dim": head_dim, "head_dim_v": head_dim_v, "dtype": dtype}
    check(replace(SMALL, heads_q=2, seqlen_q=70, seqlen_k=69, mask="causal", **dims), tolerance=2)


@pytest.mark.parametrize(
    "lengths", [(1, 1), (1, 63), (64, 65), (65, 64), (127, 127), (129, 33), (33, 129), (2, 200)]
)
def test_lengths(lengths: tuple[int, int]) -> None:
    for mask in ("none", "causal", "window", "top-left"):
        check(replace(SMALL, seqlen_q=lengths[0], seqlen_k=lengths[1], mask=mask))


@pytest.mark.parametrize("heads", [(1, 1), (3, 1), (9, 3), (8, 1)])
def test_groups(heads: tuple[int, int]) -> None:
    check(replace(SMALL, heads_q=heads[0], heads_k=heads[1], mask="causal"))
