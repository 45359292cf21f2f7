"""The examples run, small, and find what they claim: margins of bench/results/examples-small.md.

Each is run once, with one seed. A margin is below the smallest of three seeds.
"""

import sys
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("matplotlib")
pytest.importorskip("threadpoolctl")
pytest.importorskip("tqdm")

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
if str(EXAMPLES) not in sys.path:  # examples import one another as scripts do
    sys.path.insert(0, str(EXAMPLES))


def test_what_is_saved(tmp_path, monkeypatch):
    """Memory of both ways is as cuflash.memory predicts; a sparse mask pays by its tiles."""
    import what_is_saved

    monkeypatch.setattr(what_is_saved, "GENOME", 20_000)
    monkeypatch.setattr(what_is_saved, "REACH", 410)
    found = what_is_saved.run(np, tmp_path, 8192, 4096)
    rows = {row["tokens"]: row for row in found["rows"]}
    assert list(rows) == [1024 * 2**i for i in range(8)]
    for n in (1024, 2048, 4096):
        assert rows[n]["standard"].bytes == pytest.approx(3 * 4 * n * n, rel=0.05)
    assert rows[8192]["tiled"].measured and not rows[8192]["standard"].measured
    added = [rows[n]["tiled"].bytes for n in (2048, 4096, 8192)]
    assert (added[2] - added[1]) / (added[1] - added[0]) == pytest.approx(2, rel=0.1)
    assert rows[2048]["tiled"].extra < 0.1 * rows[2048]["standard"].extra
    assert rows[131072]["standard"].bytes > 1000 * rows[131072]["tiled"].bytes
    assert found["work"] == pytest.approx(1 / 6)
    genome = found["genome"]
    assert genome["native"] < 2 < genome["first"] < genome["pairs"]
    assert genome["measured"] > 2  # 20.8 by tiles and 12 in time at full length
    assert len(found["claims"]) == 7
    assert (tmp_path / "what-is-saved.md").read_text().count("\n| ") >= 16
    for name in ("what-is-saved.png", "tiling.png"):
        assert (tmp_path / name).read_bytes()[:4] == b"\x89PNG"


def test_standard_attention_of_the_example_is_the_definition(rng):
    """What cuflash is compared with computes the same o, dq, dk, dv."""
    import what_is_saved

    arrays = [rng.standard_normal((1, 2, 300, 64)).astype(np.float32) for _ in range(4)]
    usual, ours = what_is_saved.standard(*arrays), what_is_saved.tiled(*arrays)
    for mine, other in zip(ours, usual, strict=True):
        np.testing.assert_allclose(mine, other, atol=2e-5, rtol=1e-4)
    np.testing.assert_array_equal(what_is_saved.standard(*arrays[:3])[0], usual[0])
