"""The table of cases where several families of kernels may be taken, and pairs of features"""

from __future__ import annotations

from collections.abc import Iterator

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


@pytest.mark.parametrize("back_end", ["cupy"])
@pytest.mark.parametrize("dtype", SHORT)
@pytest.mark.parametrize("mask", ["none", "causal", "window", "documents", "by-head"])
@pytest.mark.parametrize("dims", [(64, 64), (128, 128), (96, 96), (192, 128), (256, 256)], ids=str)
def test_many_owned_tiles(dims: tuple[int, int], mask: str, dtype: str, back_end: str) -> None:
    """More tiles than blocks stay on the GPU, several key tiles each, so that turns are taken."""
    sizes = {"batch": 3, "heads_q": 16, "heads_k": 4, "seqlen_q": 700, "seqlen_k": 777}
    case = Case(dtype=dtype, mask=mask, head_dim=dims[0], head_dim_v=dims[1], **sizes)
    inputs = case.inputs()
    q, k, v = (module_of(back_end).asarray(inputs[n].astype(numpy_dtype(dtype))) for n in "qkv")
    options = case.options(module_of(back_end).asarray)
    o, lse = cuflash.attention(q, k, v, return_lse=True, **options)
    with cuflash.using(family="simt"):
        want, lse_want = cuflash.attention(q, k, v, return_lse=True, **options)
    close("lse", to_numpy(lse), to_numpy(lse_want), 1e-4)
    spread = 3e-2 if dtype == "bfloat16" else 4e-3
    close("o", to_numpy(o).astype(float), to_numpy(want).astype(float), spread)
    for _ in range(100):
        again, lse_again = cuflash.attention(q, k, v, return_lse=True, **options)
        assert (again == o).all() and (lse_again == lse).all()


@pytest.mark.parametrize("back_end", ["cupy"])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_tiles_in_segments(head_dim: int, back_end: str) -> None:
    """Global tokens see all of 40,000 keys: blocks share their tiles, as other families do."""
    cp, length = module_of(back_end), 40_000
    rng = np.random.default_rng(head_dim)
    shape = (1, length, 2, head_dim)
    q, k, v = (cp.asarray(rng.standard_normal(shape, np.float32)).astype("float16") for _ in "qkv")
    flags = cp.zeros(length, bool)
    flags[7::9000] = True
    mask = cuflash.SlidingWindow(100, 20) | cuflash.GlobalTokens(flags)
    sink = cp.asarray([1.0, -2.0], "float32")
    o, lse = cuflash.attention(q, k, v, mask=mask, sink=sink, return_lse=True)
    with cuflash.using(family="simt"):
        want, lse_want = cuflash.attention(q, k, v, mask=mask, sink=sink, return_lse=True)
    close("lse", to_numpy(lse), to_numpy(lse_want), 1e-4)
    close("o", to_numpy(o).astype(float), to_numpy(want).astype(float), 4e-3)
    again = cuflash.attention(q, k, v, mask=mask, sink=sink)
    assert (again == o).all()
