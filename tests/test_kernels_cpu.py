"""The simt kernels against the float64 definition, run on a CPU by the emulator (no GPU needed)."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cases import Case, numpy_dtype
from tolerance import Judge

from cuflash.gpu import launch, source
from cuflash.problem import Problem, make

sys.path.insert(0, str(Path(__file__).parent / "emulator"))
import emulator

pytestmark = pytest.mark.skipif(
    emulator.compiler() is None, reason="g++ is not installed: the emulator needs it"
)

SMALL = Case(seqlen_q=100, seqlen_k=131, batch=2, heads_q=4, heads_k=2, head_dim=16, head_dim_v=16)
CAUSAL = replace(SMALL, mask="causal")


def cast(case: Case, inputs: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """q, k, v, do in the dtype of the case, dlse in that of its sums."""
    sums = "float64" if case.dtype == "float64" else "float32"
    return {
        name: array.astype(numpy_dtype(sums if name == "dlse" else case.dtype))
        for name, array in inputs.items()
    }


class Named:
    """An array's shape and the name of its dtype, as `make` reads them."""

    def __init__(self, array: np.ndarray, dtype: str) -> None:
        self.shape, self.dtype = array.shape, dtype


def problem_of(case: Case, arrays: Mapping[str, np.ndarray]) -> Problem:
    return make(*(Named(arrays[name], case.dtype) for name in "qkv"), **case.options())[0]


def run(case: Case, arrays: Mapping[str, np.ndarray], **options: Any) -> dict[str, np.ndarray]:
    """o, lse and, if `do` is among the arrays, the gradients, by the kernels."""
    problem = problem_of(case, arrays)
    captures = [] if problem.mask is None else [c.array for c in problem.mask.arrays]
    return emulator.attention(problem, arrays, captures=captures, **options)


def check(
    case: Case, arrays: Mapping[str, np.ndarray] | None = None, **options: Any
) -> dict[str, np.ndarray]:
    """Run both passes and judge every result; NaN never passes."""
    arrays = cast(case, case.inputs()) if arrays is None else arrays
    results = run(case, arrays, **options)
    judge = Judge.of(case, {name: array.astype(np.float64) for name, array in arrays.items()})
    judge.check(**results)
    return results


@pytest.mark.parametrize(
    ("dtype", "arch"),
    [("float16", 90), ("bfloat16", 90), ("float32", 90), ("float32", 75), ("float64", 75)],
)
def test_dtypes(dtype: str, arch: int) -> None:
    check(replace(CAUSAL, dtype=dtype, head_dim=64, head_dim_v=64), arch=arch)


@pytest.mark.parametrize(
    ("head_dim", "head_dim_v", "dtype"),
    [(1, 1, "float32"), (72, 8, "float32"), (40, 130, "float32"), (130, 96, "float16"),
     (20, 300, "bfloat16"), (512, 512, "float32"), (130, 72, "float64")],
)  # fmt: skip
def test_head_dims(head_dim: int, head_dim_v: int, dtype: str) -> None:
    dims = {"head_dim": head_dim, "head_dim_v": head_dim_v, "dtype": dtype}
    check(replace(SMALL, heads_q=2, seqlen_q=70, seqlen_k=69, **dims))


@pytest.mark.parametrize(
    "lengths",
    [(1, 1), (1, 63), (64, 65), (65, 64), (127, 127), (129, 33), (33, 129), (2, 200), (200, 2)],
)
def test_lengths(lengths: tuple[int, int]) -> None:
    for mask in ("none", "causal"):
        check(replace(SMALL, seqlen_q=lengths[0], seqlen_k=lengths[1], mask=mask))


@pytest.mark.parametrize("heads", [(3, 1), (9, 3), (8, 1)])
def test_groups(heads: tuple[int, int]) -> None:
    check(replace(CAUSAL, heads_q=heads[0], heads_k=heads[1]))


@pytest.mark.parametrize("name", ["window", "documents-causal", "array-empty-rows", "by-head"])
def test_masks(name: str) -> None:
    check(replace(SMALL, mask=name))


def test_sizes_of_zero() -> None:
    sizes = ({"seqlen_q": 0}, {"seqlen_k": 0}, {"heads_q": 0}, {"batch": 0})
    for size in sizes:
        case = replace(SMALL, **size)
        results = run(case, cast(case, case.inputs()))
        assert np.all(results.pop("lse") == -np.inf)
        assert all(np.all(array == 0) for array in results.values())


def test_any_strides() -> None:
    """Reversed, repeated, transposed and misaligned inputs give the same bits as packed ones."""
    arrays = cast(CAUSAL, CAUSAL.inputs())
    arrays["v"][:] = arrays["v"][:1]  # so that a stride of 0 can say the same
    packed = run(CAUSAL, arrays)
    views = {
        "q": arrays["q"][:, ::-1].copy()[:, ::-1],
        "k": np.asfortranarray(arrays["k"]),
        "v": np.broadcast_to(arrays["v"][:1], arrays["v"].shape),
        "do": np.concatenate([arrays["do"]] * 2, axis=3)[..., 16:],
        "dlse": arrays["dlse"].transpose(2, 0, 1).copy().transpose(1, 2, 0),
    }
    shifted = np.empty(arrays["q"].size + 1, np.float32)[1:].reshape(arrays["q"].shape)
    shifted[:] = views["q"]
    for q in (views["q"], shifted):
        strided = run(CAUSAL, {**views, "q": q})
        for name, array in packed.items():
            assert np.array_equal(array, strided[name]), name


def test_order_of_threads_does_not_matter() -> None:
    """With a barrier missing, threads that run in the opposite order see other numbers."""
    arrays = cast(CAUSAL, CAUSAL.inputs())
    ahead, back = run(CAUSAL, arrays), run(CAUSAL, arrays, reverse=True)
    assert all(np.array_equal(ahead[name], back[name]) for name in ahead)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_masked_values_reach_nothing(value: float) -> None:
    """The last 20 keys are padding: no query sees them, whatever they hold."""
    case = replace(SMALL, seqlen_q=111, mask="top-left")
    arrays = cast(case, case.inputs())
    right = run(case, arrays)
    for name in "kv":
        arrays[name] = arrays[name].copy()
        arrays[name][:, 111:] = value
    dirty = run(case, arrays)
    for name, array in right.items():
        np.testing.assert_allclose(dirty[name], array, rtol=1e-5, atol=1e-5)
    assert np.all(dirty["dk"][:, 111:] == 0) and np.all(dirty["dv"][:, 111:] == 0)


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_rows_without_a_key_give_no_gradient(value: float) -> None:
    """What q, do and dlse hold in an empty row reaches no gradient."""
    case = replace(CAUSAL, seqlen_q=131, seqlen_k=100)  # the first 31 rows see nothing
    arrays = cast(case, case.inputs())
    right = check(case, arrays)
    for name in ("q", "do"):
        arrays[name][:, :31] = value
    arrays["dlse"][:, :, :31] = value
    dirty = run(case, arrays)
    for name, array in right.items():
        np.testing.assert_allclose(dirty[name], array, rtol=1e-5, atol=1e-5)
    assert np.all(dirty["dq"][:, :31] == 0) and np.all(dirty["o"][:, :31] == 0)


def test_nan_in_an_attended_pair_propagates() -> None:
    arrays = cast(CAUSAL, CAUSAL.inputs())
    arrays["v"][0, 40, 0, 3] = np.nan
    arrays["k"][1, 50, 1, 2] = np.nan
    results = run(CAUSAL, arrays)
    rows = np.arange(100) + 31  # logical positions
    assert np.array_equal(np.isnan(results["o"][0, :, :2, 3]), np.stack([rows >= 40] * 2, 1))
    assert np.array_equal(np.isnan(results["lse"][1, 2]), rows >= 50)
    assert np.isnan(results["dq"][0, rows >= 40, 0]).all()
    assert not np.isnan(results["dq"][0, rows < 40]).any()


@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float64"])
def test_large_logits(dtype: str) -> None:
    """Equal keys at a logit of 133120^2 * 8: o is v exactly, and lse has no error of its own."""
    case = replace(SMALL, seqlen_q=3, seqlen_k=70, head_dim=64, head_dim_v=64, dtype=dtype)
    arrays = cast(case, {name: np.full_like(array, 133120.0)
                         for name, array in case.inputs().items() if name in "qkv"})  # fmt: skip
    results = run(case, arrays)
    assert np.all(results["o"].astype(np.float64) == 133120)
    np.testing.assert_allclose(results["lse"], 133120.0**2 * 8, rtol=1e-6)


def test_sums_that_overflow_although_the_result_does_not() -> None:
    """<q, k> beyond float32 with a tiny scale; weighted values whose unnormalised sum overflows."""
    case = replace(SMALL, scale=1e-39)
    inputs = case.inputs()
    inputs["q"] *= 1e20
    inputs["k"] *= 1e20
    inputs["v"] *= 1e36
    arrays = cast(case, {name: inputs[name] for name in "qkv"})
    results = run(case, arrays)
    judge = Judge.of(case, {name: array.astype(np.float64) for name, array in arrays.items()})
    np.testing.assert_allclose(results["lse"], judge.oracle["lse"], rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(results["o"], judge.oracle["o"], rtol=1e-5, atol=1e31)


def test_the_parameter_block_has_the_fields_of_params_cuh() -> None:
    struct = re.search(r"struct Params \{(.*?)\n\};", source.flatten("params.cuh", set()), re.S)
    names = []
    for line in struct[1].splitlines():
        declared = re.match(r"\s*(?:Tensor|Rows|long long|double) ([^;]+);", line)
        names += [] if declared is None else re.sub(r"\[.*", "", declared[1]).split(", ")
    assert tuple(name.rstrip("_") for name in names) == launch.FIELDS


# What a wrong kernel does, in which pass it shows, a line, and the same line wrong.
MUTANTS = [
    ("masks nothing", "forward", "      if (attended) {", "      if (true) {"),
    ("keeps the sum as it was", "forward", "row_sum *= rescale;", ";"),
    ("keeps o as it was", "forward", "o_acc[chunk][i][j] *= rescale;", ";"),
    ("lacks a barrier", "forward", "__syncthreads();  // q, k, v: written by all", "//"),
    ("misses the last tile", "forward", "mine < tiles_ ?", "mine < tiles_ - 1 ?"),
    ("multiplies by masked NaN", "forward", "is_bad = __syncthreads_or(!is_finite(probe))",
     "is_bad = __syncthreads_or(false)"),
    ("takes another head's lse", "backward", "load_rows(p, smem, head.b, head.h, tile.row0);",
     "load_rows(p, smem, head.b, 0, tile.row0);"),
    ("leaves dlse out", "backward", "if (p.dlse.pointer != nullptr)", "if (false)"),
    ("does not scale dk", "backward", "column0, dk_acc, scale", "column0, dk_acc, 1"),
]  # fmt: skip


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant[0])
def test_a_wrong_kernel_fails(mutant: tuple[str, str, str, str]) -> None:
    """The checks above see a kernel that is wrong by one line."""
    name, shows_in, old, new = mutant
    kernels = source.flatten("simt/forward.cu", set()) + source.flatten("simt/backward.cu", set())
    assert old in kernels, "the line is not in the kernels any more"
    arrays = cast(CAUSAL, CAUSAL.inputs())
    if shows_in == "forward":
        arrays = {each: arrays[each] for each in "qkv"}
    if name == "multiplies by masked NaN":
        arrays["v"][:, -1] = np.nan  # seen by the last query alone
    right = run(CAUSAL, arrays)
    try:
        wrong = run(CAUSAL, arrays, edit=lambda text: text.replace(old, new))
    except RuntimeError:  # not all threads reach a barrier
        return
    assert not all(np.allclose(wrong[n], right[n], 1e-4, 1e-4, equal_nan=True) for n in right)
