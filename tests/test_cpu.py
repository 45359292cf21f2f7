"""The CPU back end where it differs from others: its tiles, strides, types, sizes, bits.

The table of cases runs on it in `test_attention.py`.
"""

import threading
from collections.abc import Mapping
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from cases import DTYPES, Case, numpy_dtype
from tolerance import Judge, close

import cuflash
from cuflash import cpu
from cuflash.cpu import tiles

pytestmark = pytest.mark.filterwarnings("error")  # no NumPy warning leaves cuflash

BLOCK_Q, BLOCK_K = 256, 256  # of one query head a key head; held by `test_blocks`
EDGES = (1, BLOCK_K - 1, BLOCK_K, BLOCK_K + 1, 2 * BLOCK_K + 1)


def compute(arrays: Mapping[str, np.ndarray], **options) -> dict[str, np.ndarray]:
    """o, lse and, where there is a do, the gradients of the caller's arrays."""
    q, k, v = (arrays[name] for name in "qkv")
    o, lse = cuflash.attention(q, k, v, **options, return_lse=True)
    if "do" not in arrays:
        return {"o": o, "lse": lse}
    dlse = arrays.get("dlse")
    grads = cuflash.attention_backward(arrays["do"], q, k, v, o, lse, dlse=dlse, **options)
    return {"o": o, "lse": lse, "dq": grads.dq, "dk": grads.dk, "dv": grads.dv}


def check(case: Case) -> dict[str, np.ndarray]:
    """Run a case in its layout and judge all results; return them in the order (b, s, h, d)."""
    inputs, dtype = case.inputs(), numpy_dtype(case.dtype)
    arrays = {n: case.to_caller(inputs[n].astype(dtype)) for n in ("q", "k", "v", "do")}
    lse_shape = case.pairs[:3][4 - case.ndim :]
    arrays["dlse"] = inputs["dlse"].reshape(lse_shape)
    results = compute(arrays, **case.options())
    for name, array in results.items():
        if name == "lse":
            assert array.shape == lse_shape
            assert array.dtype == (np.float64 if case.dtype == "float64" else np.float32)
            results[name] = array.reshape(inputs["dlse"].shape)
        else:
            assert array.dtype == dtype
            results[name] = case.from_caller(array)
    Judge.of(case, inputs).check(**results)
    return results


def test_blocks() -> None:
    """The edges tested below are those of the tiles, and a group's heads share a tile."""
    assert cpu.blocks(SimpleNamespace(group=1)) == (BLOCK_Q, BLOCK_K)
    for group in (3, 8, 64):
        block_q, _ = cpu.blocks(SimpleNamespace(group=group))
        assert block_q * group <= max(BLOCK_Q, 32 * group) and block_q >= 32


@pytest.mark.parametrize("mask", ["none", "causal", "window", "top-left", "outside"])
@pytest.mark.parametrize("seqlen_k", EDGES)
@pytest.mark.parametrize("seqlen_q", EDGES)
def test_edges_of_tiles(seqlen_q: int, seqlen_k: int, mask: str) -> None:
    sizes = {"seqlen_q": seqlen_q, "seqlen_k": seqlen_k, "mask": mask}
    check(Case(batch=1, heads_q=1, heads_k=1, head_dim=8, head_dim_v=8, **sizes))


@pytest.mark.parametrize("mask", ["causal", "by-head", "documents", "array-empty-rows"])
@pytest.mark.parametrize(("heads_q", "heads_k"), [(3, 1), (8, 1), (6, 2)])
def test_groups_over_many_tiles(heads_q: int, heads_k: int, mask: str) -> None:
    heads = {"heads_q": heads_q, "heads_k": heads_k}
    check(Case(batch=2, seqlen_q=101, seqlen_k=600, head_dim=8, head_dim_v=16, mask=mask, **heads))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim_v", [1, 8, 40, 72, 80, 96, 128, 192, 256])
def test_head_dims_of_v(head_dim_v: int, dtype: str) -> None:
    sizes = {"seqlen_q": 20, "seqlen_k": 33, "head_dim": 24, "head_dim_v": head_dim_v}
    check(Case(batch=1, mask="causal", dtype=dtype, **sizes))


def strided(array: np.ndarray, how: str) -> np.ndarray:
    """The same values at other strides."""
    if how == "head first":
        return np.ascontiguousarray(array.transpose(2, 0, 1, 3)).transpose(1, 2, 0, 3)
    if how == "column first":
        return np.ascontiguousarray(array.transpose(3, 2, 1, 0)).transpose(3, 2, 1, 0)
    if how == "negative":
        return np.ascontiguousarray(array[:, ::-1, :, ::-1])[:, ::-1, :, ::-1]
    if how == "slice of a wider array":
        wide = np.full((*array.shape[:3], 3 * array.shape[3]), np.nan, array.dtype)
        wide[..., 1::3] = array
        return wide[..., 1::3]
    if how == "misaligned":
        memory = bytearray(array.nbytes + 1)
        shifted = np.frombuffer(memory, np.uint8, array.nbytes, 1).view(array.dtype)
        shifted = shifted.reshape(array.shape)
        shifted[...] = array
        return shifted
    array = array.copy()
    array.flags.writeable = False
    return array


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "how",
    ["head first", "column first", "negative", "slice of a wider array", "misaligned", "read-only"],
)
def test_strides(how: str, dtype: str) -> None:
    """Any strides give the bits that contiguous arrays give."""
    case = Case(dtype=dtype, mask="causal", seqlen_q=70, seqlen_k=300)
    inputs = {n: x.astype(numpy_dtype(dtype)) for n, x in case.inputs().items() if n != "dlse"}
    plain = compute(inputs, causal=True)
    for name in inputs:
        other = compute({**inputs, name: strided(inputs[name], how)}, causal=True)
        for result in plain:
            close(result, other[result], plain[result].astype(np.longdouble), 0.0)


def test_stride_zero_and_one_buffer() -> None:
    """do of a scalar's expansion; k = v expanded over heads; q, k and v one array."""
    case = Case(seqlen_q=90, seqlen_k=90, heads_q=4, heads_k=4)
    x = case.inputs()["q"].astype(np.float32)
    one_head = np.broadcast_to(x[:, :, :1], x.shape)
    do = np.broadcast_to(np.float32(1), x.shape)
    for q, k, v in ((x, one_head, one_head), (x, x, x)):
        results = compute({"q": q, "k": k, "v": v, "do": do})
        Judge({"q": q, "k": k, "v": v, "do": do}, scale=0.25, dtype="float32").check(**results)
        assert not np.shares_memory(results["dq"], results["dk"])


def test_views_of_one_packed_array(rng: np.random.Generator) -> None:
    for heads, head_dim in ((2, 64), (1, 128), (1, 256)):
        packed = (rng.standard_normal((2, 77, 3 * heads * head_dim)) + 0.5).astype(np.float32)
        parts = packed.reshape(2, 77, 3, heads, head_dim)
        arrays = {name: parts[:, :, i] for i, name in enumerate("qkv")}
        arrays["do"] = arrays["q"]
        results = compute(arrays)
        for name, want in compute({n: x.copy() for n, x in arrays.items()}).items():
            close(name, results[name], want.astype(np.float64), 1e-5)


@pytest.mark.parametrize("do_dtype", DTYPES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_do_of_another_dtype(dtype: str, do_dtype: str) -> None:
    case = Case(dtype=dtype, seqlen_q=9, seqlen_k=12)
    inputs = case.inputs()
    do = inputs["do"].astype(numpy_dtype(do_dtype))
    arrays = {name: inputs[name].astype(numpy_dtype(dtype)) for name in "qkv"}
    dlse = inputs["dlse"].astype(numpy_dtype(do_dtype))
    results = compute({**arrays, "do": do, "dlse": dlse})
    exact = {**inputs, "do": do.astype(np.float64), "dlse": dlse.astype(np.float64)}
    Judge.of(case, exact).check(**results)


ZEROS = ("batch", "heads", "seqlen_q", "seqlen_k")


@pytest.mark.parametrize("mask", ["none", "causal", "array"])
@pytest.mark.parametrize("zero", ZEROS)
def test_zero_sizes(zero: str, mask: str) -> None:
    case = Case(mask=mask, seqlen_q=5, seqlen_k=7)
    names = ("heads_q", "heads_k") if zero == "heads" else (zero,)
    results = check(replace(case, **dict.fromkeys(names, 0)))
    if zero == "seqlen_k":
        assert (results["o"] == 0).all() and (results["lse"] == -np.inf).all()
        assert (results["dq"] == 0).all()
    if zero == "seqlen_q":
        assert (results["dk"] == 0).all() and (results["dv"] == 0).all()
        assert results["dk"].size > 0


@pytest.mark.parametrize("mask", ["none", "by-head", "array-empty-rows"])
def test_bits_repeat(mask: str) -> None:
    """o, lse and all gradients have the same bits in every run, also in four threads at once."""
    case = Case(seqlen_q=300, seqlen_k=520, mask=mask)
    arrays = {name: x.astype(np.float32) for name, x in case.inputs().items()}
    options = case.options()
    first = compute(arrays, **options)
    found: list[dict[str, np.ndarray]] = []
    threads = [
        threading.Thread(target=lambda: found.append(compute(arrays, **options))) for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 4
    for results in found:
        for name, want in first.items():
            np.testing.assert_array_equal(results[name], want)


def test_a_wrong_kernel_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the tests are worth: one wrong line in the back end is seen."""
    case = Case(seqlen_q=300, seqlen_k=520, head_dim=8, head_dim_v=8, batch=1, mask="causal")
    check(case)
    visits = tiles.Call.visits
    wrong = {
        "ceiling": lambda self, allowed: np.full(allowed.shape, np.inf, np.float32),
        "visits": lambda self, *place, **side: visits(self, *place, **side)[:-1],
    }
    for name, function in wrong.items():
        with monkeypatch.context() as patch:
            patch.setattr(tiles.Call, name, function)
            with pytest.raises(AssertionError, match="wrong"):
                check(case)


def test_nan_never_passes() -> None:
    """FAULTS 6: a harness in which NaN equals NaN hides faults."""
    one, nan = np.ones(3), np.array([1, np.nan, 1])
    close("x", one, one, 0.0)
    for got, want in ((nan, one), (one, nan), (nan, nan)):
        with pytest.raises(AssertionError, match="x: "):
            close("x", got, want, np.inf)
    for got, want in ((np.array([np.inf]), np.ones(1)), (-np.ones(1) * np.inf, np.full(1, np.inf))):
        with pytest.raises(AssertionError):
            close("x", got, want, 1e30)
    close("x", np.array([-np.inf]), np.array([-np.inf]), 0.0)
