"""The whole table of cases through the public calls, in every back end, against the definition.

Outputs and workspaces are filled with NaN before each call, so what is not written is seen.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import scores
from cases import CASES, MASKS, NEEDS_KEYS, Case, numpy_dtype
from scores import SCORES, Scored
from tolerance import Judge, close

import cuflash
from cuflash.arrays import library_named

BACK_ENDS = ["numpy", pytest.param("cupy", marks=pytest.mark.gpu)]
RUNNABLE = [
    case
    for case in CASES
    if case.seqlen_q <= case.seqlen_k
    or (case.mask not in NEEDS_KEYS and case.score not in scores.NEEDS_KEYS)
]


@pytest.fixture(autouse=True)
def poison(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Iterator[None]:
    """Everything that a call allocates starts as NaN (integers as -1)."""
    library = library_named(request.getfixturevalue("back_end"))
    empty = library.empty

    def filled(shape: Any, dtype: str, device: Any) -> Any:
        array = empty(shape, dtype, device)
        array.fill(np.nan if "float" in dtype else -1)
        return array

    monkeypatch.setattr(library, "empty", filled)
    yield


def module_of(back_end: str) -> Any:
    return np if back_end == "numpy" else pytest.importorskip("cupy")


def to_numpy(array: Any) -> np.ndarray:
    return array if isinstance(array, np.ndarray) else array.get()


def to_pointer(array: Any) -> int:
    return array.ctypes.data if isinstance(array, np.ndarray) else array.data.ptr


def run(case: Case, inputs: dict[str, np.ndarray], back_end: str, **more: Any) -> dict[str, Any]:
    """o, lse, dq, dk, dv of a case as NumPy arrays in the order of the oracle."""
    xp = module_of(back_end)
    dtype = numpy_dtype(case.dtype)
    q, k, v, do = (
        xp.asarray(case.to_caller(inputs[n].astype(dtype))) for n in ("q", "k", "v", "do")
    )
    options = {**case.options(xp.asarray), **more}
    params = Scored(case).params(xp.asarray)
    options |= SCORES[case.score].options(params)
    o, lse = cuflash.attention(q, k, v, return_lse=True, **options)
    dlse = xp.asarray(inputs["dlse"].reshape(lse.shape).astype(lse.dtype))
    gradients = cuflash.attention_backward(do, q, k, v, o, lse, dlse=dlse, **options)
    for name, like, result in zip(("o", "dq", "dk", "dv"), (None, q, k, v), (o, *gradients)):
        assert type(result) is type(q) and result.dtype == q.dtype, name
        assert like is None or result.shape == like.shape, name
    results = dict(zip(("dq", "dk", "dv"), gradients), o=o)
    results = {name: case.from_caller(to_numpy(array)) for name, array in results.items()}
    for name, param in params.items():
        results[f"param {name}"] = to_numpy(gradients.dparams[param])
        assert gradients.dparams[param].dtype == param.array.dtype
    return {**results, "lse": to_numpy(lse).reshape(case.pairs[:3])}


def judge(case: Case, inputs: dict[str, np.ndarray], found: dict[str, Any]) -> None:
    """Every result against the oracle, the gradients of parameters too."""
    params = {name.removeprefix("param "): x for name, x in found.items() if "param" in name}
    of_case = Judge.of(case, inputs)
    of_case.check(**{name: x for name, x in found.items() if "param" not in name})
    of_case.check_params(**params)


@pytest.mark.parametrize("back_end", BACK_ENDS)
@pytest.mark.parametrize("case", RUNNABLE, ids=lambda case: f"{case.id}-{case.scale}")
def test_case(case: Case, back_end: str) -> None:
    inputs = case.inputs()
    judge(case, inputs, run(case, inputs, back_end))


@pytest.mark.parametrize("back_end", BACK_ENDS)
@pytest.mark.parametrize("mask", ["causal", "documents", "array-keys", "array-empty-rows"])
@pytest.mark.parametrize("value", [np.nan, np.inf, 1e38])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_what_masked_pairs_hold_reaches_nothing(
    dtype: str, mask: str, value: float, back_end: str
) -> None:
    case = Case(dtype=dtype, mask=mask, seqlen_q=100, seqlen_k=131)
    inputs = case.inputs()
    allowed = case.allowed()
    seen = allowed.any(axis=2).reshape(2, 2, 2, 131).any(axis=2)  # of each key of each key head
    dead_k = np.argwhere(~seen.transpose(0, 2, 1))
    dead_q = np.argwhere(~allowed.any(axis=3).transpose(0, 2, 1))
    dirty = {name: array.copy() for name, array in inputs.items()}
    for b, s, h in dead_k:
        dirty["k"][b, s, h] = dirty["v"][b, s, h] = value
    for b, s, h in dead_q:
        dirty["q"][b, s, h] = dirty["do"][b, s, h] = value
        dirty["dlse"][b, h, s] = value
    rows = slice(0, 100)
    names = ("o", "lse", "dq", "dk", "dv")
    if mask == "causal":  # the last key is seen by the last row alone: all others stay clean
        dirty["k"][:, 130] = dirty["v"][:, 130] = value
        rows, names = slice(0, 99), ("o", "lse", "dq")
    judge = Judge.of(case, inputs)
    found = run(case, dirty, back_end)
    for name in names:
        at = (slice(None), slice(None), rows) if name == "lse" else (slice(None), rows)
        at = at if name in ("o", "lse", "dq") else ...
        limit = np.broadcast_to(judge.limit(name), judge.oracle[name].shape)
        close(name, found[name][at], judge.oracle[name][at], limit[at])


@pytest.mark.parametrize("back_end", BACK_ENDS)
@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("name", ["q", "k", "v"])
def test_a_nan_in_an_attended_pair_is_seen(name: str, dtype: str, back_end: str) -> None:
    case = Case(mask="window", dtype=dtype)
    inputs = case.inputs()
    inputs[name][0, 50, 0] = np.nan
    found = run(case, inputs, back_end)
    rows = np.isnan(found["o"][0]).any(axis=(1, 2))
    allowed = np.broadcast_to(case.allowed(), case.pairs)[0, 0]
    expected = np.arange(100) == 50 if name == "q" else allowed[:, 50]
    np.testing.assert_array_equal(rows, expected)
    assert not np.isnan(found["o"][1]).any()


@pytest.mark.parametrize("back_end", BACK_ENDS)
@pytest.mark.parametrize("length", [64, 65, 200])
def test_huge_logits(length: int, back_end: str) -> None:
    """All keys alike at logits of 1e11: o is v, lse is the logit plus log n."""
    xp = module_of(back_end)
    q = xp.full((1, length, 1, 64), 133120, numpy_dtype("bfloat16"))
    o, lse = cuflash.attention(q, q, q, return_lse=True)
    assert (to_numpy(o).astype(float) == 133120).all()
    np.testing.assert_allclose(to_numpy(lse), 133120.0**2 * 8, rtol=1e-6)
    gradients = cuflash.attention_backward(q, q, q, q, o, lse)
    assert all(np.isfinite(to_numpy(g).astype(float)).all() for g in gradients)


@pytest.mark.parametrize("back_end", BACK_ENDS)
def test_scores_that_overflow_before_the_scale(back_end: str) -> None:
    """<q, k> leaves float32, scale * <q, k> does not: finite, and right."""
    case = Case(dtype="float32", scale=1e-40, mask="causal", head_dim=8, head_dim_v=8)
    inputs = case.inputs()
    for name in ("q", "k"):
        inputs[name] = (inputs[name] * 1e20).astype(np.float32).astype(float)
    found = run(case, inputs, back_end)
    oracle = Judge.of(case, inputs).oracle
    for name, result in found.items():
        want = oracle[name]
        close(name, result, want, 1e-5 * np.abs(want[np.isfinite(want)]).max())


@pytest.mark.parametrize("back_end", BACK_ENDS)
@pytest.mark.parametrize("zero", ["batch", "heads_q", "seqlen_q", "seqlen_k", "all"])
def test_sizes_of_zero(zero: str, back_end: str) -> None:
    sizes = {"batch": 2, "heads_q": 4, "heads_k": 2, "seqlen_q": 5, "seqlen_k": 6}
    empty = {zero: 0} if zero != "all" else dict.fromkeys(sizes, 0)
    case = Case(**{**sizes, **empty}, mask="causal")
    inputs = case.inputs()
    found = run(case, inputs, back_end)
    if zero == "seqlen_k":
        assert (found["o"] == 0).all() and (found["lse"] == -np.inf).all()
        assert (found["dq"] == 0).all()
    if zero == "seqlen_q":
        assert (found["dk"] == 0).all() and (found["dv"] == 0).all()


VIEWS: dict[str, Callable[[Any, Any], Any]] = {
    "transposed": lambda xp, x: xp.ascontiguousarray(x.transpose(0, 2, 1, 3)).transpose(0, 2, 1, 3),
    "dim-outside": lambda xp, x: xp.ascontiguousarray(x.transpose(3, 0, 1, 2)).transpose(
        1, 2, 3, 0
    ),
    "sliced": lambda xp, x: xp.concatenate([x, x], axis=3)[..., : x.shape[3]],
    "every-second": lambda xp, x: xp.repeat(x, 2, axis=1)[:, ::2],
    "reversed": lambda xp, x: xp.ascontiguousarray(x[:, ::-1, :, ::-1])[:, ::-1, :, ::-1],
    "misaligned": lambda xp, x: xp.concatenate([x.ravel()[:1], x.ravel()])[1:].reshape(x.shape),
}


@pytest.mark.parametrize("back_end", BACK_ENDS)
@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize("view", VIEWS)
def test_strides(view: str, dtype: str, back_end: str) -> None:
    xp = module_of(back_end)
    case = Case(dtype=dtype, mask="causal", head_dim=24, head_dim_v=16)
    inputs = case.inputs()
    cast = {n: xp.asarray(inputs[n].astype(numpy_dtype(dtype))) for n in ("q", "k", "v", "do")}
    wanted = [to_numpy(array) for array in pipeline(cast)]
    for name in cast:
        moved = {**cast, name: VIEWS[view](xp, cast[name])}
        np.testing.assert_array_equal(to_numpy(moved[name]), to_numpy(cast[name]))
        for got, want in zip(pipeline(moved), wanted):
            np.testing.assert_allclose(
                to_numpy(got).astype(float), want.astype(float), rtol=1e-2, atol=1e-3
            )


def pipeline(arrays: dict[str, Any]) -> list[Any]:
    q, k, v, do = (arrays[name] for name in ("q", "k", "v", "do"))
    o, lse = cuflash.attention(q, k, v, causal=True, return_lse=True)
    return [o, *cuflash.attention_backward(do, q, k, v, o, lse, causal=True)]


@pytest.mark.parametrize("back_end", BACK_ENDS)
def test_broadcast_inputs(back_end: str) -> None:
    """Strides of 0: one key head expanded over all, and the do of a plain sum."""
    xp = module_of(back_end)
    rng = np.random.default_rng(3)
    q, k, v = (xp.asarray(rng.standard_normal((2, 40, n, 8)).astype(np.float32)) for n in (4, 1, 1))
    wide = [xp.broadcast_to(x, (2, 40, 4, 8)) for x in (k, v)]
    do = xp.broadcast_to(xp.ones((), np.float32), q.shape)
    o, lse = cuflash.attention(q, *wide, return_lse=True)
    dq, dk, dv = cuflash.attention_backward(do, q, *wide, o, lse)
    o_1, lse_1 = cuflash.attention(q, k, v, return_lse=True)
    dq_1, dk_1, dv_1 = cuflash.attention_backward(xp.ones_like(q), q, k, v, o_1, lse_1)
    for a, b in (
        (o, o_1),
        (dq, dq_1),
        (dk.sum(2, keepdims=True), dk_1),
        (dv.sum(2, keepdims=True), dv_1),
    ):
        np.testing.assert_allclose(to_numpy(a), to_numpy(b), rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("back_end", BACK_ENDS)
def test_one_buffer_for_all(back_end: str) -> None:
    xp = module_of(back_end)
    x = xp.asarray(np.random.default_rng(4).standard_normal((1, 33, 2, 8)))
    copies = [x.copy() for _ in range(3)]
    o, pullback = cuflash.attention_vjp(x, x, x, causal=True)
    wanted, pullback_2 = cuflash.attention_vjp(*copies, causal=True)
    np.testing.assert_allclose(to_numpy(o), to_numpy(wanted), rtol=1e-13, atol=1e-14)
    gradients = pullback(x)
    for a, b in zip(gradients, pullback_2(x)):
        np.testing.assert_allclose(to_numpy(a), to_numpy(b), rtol=1e-12, atol=1e-13)
    assert len({to_pointer(array) for array in (x, o, *gradients)}) == 5


@pytest.mark.parametrize("back_end", BACK_ENDS)
def test_vjp_and_gradients(back_end: str) -> None:
    xp = module_of(back_end)
    rng = np.random.default_rng(5)
    q, k, v, do = (xp.asarray(rng.standard_normal((1, 20, 2, 8))) for _ in range(4))
    (o, lse), pullback = cuflash.attention_vjp(q, k, v, window=4, return_lse=True)
    gradients = pullback(do, dlse=lse)
    wanted = cuflash.attention_backward(do, q, k, v, o, lse, dlse=lse, window=4)
    assert len(gradients) == 3 and gradients.dq is next(iter(gradients))
    for a, b in zip(gradients, wanted):
        np.testing.assert_array_equal(to_numpy(a), to_numpy(b))
    half = pullback(do.astype(np.float32))  # another float dtype is cast once
    np.testing.assert_allclose(to_numpy(half.dv), to_numpy(pullback(do).dv), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("back_end", BACK_ENDS)
@pytest.mark.parametrize("mask", list(MASKS))
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_repeats_are_bit_equal(dtype: str, mask: str, back_end: str) -> None:
    case = Case(mask=mask, dtype=dtype)
    inputs = case.inputs()
    first = run(case, inputs, back_end, deterministic=True)
    for is_deterministic in (True, True, False, False):
        for name, array in run(case, inputs, back_end, deterministic=is_deterministic).items():
            if is_deterministic or name in ("o", "lse", "dk", "dv"):
                np.testing.assert_array_equal(array, first[name], err_msg=name)


@pytest.mark.parametrize("back_end", BACK_ENDS)
def test_windows_that_are_causal(back_end: str) -> None:
    xp = module_of(back_end)
    q, k, v = (xp.asarray(x) for x in np.random.default_rng(6).standard_normal((3, 1, 64, 2, 8)))
    wanted = to_numpy(cuflash.attention(q, k, v, causal=True))
    for window in ((None, 0), (64, 0), (63, 0)):
        np.testing.assert_array_equal(to_numpy(cuflash.attention(q, k, v, window=window)), wanted)


@pytest.mark.parametrize("back_end", BACK_ENDS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_scores_go_by_positions(dtype: str, back_end: str) -> None:
    """Shuffled tokens with their positions: what the same tokens give in order."""
    xp = module_of(back_end)
    case = Case(dtype=dtype, mask="window", score="table", seqlen_q=100, seqlen_k=100)
    inputs, row = case.inputs(), np.random.default_rng(7).permutation(100)
    wanted = run(case, inputs, back_end)
    shuffled = {n: x[..., row] if n == "dlse" else x[:, row] for n, x in inputs.items()}
    found = run(case, shuffled, back_end, positions=xp.asarray(row))
    for name, want in wanted.items():
        if name == "lse":
            want = want[..., row]
        elif not name.startswith("param"):
            want = want[:, row]
        limit = 2e-5 if dtype == "float32" or name == "lse" else 2e-2
        want = want.astype(float)
        close(name, found[name].astype(float), want, limit * np.abs(want).max())
