"""The oracle itself, against scipy's softmax and logsumexp and against central differences."""

import numpy as np
import pytest
from cases import Case
from scipy.special import logsumexp, softmax

from cuflash import reference

CASE = Case(
    batch=2, heads_q=4, heads_k=2, seqlen_q=7, seqlen_k=9, head_dim=5, head_dim_v=3,
    dtype="float64", mask="array",
)  # fmt: skip


def expand(array: np.ndarray, heads: int) -> np.ndarray:
    """(batch, seqlen, heads_k, dim) as (batch, heads, seqlen, dim), key heads repeated."""
    return np.repeat(array.transpose(0, 2, 1, 3), heads // array.shape[2], axis=1)


@pytest.mark.parametrize("masked", [False, True])
def test_forward_is_scipys_softmax(masked: bool) -> None:
    inputs = CASE.inputs()
    q, k, v = (expand(inputs[name], 4) for name in "qkv")
    allowed = CASE.allowed() if masked else np.ones(CASE.pairs, bool)
    allowed = allowed.copy()
    allowed[..., 0] = True  # every row sees a key: scipy has no answer for empty rows
    s = np.where(allowed, CASE.scale_value * q @ k.swapaxes(-1, -2), -np.inf)
    o, lse = reference.forward(
        *(inputs[name] for name in "qkv"), scale=CASE.scale_value, allowed=allowed
    )
    np.testing.assert_allclose(o, (softmax(s, axis=-1) @ v).transpose(0, 2, 1, 3), rtol=1e-12)
    np.testing.assert_allclose(lse, logsumexp(s, axis=-1), rtol=1e-13)


def test_rows_without_a_key() -> None:
    inputs = CASE.inputs()
    allowed = CASE.allowed().copy()
    allowed[:, :, 3] = False
    named = {"scale": CASE.scale_value, "allowed": allowed}
    o, lse = reference.forward(*(inputs[name] for name in "qkv"), **named)
    assert (o[:, 3] == 0).all() and (lse[:, :, 3] == -np.inf).all()
    dlse = inputs["dlse"].copy()
    dlse[:, :, 3] = np.nan
    gradients = reference.backward(*(inputs[n] for n in ("do", "q", "k", "v")), **named, dlse=dlse)
    assert (gradients[0][:, 3] == 0).all()
    assert all(np.isfinite(gradient).all() for gradient in gradients[:3])


def test_masked_values_reach_nothing() -> None:
    inputs = CASE.inputs()
    allowed = np.ones(CASE.pairs, bool)
    allowed[..., 4] = False
    named = {"scale": CASE.scale_value, "allowed": allowed}
    clean = reference.backward(*(inputs[n] for n in ("do", "q", "k", "v")), **named)
    for name in ("k", "v"):
        inputs[name][:, 4] = np.nan
    dirty = reference.backward(*(inputs[n] for n in ("do", "q", "k", "v")), **named)
    for a, b in zip(clean[:3], dirty):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("name", ["q", "k", "v"])
def test_backward_is_the_derivative(name: str) -> None:
    inputs = CASE.inputs()
    named = {"scale": CASE.scale_value, "allowed": CASE.allowed()}

    def loss(values: dict[str, np.ndarray]) -> float:
        o, lse = reference.forward(*(values[n] for n in "qkv"), **named)
        seen = np.where(lse == -np.inf, 0, lse)
        return float((o * inputs["do"]).sum() + (seen * inputs["dlse"]).sum())

    gradients = reference.backward(
        *(inputs[n] for n in ("do", "q", "k", "v")), **named, dlse=inputs["dlse"]
    )
    gradient = gradients["qkv".index(name)]
    rng = np.random.default_rng(3)
    for flat in rng.choice(gradient.size, 12, replace=False):
        at = np.unravel_index(flat, gradient.shape)
        step = np.zeros_like(inputs[name])
        step[at] = 1e-5
        up = loss({**inputs, name: inputs[name] + step})
        down = loss({**inputs, name: inputs[name] - step})
        assert abs((up - down) / 2e-5 - gradient[at]) < 1e-7 * (1 + abs(gradient[at]))
