"""The demo learns, checks itself and draws, at a size that a test can pay for."""

import numpy as np
import pytest

pytest.importorskip("matplotlib")
pytest.importorskip("threadpoolctl")
pytest.importorskip("tqdm")

from cuflash import demo, demo_sweep


def test_demo_runs_and_attention_helps(tmp_path, capsys):
    plot = tmp_path / "demo.png"
    result = demo.run(np, tokens=1024, steps=60, longest=1024, plot=str(plot))
    assert result.good
    assert result.loss_with < result.loss_without - 0.1
    assert plot.read_bytes()[:4] == b"\x89PNG"
    out = capsys.readouterr().out
    for text in ("without attention", "float64", "MiB", str(plot)):
        assert text in out


def test_text_is_real_and_long():
    name, data = demo.read_text()
    assert name and len(data) > 30000
    assert len(np.unique(data)) > 60


def test_gradients_by_hand_match_differences(rng, monkeypatch):
    """Every weight's gradient against a central difference of the loss."""
    text = rng.integers(0, 256, 40 + demo.CONTEXT + 1)
    weights = {name: w.astype(np.float64) for name, w in demo.start_weights(np, 0).items()}
    _, tape = demo.forward(np, weights, text, attend=True)
    gradients = demo.backward(np, weights, tape)
    assert set(gradients) == set(weights)
    for name, weight in weights.items():
        direction = rng.standard_normal(weight.shape)
        losses = []
        for sign in (1, -1):
            moved = dict(weights, **{name: weight + sign * 1e-5 * direction})
            losses.append(demo.forward(np, moved, text, attend=True)[0])
        measured = (losses[0] - losses[1]) / 2e-5
        predicted = float((gradients[name] * direction).sum())
        assert measured == pytest.approx(predicted, rel=1e-4, abs=1e-6), name


def test_sweep_scales_what_does_not_fit(monkeypatch):
    monkeypatch.setattr(demo_sweep, "STANDARD_MATRICES", 1e3)  # only 512 fits into the CPU's GiB
    rows = demo_sweep.sweep(np, 1024, 16)
    assert [row.seqlen for row in rows] == [512, 1024]
    assert [row.standard_measured for row in rows] == [True, False]
    assert rows[1].standard_bytes == 4 * rows[0].standard_bytes


def test_too_many_tokens_is_a_value_error():
    with pytest.raises(ValueError, match="tokens must be at most"):
        demo.run(np, tokens=10**6)
