"""Faults that users of attention libraries met, in every back end; numbers are those of FAULTS.

The rules hold for every back end: what stands in masked places, empty rows, large numbers, sizes.
"""

import sys
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
from cases import DTYPES, numpy_dtype, round_to
from tolerance import Judge, close

import cuflash

pytestmark = pytest.mark.filterwarnings("error")

GRADIENTS = ("dq", "dk", "dv")

xp: Any = np  # the module of the arrays: NumPy, or CuPy


@pytest.fixture(params=["numpy", pytest.param("cupy", marks=pytest.mark.gpu)], autouse=True)
def back_end(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every test of this file runs on the CPU and on a GPU."""
    module = np if request.param == "numpy" else pytest.importorskip("cupy")
    monkeypatch.setattr(sys.modules[__name__], "xp", module)


def compute(arrays: Mapping[str, np.ndarray], **options: Any) -> dict[str, np.ndarray]:
    """o, lse and, where there is a do, the gradients, as NumPy arrays."""
    moved = {name: xp.asarray(array) for name, array in arrays.items()}
    options = {n: xp.asarray(x) if isinstance(x, np.ndarray) else x for n, x in options.items()}
    q, k, v = (moved[name] for name in "qkv")
    o, lse = cuflash.attention(q, k, v, **options, return_lse=True)
    results = {"o": o, "lse": lse}
    if "do" in arrays:
        dlse = moved.get("dlse")
        grads = cuflash.attention_backward(moved["do"], q, k, v, o, lse, dlse=dlse, **options)
        results |= {"dq": grads.dq, "dk": grads.dk, "dv": grads.dv}
    return {n: x if isinstance(x, np.ndarray) else x.get() for n, x in results.items()}


def draw(
    rng: np.random.Generator, seqlen_q: int, seqlen_k: int, *, batch: int = 1, heads: int = 2,
    heads_k: int | None = None, dim: int = 8, dim_v: int | None = None, dtype: str = "float32",
) -> dict[str, np.ndarray]:  # fmt: skip
    """q, k, v, do offset by 0.5, dlse; float64 arrays of values that dtype holds."""
    heads_k, dim_v = heads_k or heads, dim_v or dim
    shapes = {
        "q": (batch, seqlen_q, heads, dim), "k": (batch, seqlen_k, heads_k, dim),
        "v": (batch, seqlen_k, heads_k, dim_v), "do": (batch, seqlen_q, heads, dim_v),
    }  # fmt: skip
    arrays = {n: round_to(rng.standard_normal(s) + 0.5, dtype) for n, s in shapes.items()}
    return {**arrays, "dlse": round_to(rng.standard_normal((batch, heads, seqlen_q)), "float32")}


def cast(inputs: Mapping[str, np.ndarray], dtype: str) -> dict[str, np.ndarray]:
    kind = numpy_dtype(dtype)
    return {n: x if n == "dlse" else x.astype(kind) for n, x in inputs.items()}


def check(
    inputs: Mapping[str, np.ndarray], allowed: np.ndarray | None = None, *,
    dtype: str = "float32", scale: float | None = None, **options,
) -> dict[str, np.ndarray]:  # fmt: skip
    """Run, judge against the oracle on the pairs `allowed`, return the results."""
    options = options if scale is None else {**options, "scale": scale}
    results = compute(cast(inputs, dtype), **options)
    scale = inputs["q"].shape[-1] ** -0.5 if scale is None else scale
    Judge(inputs, scale=scale, dtype=dtype, allowed=allowed).check(**results)
    return results


def bottom_right(seqlen_q: int, seqlen_k: int) -> np.ndarray:
    return np.tri(seqlen_q, seqlen_k, seqlen_k - seqlen_q, dtype=bool)


@pytest.mark.parametrize("dtype", DTYPES)
def test_1_a_row_that_sees_no_key(dtype: str, rng: np.random.Generator) -> None:
    inputs = draw(rng, 6, 10, dtype=dtype)
    allowed = bottom_right(6, 10)
    allowed[5] = False
    inputs["dlse"][:, :, 5] = np.nan  # what its dlse holds does not count
    results = compute(cast(inputs, dtype), mask=allowed)
    assert (results["o"][:, 5] == 0).all() and (results["lse"][:, :, 5] == -np.inf).all()
    assert (results["dq"][:, 5] == 0).all()
    clean = {**inputs, "dlse": np.where(np.arange(6) == 5, 0, inputs["dlse"])}
    Judge(clean, scale=8**-0.5, dtype=dtype, allowed=allowed).check(**results)


@pytest.mark.parametrize("seqlen", [60, 600])
@pytest.mark.parametrize("garbage", [np.nan, np.inf, -np.inf, "largest"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_3_what_masked_places_hold(
    dtype: str, garbage: float | str, seqlen: int, rng: np.random.Generator
) -> None:
    """Keys that no query sees, and queries that see no key, hold garbage in q, k, v and do."""
    inputs = draw(rng, seqlen, seqlen + 7, dtype=dtype, heads=4, heads_k=2)
    kind = numpy_dtype(dtype)
    if garbage == "largest":
        garbage = (
            -3e38 if dtype in ("float32", "bfloat16") else {"float16": 65504}.get(dtype, 1e308)
        )
        garbage = float(np.asarray(garbage).astype(kind))
    allowed = rng.random((seqlen, seqlen + 7)) < 0.4
    keys, queries = np.arange(3, seqlen, 11), np.arange(2, seqlen, 13)
    allowed[:, keys] = False
    allowed[queries] = False
    clean = check(inputs, allowed, dtype=dtype, mask=allowed)
    dirty = {name: x.copy() for name, x in inputs.items()}
    dirty["dlse"][:, :, queries] = np.nan
    for name in ("k", "v"):
        dirty[name][:, keys] = garbage
    for name in ("q", "do"):
        dirty[name][:, queries] = garbage
    results = compute(cast(dirty, dtype), mask=allowed)
    Judge(inputs, scale=8**-0.5, dtype=dtype, allowed=allowed).check(**results)
    assert (results["dq"][:, queries] == 0).all()
    assert (results["dk"][:, keys] == 0).all() and (results["dv"][:, keys] == 0).all()
    assert set(clean) == set(results)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["q", "k", "v", "do"])
def test_nan_of_an_attended_pair_propagates(
    name: str, dtype: str, rng: np.random.Generator
) -> None:
    """To the rows and columns that depend on it by a pair that is seen, and to no other."""
    inputs = draw(rng, 40, 300, dtype=dtype)
    where = 9 if name in ("q", "do") else 270  # seen by the rows from 10 on
    inputs[name][0, where, 0, 3] = np.nan
    results = {n: np.isnan(x.astype(np.float64)) for n, x in
               compute(cast(inputs, dtype), causal=True).items()}  # fmt: skip
    seen = bottom_right(40, 300)
    rows = np.arange(40) == where if name in ("q", "do") else seen[:, where]
    columns = seen[rows].any(axis=0)
    for result, nan in results.items():
        if (name, result) in (("do", "o"), ("do", "lse"), ("v", "lse")):
            want = np.zeros(nan.shape[1], bool)
        else:
            want = columns if result in ("dk", "dv") else rows
        at_head = nan[0, 0] if result == "lse" else nan[0, :, 0].any(axis=-1)
        want = np.zeros_like(at_head) if not want.any() else want
        if (name, result) == ("v", "dv"):
            want = np.zeros_like(at_head)  # dv = p^T do has no v in it
        np.testing.assert_array_equal(at_head, want, err_msg=result)
        other_head = nan[0, 1] if result == "lse" else nan[0, :, 1]
        assert not other_head.any()


def test_4_left_padding_in_a_second_layer(rng: np.random.Generator) -> None:
    inputs = draw(rng, 6, 6, batch=2)
    padding = np.ones((2, 1, 1, 6), bool)
    padding[1, ..., :3] = False
    first = check(inputs, padding & bottom_right(6, 6), causal=True, mask=padding)
    assert (first["o"][1, :3] == 0).all()
    x = {name: first["o"].astype(np.float64) for name in "qkv"}
    second = compute(cast(x, "float32"), causal=True, mask=padding)
    assert np.isfinite(second["o"]).all() and (second["o"][1, :3] == 0).all()


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("size", [40.0, 1e6, 1e13])
def test_5_large_negative_scores(size: float, dtype: str, rng: np.random.Generator) -> None:
    """Scores near -8.4e5, -2e10 and -2e17: the softmax of their differences, never 0."""
    inputs = draw(rng, 4, 3, dim=128, heads=1, dtype=dtype)
    inputs["q"][:] = size
    inputs["k"][:] = -166
    inputs["k"][0, 1] = round_to(inputs["k"][0, 1] * 0.99999, dtype)
    o = check(inputs, dtype=dtype, scale=1.0)["o"]
    assert np.isfinite(o).all() and (np.abs(o) > 0).any(axis=-1).all()


def test_7_whole_tiles_of_empty_rows_are_written(rng: np.random.Generator) -> None:
    allowed = np.ones((700, 300), bool)
    allowed[200:] = False
    results = check(draw(rng, 700, 300, dim=4), allowed, mask=allowed)
    assert (results["o"][:, 200:] == 0).all() and (results["dq"][:, 200:] == 0).all()


@pytest.mark.parametrize("shape", [(4, 1, 1, 32), (1, 4, 1, 32), (4, 1, 16, 1), (16, 32), (32,)])
def test_8_masks_broadcast(shape: tuple[int, ...], rng: np.random.Generator) -> None:
    allowed = rng.random(shape) < 0.6
    check(draw(rng, 16, 32, batch=4, heads=4), allowed, mask=allowed)


def test_12_which_corner() -> None:
    """The sum of one-hot values shows which keys each query saw."""
    q, k, v = np.zeros((1, 2, 1, 4)), np.zeros((1, 5, 1, 4)), np.eye(5)[None, :, None]
    for causal, want in (
        (True, [[1, 1, 1, 1, 0], [1, 1, 1, 1, 1]]),
        ("bottom-right", [[1, 1, 1, 1, 0], [1, 1, 1, 1, 1]]),
        ("top-left", [[1, 0, 0, 0, 0], [1, 1, 0, 0, 0]]),
    ):
        o = compute({"q": q, "k": k, "v": v}, causal=causal)["o"]
        np.testing.assert_array_equal(o[0, :, 0] > 0, np.array(want, bool))


@pytest.mark.parametrize("sizes", [(300, 700), (700, 300), (1, 600), (400, 531)])
def test_13_14_16_both_corners_over_many_tiles(
    sizes: tuple[int, int], rng: np.random.Generator
) -> None:
    inputs = draw(rng, *sizes, heads=1)
    check(inputs)
    check(inputs, bottom_right(*sizes), causal=True)
    check(inputs, np.tri(*sizes, dtype=bool), causal="top-left")


def test_17_a_full_window_is_causal(rng: np.random.Generator) -> None:
    arrays = cast(draw(rng, 300, 300), "float32")
    want = compute(arrays, causal=True)
    for left in (None, 300, 299):
        for name, got in compute(arrays, window=(left, 0)).items():
            close(name, got, want[name].astype(np.float64), 2e-6)


def test_18_windows_that_leave_the_keys(rng: np.random.Generator) -> None:
    index = np.arange(33)[None, :] - (np.arange(129)[:, None] + 33 - 129)
    allowed = (index >= -8) & (index <= 16)
    results = check(draw(rng, 129, 33), allowed, window=(8, 16))
    assert (results["o"][:, ~allowed.any(axis=1)] == 0).all() and not allowed.any(axis=1).all()


@pytest.mark.parametrize("masked", [True, False])
@pytest.mark.parametrize("seqlen", [1, 64, 255, 257, 511, 512, 704])
def test_27_28_rows_of_very_negative_lse(
    seqlen: int, masked: bool, rng: np.random.Generator
) -> None:
    """lse near -120: exp(s - lse) of padding must not overflow into 0 * inf."""
    inputs = draw(rng, seqlen, seqlen, heads=1, dim=64)
    for name in "qk":
        inputs[name] = round_to((inputs[name] - 0.5) * 0.1, "float32")
    inputs["q"][..., 0], inputs["k"][..., 0] = 1, -120 * 8
    allowed = np.tri(seqlen, dtype=bool) if masked else np.ones((seqlen, seqlen), bool)
    check(inputs, allowed, mask=allowed)


@pytest.mark.parametrize("seqlen_k", [8, 16, 32, 64, 128])
def test_29_equal_scores(seqlen_k: int, rng: np.random.Generator) -> None:
    for seqlen_q in (seqlen_k - 1, seqlen_k, seqlen_k + 1):
        inputs = {n: np.ones_like(x) for n, x in draw(rng, seqlen_q, seqlen_k).items()}
        assert (check(inputs)["o"] == 1).all()


@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float64"])
def test_37_one_huge_logit(dtype: str) -> None:
    x = np.full((1, 1, 1, 64), 133120.0).astype(numpy_dtype(dtype))
    results = compute({"q": x, "k": x, "v": x, "do": x})
    assert (results["o"] == x).all()
    assert results["lse"].item() == pytest.approx(133120.0**2 * 64 / 8, rel=1e-7)
    assert (results["dv"] == x).all() and (results["dq"] == 0).all()


def test_41_54_decoding_step_by_step(rng: np.random.Generator) -> None:
    inputs = draw(rng, 96, 96, heads=28, heads_k=4)
    whole = compute(cast(inputs, "float32"), causal=True)["o"]
    for length in range(1, 97):
        step = {"q": inputs["q"][:, length - 1 : length]}
        step |= {name: inputs[name][:, :length] for name in "kv"}
        o = compute(cast(step, "float32"), causal=True)["o"]
        close("o", o[:, 0], whole[:, length - 1].astype(np.float64), 2e-6)
    for seqlen_q in range(1, 17):
        check(draw(rng, seqlen_q, 90), bottom_right(seqlen_q, 90), causal=True)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_42_scales(dtype: str, rng: np.random.Generator) -> None:
    inputs = draw(rng, 20, 300, dtype=dtype)
    o = check(inputs, dtype=dtype, scale=0.0)["o"]
    close("o", o, np.broadcast_to(inputs["v"].mean(axis=1, keepdims=True), o.shape), 2e-6)
    check(inputs, dtype=dtype, scale=-0.7)
    results = compute(cast(inputs, dtype), scale=9e15)
    assert all(np.isfinite(x).all() for x in results.values())
    for bad in (np.inf, np.nan):
        with pytest.raises(ValueError, match="scale"):
            compute(cast(inputs, dtype), scale=bad)


def test_49_50_52_53_odd_shapes(rng: np.random.Generator) -> None:
    check(draw(rng, 2, 1, heads=1, dim=1))
    for seqlen_q in (1, 300):
        check(draw(rng, seqlen_q, 40, dim=96))
    check(draw(rng, 5, 5, heads=9, heads_k=3))
    for seqlen_k in range(128, 228, 9):
        check(draw(rng, 1, seqlen_k))


# Finite inputs give finite results wherever the scores and the answer fit the type.
LARGE = {
    "dot": dict(q=1e25, k=1e25, scale=1e-51),  # <q, k> overflows, scale * <q, k> does not
    "q times scale": dict(q=1e34, k=1e-38, scale=1e5),  # logits of some tens
    "scale below the type": dict(q=1e30, k=1e25, scale=1e-56),
    "scale above the type": dict(q=1e-30, k=1e-25, scale=1e54),
    "v": dict(v=3e38),  # sum of p v overflows before it is divided
    "dp": dict(v=1e22, do=1e22, q=1e-10, k=1e-10),
    "ds": dict(v=1e20, do=1e20, q=1e-6, k=1e-6),
}


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("case", LARGE)
def test_finite_stays_finite(case: str, masked: bool, rng: np.random.Generator) -> None:
    if xp is not np and case == "q times scale":
        pytest.skip("float32 subnormals, which k holds here, count as 0 on a GPU")
    sizes = dict(LARGE[case])
    scale = sizes.pop("scale", 8**-0.5)
    inputs = draw(rng, 300, 520)
    del inputs["dlse"]
    for name, size in sizes.items():
        inputs[name] = round_to(np.clip(inputs[name], -1, 1) * size, "float32")
    allowed = bottom_right(300, 520) if masked else None
    results = compute(cast(inputs, "float32"), causal=masked, scale=scale)
    judge = Judge(inputs, scale=scale, dtype="float64", allowed=allowed)
    for name in results:
        want = judge.oracle[name]
        fits = np.abs(want) < 3.4e38
        assert np.isfinite(results[name][fits]).all(), name
        assert fits.all() or case in ("dp", "v", "q times scale")
        size = np.max(np.abs(want[fits]))
        # Where ds vanishes in the oracle, what is left of it times k or q is rounding: of
        # dp - delta, each a sum of 8 products of about 1, 8 * 8 * 2^-24.
        factor = {"dq": "k", "dk": "q"}.get(name)
        left = 4e-6 * scale * np.max(np.abs(inputs[factor])) if factor else 0
        close(name, results[name][fits], want[fits], 1e-4 * size + left)
