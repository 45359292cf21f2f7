"""The table of cases where several families of kernels may be taken, and pairs of features"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
from cases import MASKS, Case, numpy_dtype
from test_attention import RUNNABLE, judge, module_of, poison, run, to_numpy
from tolerance import close

import cuflash

__all__ = ["poison"]  # the fixture is for this file too

pytestmark = pytest.mark.gpu
SHORT = ("float16", "bfloat16")  # what a faster family than simt may take


@pytest.fixture
def simt() -> Iterator[None]:
    """The family that takes everything, where another would be chosen."""
    with cuflash.using(family="simt"):
        yield


@pytest.mark.parametrize("back_end", ["cupy"])
@pytest.mark.parametrize(
    "case", [c for c in RUNNABLE if c.dtype in SHORT], ids=lambda case: f"{case.id}-{case.scale}"
)
def test_short_case_by_simt(case: Case, back_end: str, simt: None) -> None:
    inputs = case.inputs()
    judge(case, inputs, run(case, inputs, back_end))


@pytest.mark.parametrize("back_end", ["cupy"])
@pytest.mark.parametrize("score", ["table", "chain-sink"])
@pytest.mark.parametrize("mask", [mask for mask in MASKS if mask != "none"])
def test_pair_of_mask_and_score(mask: str, score: str, back_end: str) -> None:
    """ "chain-sink" is a softcap, a bias, slopes, numbers by distance and a sink at once."""
    dims = {"head_dim": 64, "head_dim_v": 64, "seqlen_q": 150, "seqlen_k": 150}
    case = Case(mask=mask, score=score, dtype="bfloat16", **dims)
    inputs = case.inputs()
    found = run(case, inputs, back_end)
    if not mask.startswith("positions"):
        judge(case, inputs, found)
        return
    for name, want in run(case, inputs, "numpy").items():  # the oracle's scores know no positions
        want = want.astype(float)
        share = 1e-4 if name == "lse" else 3e-2  # of bfloat16, as of sums that pass through it
        close(name, found[name].astype(float), want, share * np.abs(want).max())


DIMS = [(64, 64), (128, 128), (96, 96), (192, 128), (256, 256)]


@pytest.mark.parametrize("back_end", ["cupy"])
@pytest.mark.parametrize("dtype", SHORT)
@pytest.mark.parametrize("mask", ["none", "causal", "window", "documents", "by-head"])
@pytest.mark.parametrize("dims", DIMS, ids=str)
def test_many_owned_tiles(dims: tuple[int, int], mask: str, dtype: str, back_end: str) -> None:
    """More tiles than blocks stay on the GPU, several passing ones each: turns are taken."""
    sizes = {"batch": 3, "heads_q": 16, "heads_k": 4, "seqlen_q": 700, "seqlen_k": 777}
    case = Case(dtype=dtype, mask=mask, head_dim=dims[0], head_dim_v=dims[1], **sizes)
    inputs, spread = case.inputs(), 3e-2 if dtype == "bfloat16" else 4e-3
    arrays = [inputs[n].astype(numpy_dtype(dtype)) for n in ("q", "k", "v", "do")]
    q, k, v, do = map(module_of(back_end).asarray, arrays)
    options = case.options(module_of(back_end).asarray)
    o, lse = cuflash.attention(q, k, v, return_lse=True, **options)
    with cuflash.using(family="simt"):
        want, lse_want = cuflash.attention(q, k, v, return_lse=True, **options)
        gradients_want = cuflash.attention_backward(do, q, k, v, want, lse_want, **options)
    close("lse", to_numpy(lse), to_numpy(lse_want), 1e-4)
    close("o", to_numpy(o).astype(float), to_numpy(want).astype(float), spread)
    for is_deterministic in (False, True):
        with_bits = {**options, "deterministic": is_deterministic}
        first = cuflash.attention_backward(do, q, k, v, o, lse, **with_bits)
        for name, a, b in zip(("dq", "dk", "dv"), first, gradients_want):
            a, b = to_numpy(a).astype(float), to_numpy(b).astype(float)
            close(name, a, b, spread * max(1.0, np.abs(b).max()))
        repeat_with_the_same_bits(10, (do, q, k, v), with_bits)


def repeat_with_the_same_bits(times: int, arrays: Sequence[Any], options: dict[str, Any]) -> None:
    """Both passes again and again, against the first; dq where it is to repeat."""
    do, q, k, v = arrays
    first: list[Any] = []
    same: Any = True
    for _ in range(times):
        o, lse = cuflash.attention(q, k, v, return_lse=True, **options)
        dq, dk, dv = cuflash.attention_backward(do, q, k, v, o, lse, **options)
        found = [o, lse, dk, dv, *([dq] if options["deterministic"] else [])]
        first = first or found
        for a, b in zip(found, first, strict=True):
            same = same & (a == b).all()  # on the GPU: nobody waits
    assert bool(same)


@pytest.mark.parametrize("back_end", ["cupy"])
@pytest.mark.parametrize("is_deterministic", [False, True])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_a_thousand_repeats(head_dim: int, is_deterministic: bool, back_end: str) -> None:
    cp = module_of(back_end)
    rng = np.random.default_rng(head_dim)
    shape = (2, 1000, 16, head_dim)
    arrays = [cp.asarray(rng.standard_normal(shape, np.float32)).astype("float16") for _ in "dqkv"]
    repeat_with_the_same_bits(1000, arrays, {"causal": True, "deterministic": is_deterministic})


@pytest.mark.parametrize("back_end", ["cupy"])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_tiles_in_segments(head_dim: int, back_end: str) -> None:
    """Global tokens see, and are seen by, all of 40,000: blocks share their tiles."""
    cp, length = module_of(back_end), 40_000
    rng = np.random.default_rng(head_dim)
    shape = (1, length, 2, head_dim)
    q, k, v, do = (
        cp.asarray(rng.standard_normal(shape, np.float32)).astype("float16") for _ in range(4)
    )
    flags = cp.zeros(length, bool)
    flags[7::9000] = True
    options = {
        "mask": cuflash.SlidingWindow(100, 20) | cuflash.GlobalTokens(flags),
        "sink": cp.asarray([1.0, -2.0], "float32"),
    }
    o, lse = cuflash.attention(q, k, v, return_lse=True, **options)
    with cuflash.using(family="simt"):
        want, lse_want = cuflash.attention(q, k, v, return_lse=True, **options)
        gradients_want = cuflash.attention_backward(do, q, k, v, want, lse_want, **options)
    close("lse", to_numpy(lse), to_numpy(lse_want), 1e-4)
    close("o", to_numpy(o).astype(float), to_numpy(want).astype(float), 4e-3)
    again = cuflash.attention(q, k, v, **options)
    assert (again == o).all()
    for is_deterministic in (False, True):
        with_bits = {**options, "deterministic": is_deterministic}
        gradients = cuflash.attention_backward(do, q, k, v, o, lse, **with_bits)
        for name, a, b in zip(("dq", "dk", "dv"), gradients, gradients_want):
            a, b = to_numpy(a).astype(float), to_numpy(b).astype(float)
            close(name, a, b, 4e-3 * np.abs(b).max())
        again = cuflash.attention_backward(do, q, k, v, o, lse, **with_bits)
        assert (again.dk == gradients.dk).all() and (again.dv == gradients.dv).all()
        assert not is_deterministic or (again.dq == gradients.dq).all()


@pytest.mark.parametrize("back_end", ["cupy"])
@pytest.mark.parametrize("score", ["bias", "table", "chain-sink"])
@pytest.mark.parametrize("dims", DIMS, ids=str)
def test_params_by_every_tile(dims: tuple[int, int], score: str, back_end: str) -> None:
    """Gradients of parameters, added with dq or, where bits are to repeat, by a pass of its own."""
    for mask, is_deterministic in (("causal", False), ("none", True)):
        case = Case(mask=mask, score=score, dtype="bfloat16", head_dim=dims[0], head_dim_v=dims[1])
        inputs = case.inputs()
        judge(case, inputs, run(case, inputs, back_end, deterministic=is_deterministic))


@pytest.mark.parametrize("back_end", ["cupy"])
@pytest.mark.parametrize("dims", DIMS, ids=str)
def test_rows_of_padding_by_an_additive_mask(dims: tuple[int, int], back_end: str) -> None:
    """The largest negative number as a bias, in all of a row: no gradient comes from it, none is
    lost, and where do is not 0 the row is what the definition says of equal scores."""
    xp = module_of(back_end)
    case = Case(dtype="bfloat16", head_dim=dims[0], head_dim_v=dims[1])
    inputs = case.inputs()
    arrays = [inputs[n].astype(numpy_dtype("bfloat16")) for n in ("q", "k", "v", "do")]
    arrays[3][:, -3:] = 0  # do of the padding
    q, k, v, do = map(xp.asarray, arrays)
    bias = xp.zeros((1, 1, case.seqlen_q, case.seqlen_k), "float32")
    bias[:, :, -3:] = float(np.finfo("float32").min)
    kept = slice(0, case.seqlen_q - 3)
    for is_deterministic in (False, True):
        options = {"bias": bias, "deterministic": is_deterministic}
        o, lse = cuflash.attention(q, k, v, return_lse=True, **options)
        found = cuflash.attention_backward(do, q, k, v, o, lse, **options)
        short = [xp.ascontiguousarray(x[:, kept]) for x in (q, do)]
        o, lse = cuflash.attention(short[0], k, v, return_lse=True)
        want = cuflash.attention_backward(short[1], short[0], k, v, o, lse)
        pairs = ((found.dq[:, kept], want.dq), (found.dk, want.dk), (found.dv, want.dv))
        for name, (a, b) in zip(("dq", "dk", "dv"), pairs):
            a, b = to_numpy(a).astype(float), to_numpy(b).astype(float)
            close(name, a, b, 3e-2 * max(1.0, np.abs(b).max()))
