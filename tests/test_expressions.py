"""Random expressions: derivatives against central differences, and the CUDA text against NumPy."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_masks import build, integers

import cuflash
from cuflash.expr.expression import Expression
from cuflash.expr.nodes import apply
from cuflash.expr.scoring import TileScore
from cuflash.problem import Problem

UNARY = ("tanh", "sin", "cos", "softplus", "root", "absolute", "negative")
BINARY = ("add", "subtract", "multiply", "ratio", "minimum", "maximum", "choose")


@st.composite
def reals(draw: st.DrawFn, depth: int = 4) -> tuple:
    """A random real expression of x, q, k, h and two parameters, finite everywhere."""
    if depth == 0 or draw(st.integers(0, 5)) == 0:
        return (draw(st.sampled_from(["x", "table", "slope", "distance", "number"])),
                draw(st.floats(-2, 2)))  # fmt: skip
    op = draw(st.sampled_from((*UNARY, *BINARY)))
    count = 1 if op in UNARY else 2
    return (op, *(draw(reals(depth=depth - 1)) for _ in range(count)))


def make(tree: tuple, x: Any, h: Any, q: Any, k: Any, params: dict[str, Any]) -> Any:
    """The tree as an expression of symbols."""
    op, *rest = tree
    if op == "x":
        return x
    if op == "table":
        return params["table"][h, cuflash.minimum(abs(q - k), 6)]
    if op == "slope":
        return params["slope"][h]
    if op == "distance":
        return abs(q - k) / 50
    if op == "number":
        return x * 0 + rest[0]
    args = [make(part, x, h, q, k, params) for part in rest]
    a = args[0]
    if op == "softplus":
        return cuflash.log(1 + cuflash.exp(cuflash.minimum(a, 20.0)))
    if op == "root":
        return cuflash.sqrt(1 + a * a)
    if op in ("tanh", "sin", "cos", "absolute", "negative"):
        return apply(op, a)
    b = args[1]
    if op == "ratio":
        return a / (1 + b * b)
    if op == "choose":
        return cuflash.where(q % 3 < k % 2 + 1, a, b)
    return apply(op, a, b)


def score_of(tree: tuple, params: dict[str, Any]) -> cuflash.Score:
    """Bounded, so that no softmax is decided by one pair."""
    return cuflash.Score(
        lambda x, b, h, q, k: 3 * cuflash.tanh(make(tree, x, h, q, k, params) / 3) + x / 10
    )


def params_of(rng: np.random.Generator, convert: Any = np.asarray) -> dict[str, cuflash.Param]:
    table, slope = rng.standard_normal((2, 7)), rng.standard_normal(2)
    return {"table": cuflash.Param(convert(table)), "slope": cuflash.Param(convert(slope))}


@settings(max_examples=80, deadline=None, derandomize=True)
@given(reals())
def test_derivatives(tree: tuple) -> None:
    """Of random scores by x and by every element of their parameters."""
    rng = np.random.default_rng(7)
    params = params_of(rng)
    expression = Expression(score_of(tree, params).node)
    problem = Problem(1, 2, 2, 9, 11, 4, 4, "float64", 1.0, score=expression, q_offset=2)
    arrays = [captured.array for captured in expression.arrays]
    place = slice(0, 2), slice(0, 9), slice(0, 11)
    x, ds = rng.standard_normal((2, 2, 9, 11))
    tiles = TileScore(expression, arrays, problem)

    def total(at: np.ndarray) -> float:
        return float((TileScore(expression, arrays, problem).apply(0, *place, at) * ds).sum())

    dx = tiles.backward(0, *place, x, ds)
    kinks = 0  # of minimum, absolute and the like: a difference across one is no derivative
    step = 1e-6
    up = tiles.apply(0, *place, x + step)
    down = tiles.apply(0, *place, x - step)
    error = np.abs((up - down) / (2 * step) * ds - dx)
    kinks = int((error > 1e-6 * (1 + np.abs(dx))).sum())
    assert kinks <= 2, error.max()
    for param, gradient in zip(expression.params, tiles.gradients):
        assert gradient.shape == param.shape
        for at in np.ndindex(param.shape):
            kept = param.array[at]
            param.array[at] = kept + step
            above = total(x)
            param.array[at] = kept - step
            below = total(x)
            param.array[at] = kept
            difference = (above - below) / (2 * step)
            assert abs(difference - gradient[at]) < 1e-4 * (1 + abs(difference)), (param.shape, at)


@pytest.mark.gpu
@settings(max_examples=12, deadline=None, derandomize=True, database=None)
@given(integers(), integers(), st.sampled_from(["less", "equal", "greater_equal"]))
def test_random_masks_on_a_gpu(left: tuple, right: tuple, comparison: str) -> None:
    """The CUDA text of a random mask allows what NumPy says, in tiles of every state."""
    cp = pytest.importorskip("cupy")
    array = np.random.default_rng(5).integers(-9, 9, 11)
    mask = cuflash.Mask(
        lambda b, h, q, k: apply(
            comparison, build(left, b, h, q, k, array), build(right, b, h, q, k, array)
        )
    )
    allowed = cp.asarray(mask.to_array(200, 260, heads=2))
    rng = np.random.default_rng(6)
    q, k, v = (cp.asarray(rng.standard_normal((1, n, 2, 8))) for n in (200, 260, 260))
    o, lse = cuflash.attention(q, k, v, mask=mask, return_lse=True)
    want, want_lse = cuflash.attention(q, k, v, mask=allowed, return_lse=True)
    cp.testing.assert_allclose(o, want, rtol=1e-12, atol=1e-13)
    cp.testing.assert_allclose(lse, want_lse, rtol=1e-12)
    got = cuflash.attention_backward(v[:, :200], q, k, v, o, lse, mask=mask)
    wanted = cuflash.attention_backward(v[:, :200], q, k, v, o, lse, mask=allowed)
    for a, b in zip(got, wanted):
        cp.testing.assert_allclose(a, b, rtol=1e-11, atol=1e-12)


@pytest.mark.gpu
@settings(max_examples=12, deadline=None, derandomize=True, database=None)
@given(reals())
def test_random_scores_on_a_gpu(tree: tuple) -> None:
    """The CUDA text of a random score, its slope and its parameters, against the CPU back end."""
    cp = pytest.importorskip("cupy")
    results = []
    for xp in (np, cp):
        rng = np.random.default_rng(8)
        params = params_of(rng, xp.asarray)
        score = score_of(tree, params)
        q, k, v = (xp.asarray(rng.standard_normal((1, 70, 2, 8))) for _ in range(3))
        o, pullback = cuflash.attention_vjp(q, k, v, causal=True, score=score)
        gradients = pullback(v)
        found = [o, *gradients, *(gradients.dparams.get(each) for each in params.values())]
        results.append([x if x is None or xp is np else x.get() for x in found])
    for want, got in zip(*results):
        if want is not None:
            np.testing.assert_allclose(got, want, rtol=1e-9, atol=1e-10)
