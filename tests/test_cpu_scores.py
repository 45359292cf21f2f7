"""Scores, biases and sinks on the CPU back end: where its tiles treat them in their own way."""

import numpy as np
import pytest
from cases import numpy_dtype, round_to
from tolerance import Judge, close

import cuflash

pytestmark = pytest.mark.filterwarnings("error")

SIZES = {"batch": 2, "heads": 4, "heads_k": 2, "seqlen_q": 70, "seqlen_k": 600}


def draw(rng: np.random.Generator, dtype: str = "float32") -> dict[str, np.ndarray]:
    rows, columns = (SIZES["batch"], SIZES["seqlen_q"]), (SIZES["batch"], SIZES["seqlen_k"])
    shapes = {"q": (*rows, 4, 8), "k": (*columns, 2, 8), "v": (*columns, 2, 8), "do": (*rows, 4, 8)}
    arrays = {n: round_to(rng.standard_normal(s) + 0.5, dtype) for n, s in shapes.items()}
    dlse = rng.standard_normal((SIZES["batch"], 4, SIZES["seqlen_q"]))
    return {**arrays, "dlse": round_to(dlse, "float32")}


def run(inputs: dict[str, np.ndarray], dtype: str, **options) -> tuple[dict, cuflash.Gradients]:
    arrays = {n: x if n == "dlse" else x.astype(numpy_dtype(dtype)) for n, x in inputs.items()}
    q, k, v = (arrays[name] for name in "qkv")
    o, lse = cuflash.attention(q, k, v, return_lse=True, **options)
    do, dlse = arrays["do"], arrays["dlse"]
    grads = cuflash.attention_backward(do, q, k, v, o, lse, dlse=dlse, **options)
    return {"o": o, "lse": lse, "dq": grads.dq, "dk": grads.dk, "dv": grads.dv}, grads


def reduced(ds: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """ds (batch, heads, rows, columns) summed to the shape of a bias that broadcasts to it."""
    aligned = (1,) * (4 - len(shape)) + shape
    axes = tuple(axis for axis, size in enumerate(aligned) if size == 1)
    return ds.sum(axis=axes, keepdims=True).reshape(shape)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_softcap_bias_and_sink(dtype: str, causal: bool, rng: np.random.Generator) -> None:
    """FAULTS 10, 19, 22: in this order, the mask last; a bias of another dtype has a gradient."""
    inputs = draw(rng, dtype)
    inputs["q"] = round_to(inputs["q"] * 8, dtype)
    bias = round_to(rng.standard_normal((1, 4, 70, 600)), "float32")
    bias[0, :, :, 5] = -np.inf  # pairs that count as masked: what v holds there reaches nothing
    sink = round_to(rng.standard_normal(4) + 3, "float32")
    params = {"bias": cuflash.Param(bias.astype(np.float32)), "softcap": 5.0}
    params["sink"] = cuflash.Param(sink.astype(np.float32))
    dirty = {name: x.copy() for name, x in inputs.items()}
    dirty["v"][:, 5] = np.nan
    results, grads = run(dirty, dtype, causal=causal, **params)

    def score(x: np.ndarray, b: int, h: int) -> tuple[np.ndarray, np.ndarray]:
        capped = 5 * np.tanh(x / 5)
        return capped + bias[0, h].astype(x.dtype), 1 - (capped / 5) ** 2

    allowed = np.tri(70, 600, 530 if causal else 600, dtype=bool)
    judge = Judge(inputs, scale=8**-0.5, dtype=dtype, allowed=allowed, score=score, sink=sink)
    judge.check(**results)
    # Params are float32, whatever q is: their gradients are rounded to that last.
    want = judge.oracle["dsink"]
    close("dsink", grads.dsink, want, judge.limit("dsink") + 1e-6 * np.abs(want).max())
    want = reduced(judge.oracle["ds"], bias.shape)
    close("dbias", grads.dbias, want, 2 * judge.limit("ds") + 1e-6 * np.abs(want).max())
    assert (grads.dbias[0, :, :, 5] == 0).all()


@pytest.mark.parametrize("shape", [(600,), (70, 1), (4, 1, 1), (2, 1, 70, 600), (1, 1, 1, 1)])
def test_biases_broadcast(shape: tuple[int, ...], rng: np.random.Generator) -> None:
    inputs = draw(rng)
    bias = round_to(rng.standard_normal(shape), "float32")
    full = np.broadcast_to(bias, (2, 4, 70, 600))
    results, grads = run(inputs, "float32", bias=cuflash.Param(bias.astype(np.float32)))
    judge = Judge(
        inputs, scale=8**-0.5, dtype="float32",
        score=lambda x, b, h: (x + full[b, h].astype(x.dtype), np.ones_like(x)),
    )  # fmt: skip
    judge.check(**results)
    want = reduced(judge.oracle["ds"], shape)
    terms = full.size // bias.size
    close("dbias", grads.dbias, want, np.sqrt(terms) * judge.limit("ds"))


def test_2_a_whole_row_of_the_lowest_number(rng: np.random.Generator) -> None:
    inputs = draw(rng)
    bias = np.zeros((70, 600), np.float32)
    bias[3] = np.finfo(np.float32).min
    results, _ = run(inputs, "float32", bias=bias)
    mean = inputs["v"].mean(axis=1).repeat(2, axis=1)
    close("o", results["o"][:, 3], mean, 1e-5)


def test_19_sinks_alone(rng: np.random.Generator) -> None:
    """A row that sees no key has o = 0, lse = sink, no gradient; dsink gets its dlse."""
    inputs = draw(rng)
    allowed = np.ones((70, 600), bool)
    allowed[:, :] = rng.random((70, 600)) < 0.3
    allowed[[0, 33]] = False
    sink = np.array([0.5, -np.inf, 30, -400.0])
    dirty = {name: x.copy() for name, x in inputs.items()}
    dirty["q"][:, [0, 33]] = dirty["do"][:, [0, 33]] = np.nan
    param = cuflash.Param(sink.astype(np.float32))
    results, grads = run(dirty, "float32", mask=allowed, sink=param)
    judge = Judge(inputs, scale=8**-0.5, dtype="float32", allowed=allowed, sink=sink)
    judge.check(**results)
    assert (results["o"][:, 33] == 0).all() and (results["dq"][:, 33] == 0).all()
    np.testing.assert_array_equal(results["lse"][:, :, 33], np.broadcast_to(sink, (2, 4)))
    with np.errstate(invalid="ignore"):
        want = np.where(np.isneginf(sink), 0, judge.oracle["dsink"])
    close("dsink", grads.dsink, want, 1e-4)


@pytest.mark.parametrize("where", ["tile", "whole pass"])
def test_params_are_added_once(where: str, rng: np.random.Generator) -> None:
    """A tile that is computed again, or a pass that is, adds to the gradient of a Param once."""
    inputs = draw(rng)
    if where == "tile":  # a dead key of garbage: its tile takes the careful path
        allowed = np.ones((70, 600), bool)
        allowed[:, 300] = False
        options = {"mask": allowed}
        dirty = {**inputs, "k": inputs["k"].copy()}
        dirty["k"][:, 300] = np.inf
    else:  # do so large that dv leaves float32: every sum is taken again in float64
        options, dirty = {}, {**inputs, "do": round_to(inputs["do"] * 1e37, "float32")}
        dirty["v"] = round_to(inputs["v"] * 1e-10, "float32")
        dirty["dlse"] = inputs["dlse"] * 0
        dirty["do"][:] = np.abs(dirty["do"])
        dirty["k"] = inputs["k"].copy()
        dirty["k"][:, 7] = 50  # one key gets nearly all weight, so its dv is the sum of do
    bias = np.zeros((70, 600), np.float32)
    _, grads = run(dirty, "float32", bias=cuflash.Param(bias), **options)
    judged = inputs if where == "tile" else dirty
    oracle = Judge(judged, scale=8**-0.5, dtype="float32", allowed=options.get("mask")).oracle
    want = oracle["ds"].sum(axis=(0, 1))
    close("dbias", grads.dbias, want, 1e-4 * np.abs(want).max())
    if where == "whole pass":
        assert np.isinf(grads.dv).any(), "the case is to leave float32"


@pytest.mark.parametrize("layout", ["C", "F", "reversed", "half"])
def test_tables_of_any_strides(layout: str, rng: np.random.Generator) -> None:
    """A table with an axis of heads and two more, gathered and added to through positions."""
    inputs = draw(rng)
    values = rng.standard_normal((4, 9, 11)).astype(np.float32)
    twice = np.repeat(values, 2, axis=2)
    layouts = {
        "C": values,
        "F": np.asfortranarray(values),
        "reversed": np.ascontiguousarray(values[:, ::-1])[:, ::-1],
        "half": twice[:, :, ::2],
    }
    param = cuflash.Param(layouts[layout])
    score = cuflash.Score(lambda x, b, h, q, k: x + param[h, q % 9, k % 11])
    order = rng.permutation(600)
    positions = order[:70].astype(np.int32), order.astype(np.int32)
    bias = values[:, (positions[0] % 9)[:, None], positions[1] % 11][None]
    results, grads = run(inputs, "float32", score=score, positions=positions)
    expected, by_bias = run(inputs, "float32", bias=cuflash.Param(bias))
    for name, value in results.items():
        np.testing.assert_allclose(value, expected[name], rtol=1e-5, atol=1e-5)
    dtable = np.zeros((4, 9, 11))
    np.add.at(
        dtable,
        (slice(None), (positions[0] % 9)[:, None], positions[1] % 11),
        np.asarray(by_bias.dbias, np.float64)[0],
    )
    np.testing.assert_allclose(grads.dparams[param], dtable, rtol=1e-4, atol=1e-4)
