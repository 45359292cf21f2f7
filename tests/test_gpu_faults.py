"""Faults of FAULTS.md that only a GPU shows: huge offsets, grids, graphs, caches, processes."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cases import Case, numpy_dtype
from tolerance import Judge

import cuflash

pytestmark = pytest.mark.gpu
ROOT = Path(__file__).parent.parent


@pytest.fixture
def cp() -> Any:
    cupy = pytest.importorskip("cupy")
    yield cupy
    cupy.get_default_memory_pool().free_all_blocks()


def rows_agree(cp: Any, got: Any, q: Any, k: Any, v: Any, rows: slice, **options: Any) -> None:
    """Some rows of a result against the same rows computed alone."""
    want = cuflash.attention(q[:, rows].copy(), k, v, **options)
    np.testing.assert_array_equal(got[:, rows].get(), want.get())


def test_more_than_two_billion_elements_of_q(cp: Any) -> None:  # FAULTS 46
    length = 2**24 + 64
    q = cp.empty((1, length, 1, 128), np.float16)
    q[...] = cp.random.standard_normal((64, 1, 128), np.float32).astype(np.float16)[0]
    q[:, -100:] = cp.random.standard_normal((100, 1, 128), np.float32).astype(np.float16)
    k, v = (cp.random.standard_normal((1, 16, 1, 128), np.float32).astype(np.float16) for _ in "kv")
    o = cuflash.attention(q, k, v)
    rows_agree(cp, o, q, k, v, slice(length - 100, length))
    rows_agree(cp, o, q, k, v, slice(0, 100))


def test_strides_beyond_two_billion(cp: Any) -> None:  # FAULTS 46
    buffer = cp.zeros(2**31 + 2**20, np.float16)
    k = cp.lib.stride_tricks.as_strided(buffer, (1, 3, 1, 64), (0, 2**31, 0, 2))
    values = cp.random.standard_normal((1, 3, 1, 64), np.float32).astype(np.float16)
    k[...] = values
    q = cp.random.standard_normal((1, 5, 1, 64), np.float32).astype(np.float16)
    o = cuflash.attention(q, k, k)
    np.testing.assert_array_equal(o.get(), cuflash.attention(q, values, values).get())


def test_bool_mask_with_offsets_beyond_four_billion(cp: Any) -> None:  # FAULTS 39, 45
    rows = 4200
    buffer = cp.zeros(rows * 2**20, np.bool_)
    mask = cp.lib.stride_tricks.as_strided(buffer, (rows, 64), (2**20, 1))
    mask[...] = cp.tri(rows, 64, 64 - rows, dtype=np.bool_)
    q = cp.random.standard_normal((1, rows, 1, 64), np.float32)
    k, v = (cp.random.standard_normal((1, 64, 1, 64), np.float32) for _ in "kv")
    masked, causal = cuflash.attention(q, k, v, mask=mask), cuflash.attention(q, k, v, causal=True)
    np.testing.assert_array_equal(masked.get(), causal.get())


def test_a_large_batch_backward(cp: Any) -> None:  # FAULTS 36, 91
    shape = (20480, 65, 8, 32)
    arrays = (cp.random.standard_normal(shape, np.float32) for _ in range(4))
    q, k, v, do = (x.astype(np.float16) for x in arrays)
    o, lse = cuflash.attention(q, k, v, causal=True, return_lse=True)
    gradients = cuflash.attention_backward(do, q, k, v, o, lse, causal=True)
    for at in (slice(0, 2), slice(-2, None)):
        some = [x[at].copy() for x in (do, q, k, v, o, lse)]
        for got, want in zip(gradients, cuflash.attention_backward(*some, causal=True)):
            np.testing.assert_array_equal(got[at].get(), want.get())


@pytest.mark.parametrize("axis", ["batch", "heads"])
def test_more_than_65535_of_each(axis: str, cp: Any) -> None:
    batch, heads = (70000, 1) if axis == "batch" else (1, 70000)
    q, k, v, do = (cp.random.standard_normal((batch, 3, heads, 4), np.float32) for _ in range(4))
    o, lse = cuflash.attention(q, k, v, return_lse=True)
    gradients = cuflash.attention_backward(do, q, k, v, o, lse)
    case = Case(batch=2, heads_q=1, heads_k=1, seqlen_q=3, seqlen_k=3, head_dim=4, head_dim_v=4)
    pick = (lambda x: x[-2:]) if axis == "batch" else (lambda x: x[:, :, -2:].transpose(2, 1, 0, 3))
    names = dict(zip(("q", "k", "v", "do"), (q, k, v, do)))
    inputs = {name: pick(x).get().astype(np.float64) for name, x in names.items()}
    results = {"o": o, **dict(zip(("dq", "dk", "dv"), gradients))}
    judge = Judge(inputs, scale=case.scale_value, dtype="float32")
    judge.check(**{name: pick(x).get() for name, x in results.items()})


def test_fifty_repeats_of_a_crowded_grid(cp: Any) -> None:  # FAULTS 33, 89
    q = cp.random.standard_normal((300, 256, 1, 128), np.float32) * 3
    k, v = (cp.random.standard_normal((300, 128, 1, 128), np.float32) * 3 for _ in "kv")
    o, lse = cuflash.attention(q, k, v, return_lse=True)
    first = [x.get() for x in (o, lse, *cuflash.attention_backward(q, q, k, v, o, lse))]
    for _ in range(50):
        again = cuflash.attention(q, k, v, return_lse=True)
        again = [*again, *cuflash.attention_backward(q, q, k, v, *again)]
    for a, b in zip(first, again):
        np.testing.assert_array_equal(a, b.get())


def test_nan_left_by_another_kernel(cp: Any) -> None:  # FAULTS 66
    """Shared memory and registers full of NaN before the kernel runs."""
    fill = cp.RawKernel(
        'extern "C" __global__ void fill(float* sink) { extern __shared__ float at[];'
        " for (int i = threadIdx.x; i < 12000; i += blockDim.x) at[i] = __int_as_float(-1);"
        " __syncthreads(); if (at[threadIdx.x] == 1.0f) *sink = at[5]; }",
        "fill",
    )
    sink = cp.zeros(1, np.float32)
    case = Case(mask="array-empty-rows", seqlen_q=100, seqlen_k=131)
    inputs = case.inputs()
    q, k, v = (cp.asarray(inputs[name].astype(np.float32)) for name in "qkv")
    options = case.options(cp.asarray)
    fill((264,), (256,), (sink,), shared_mem=48000)
    o, lse = cuflash.attention(q, k, v, return_lse=True, **options)
    Judge.of(case, inputs).check(o=o.get(), lse=lse.get())


def test_a_launch_that_fails_raises(cp: Any, monkeypatch: pytest.MonkeyPatch) -> None:  # FAULTS 48
    from cuflash.gpu import launch

    real = launch.Launch._load

    def broken(self: Any) -> Any:
        return [(function, (1,), (4096,), shared) for function, _, _, shared in real(self)]

    monkeypatch.setattr(launch.Launch, "_load", broken)
    q = cp.zeros((1, 37, 1, 24), np.float32)
    with pytest.raises(Exception, match=r"INVALID_VALUE|invalid argument"):
        cuflash.attention(q, q, q, scale=0.3712)


def test_graph_replays_see_new_values_and_new_masks(cp: Any) -> None:  # FAULTS 74, 87
    q, k, v = (cp.random.standard_normal((1, 200, 2, 32), np.float32) for _ in range(3))
    ids = cp.zeros(200, np.int32)
    mask = cuflash.Documents(ids)
    cuflash.attention(q, k, v, mask=mask)  # compiles, and CuPy's pool has the memory
    stream = cp.cuda.Stream(non_blocking=True)
    with stream:
        cuflash.attention(q, k, v, mask=mask)
        stream.begin_capture()
        o = cuflash.attention(q, k, v, mask=mask)
        graph = stream.end_capture()
    for cut in (0, 50, 120):
        ids[...] = cp.arange(200) < cut
        q[...] = cp.random.standard_normal(q.shape, np.float32)
        cp.cuda.Device().synchronize()
        graph.launch(stream)
        stream.synchronize()
        got = o.get()
        np.testing.assert_array_equal(got, cuflash.attention(q, k, v, mask=mask).get())


def test_first_use_from_many_threads(cp: Any) -> None:  # FAULTS 82
    q = cp.random.standard_normal((1, 40, 1, 21), np.float32)
    wanted = cuflash.attention(*(q.get() for _ in range(3)), window=(5, 2))

    def work(_: int) -> np.ndarray:
        with cp.cuda.Stream(non_blocking=True) as stream:
            o = cuflash.attention(q, q, q, window=(5, 2))
            stream.synchronize()
            return o.get()

    with ThreadPoolExecutor(8) as pool:
        for got in pool.map(work, range(16)):
            np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-6)


SCRIPT = """
import sys, time, warnings
import numpy as np, cuflash
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    from cuflash.arrays.cupy import load_cupy
    cp = load_cupy()
    q = cp.asarray(np.linspace(-1, 1, 40 * {dim}, dtype=np.float32).reshape(1, 40, 1, {dim}))
    start = time.perf_counter()
    o = cuflash.attention(q, q, q, causal=True)
    cp.cuda.Device().synchronize()
warned = [w for w in caught if "cuflash" in str(w.message)]
print(time.perf_counter() - start, float(o.sum()), len(warned))
"""


def process(dim: int, **environment: str) -> subprocess.Popen[str]:
    script = textwrap.dedent(SCRIPT).format(dim=dim)
    env = {**os.environ, "PYTHONPATH": str(ROOT), **environment}
    return subprocess.Popen(
        [sys.executable, "-c", script], env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        text=True,
    )  # fmt: skip


def answer(running: subprocess.Popen[str]) -> tuple[float, float, int]:
    out, error = running.communicate(timeout=200)
    assert running.returncode == 0, error
    seconds, total, warned = out.split()
    return float(seconds), float(total), int(warned)


def test_many_processes_on_an_empty_cache(cp: Any, tmp_path: Path) -> None:  # FAULTS 82, 84
    running = [process(19, CUPY_CACHE_DIR=str(tmp_path / "cache")) for _ in range(6)]
    answers = [answer(each) for each in running]
    assert len({total for _, total, _ in answers}) == 1
    assert not list((tmp_path / "cache").glob("*tmp*"))
    again, total, _ = answer(process(19, CUPY_CACHE_DIR=str(tmp_path / "cache")))
    assert total == answers[0][1]
    assert again < 0.5 * min(seconds for seconds, _, _ in answers)  # it compiled nothing


@pytest.mark.parametrize("where", ["impossible", "read-only"])
def test_a_cache_that_cannot_be_written(where: str, cp: Any, tmp_path: Path) -> None:  # FAULTS 83
    folder = Path("/proc/nowhere/cache") if where == "impossible" else tmp_path / "cache"
    if where == "read-only":
        folder.mkdir()
        folder.chmod(0o555)
        if os.access(folder, os.W_OK):
            pytest.skip("this user writes into read-only folders")
    _, total, warned = answer(process(17, CUPY_CACHE_DIR=str(folder)))
    assert np.isfinite(total) and warned == 1


def test_a_home_that_does_not_exist(cp: Any) -> None:  # FAULTS 83
    environment = {"HOME": "/proc/nowhere"}
    _, total, warned = answer(process(15, **environment))
    assert np.isfinite(total) and warned == 1


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_every_length_up_to_two_tiles(dtype: str, cp: Any) -> None:  # FAULTS 27, 29, 40
    """Scores near -120 everywhere: padding that counted as 0 would take over the softmax."""
    rng = np.random.default_rng(8)
    for length in range(1, 260, 3):
        q, k, v = (0.1 * rng.standard_normal((1, length, 1, 64)) for _ in range(3))
        q[..., 0], k[..., 0] = 1, -120 * 8
        arrays = [cp.asarray(x.astype(numpy_dtype(dtype))) for x in (q, k, v)]
        o, lse = cuflash.attention(*arrays, causal=True, return_lse=True)
        dq, dk, dv = cuflash.attention_backward(arrays[2], *arrays, o, lse, causal=True)
        for x in (o, lse, dq, dk, dv):
            assert bool(cp.isfinite(x.astype(np.float32)).all()), length
        assert float(cp.abs(lse + 120).max()) < 8
