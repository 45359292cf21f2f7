"""The examples run, small, and find what they claim: margins of bench/results/examples-small.md.

Each is run once, with one seed. A margin is below the smallest of three seeds.
"""

import sys
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("matplotlib")
threadpoolctl = pytest.importorskip("threadpoolctl")
pytest.importorskip("tqdm")

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
if str(EXAMPLES) not in sys.path:  # examples import one another as scripts do
    sys.path.insert(0, str(EXAMPLES))


@pytest.fixture(autouse=True)
def one_blas_thread():
    """As the scripts have it: products this small take many times as long with a second one."""
    with threadpoolctl.threadpool_limits(limits=1):
        yield


def check_gradients(net, gradients, loss, step):
    """Central differences: along its gradient, a weight moves loss(net) by the gradient's norm."""
    assert set(gradients) == set(net.weights)
    for name, weight in net.weights.items():
        norm = np.linalg.norm(gradients[name])
        before, ends = weight.copy(), []
        for sign in (1, -1):
            weight[...] = before + sign * step * (gradients[name] / norm)
            ends.append(float(loss(net)))
        weight[...] = before
        assert (ends[0] - ends[1]) / (2 * step) == pytest.approx(norm, rel=0.03), name


def test_what_is_saved(tmp_path, monkeypatch):
    """Memory of both ways is as cuflash.memory predicts; a sparse mask pays by its tiles."""
    import what_is_saved

    monkeypatch.setattr(what_is_saved, "GENOME", 20_000)
    monkeypatch.setattr(what_is_saved, "REACH", 410)
    size = what_is_saved.SMALL | {"tiled": 8192, "standard": 4096}
    found = what_is_saved.run(np, size, tmp_path)
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


def test_brain_mri(tmp_path, capsys):
    """Windows of attention find lobes that single cubes do not, even told where they lie."""
    import brain_mri

    dice = brain_mri.run(np, brain_mri.SMALL, tmp_path, seed=0)
    assert dice["told its place"] > dice["a cube alone"] + 0.2
    assert dice["with attention"] > dice["told its place"] + 0.02  # three seeds: 0.037 to 0.075
    assert dice["with attention"] > 0.56  # 0.588 to 0.624
    assert (tmp_path / "brain-mri.png").read_bytes()[:4] == b"\x89PNG"
    assert "| mean |" in capsys.readouterr().out


def test_brain_gradients_match_differences(rng):
    """Every weight of the net, the table of the bias among them, against a central difference."""
    from brain_net import LOBES, Net

    size = {"grid": (8, 8, 12), "patch": 2, "tile": (2, 2, 3), "window": (3, 3, 3)}
    net = Net(np, size | {"layers": 2, "width": 8, "heads": 2}, 0, True, True)
    for weight in net.weights.values():
        weight += (0.3 * rng.standard_normal(weight.shape)).astype(np.float32)
    image = rng.standard_normal(size["grid"]).astype(np.float32)
    dscores = rng.standard_normal((96, 8, LOBES)).astype(np.float32)
    gradients = net.forward(image)[1](dscores)

    def loss(net):
        return (net.forward(image)[0].astype(np.float64) * dscores).sum()

    check_gradients(net, gradients, loss, 3e-3)


def test_brain_volume_as_cubes_and_back(rng):
    """Cutting into cubes in tile order and joining them again gives the volume."""
    import brain_volume

    import cuflash

    volume = rng.integers(0, 9, (8, 12, 16))
    order = cuflash.order.tiles((4, 6, 8), (2, 3, 4))
    tokens = brain_volume.cubes(volume, 2, order)
    assert tokens.shape == (192, 8)
    np.testing.assert_array_equal(tokens[0].reshape(2, 2, 2), volume[:2, :2, :2])
    np.testing.assert_array_equal(brain_volume.whole(tokens, volume.shape, 2, order), volume)


def test_brain_512_at_a_small_size(tmp_path):
    """The pass that needs a GPU at full size computes the same as standard attention."""
    import brain_512

    found = brain_512.run(np, tmp_path, n=32, block=16, sample=8)
    assert max(found[name] for name in ("o", "dq", "dk", "dv")) < 2e-3  # float16
    assert found["peak"] > 7 * 32**3 * 32 * 2


def test_long_document(tmp_path, capsys, monkeypatch):
    """Attention over whole articles finds sentences nearer to summaries that people wrote."""
    import long_document

    for other in ("reads 2,048", "reads all, sees 512"):  # as good as all; a third of the time
        monkeypatch.delitem(long_document.NETS, other)
    found = long_document.run(np, long_document.SMALL, tmp_path, seed=0)
    rouge = {name: values.mean() for name, values in found["rouge"].items()}
    whole = rouge["reads and sees all"]
    assert whole > rouge["lead"] + 0.015  # three seeds: 0.022 to 0.032
    assert whole > rouge["random"] + 0.025  # 0.034 to 0.045
    assert whole > rouge["reads 512"] + 0.004  # 0.009 to 0.019
    assert whole > rouge["no attention"] + 0.003  # 0.008 to 0.017
    row = found["speed"][-1]
    assert row["words"] == 8192
    assert row["standard"][1] == pytest.approx(row["predicted"], rel=0.05)
    assert row["standard"][1] > 30 * row["tiled"][1]
    assert (tmp_path / "long-document.png").read_bytes()[:4] == b"\x89PNG"
    assert "| reads and sees all |" in capsys.readouterr().out


def test_text_gradients_match_differences_and_standard_attention(rng):
    """Every weight, through o and lse, against a central difference; both ways of attention."""
    from text_data import FEATURES, Article
    from text_net import Net, standard, tiled

    size = {"heads": 2, "head_dim": 8, "head_dim_v": 4, "hidden": 6, "dtype": "float32"}
    starts = np.cumsum([0, 3, 9, 1, 14, 6, 8])
    n, chosen = int(starts[5]), np.array([0, 2, 3])  # the last sentence is not read
    features = rng.standard_normal((starts[-1], FEATURES)).astype(np.float32)
    ids = rng.integers(0, 20, (starts[-1], 2))
    article = Article("", [], [], [], ids, starts, features, np.zeros(6))
    assert article.within(n) == article.within(n + 7) == 5
    dscores = rng.standard_normal(3).astype(np.float32)

    def loss(net):
        return net.forward(article, chosen, 5)[0].astype(np.float64) @ dscores

    for options in ({}, {"window": 8}):
        net, gradients = Net(np, size, 20, 0, tiled, **options), {}
        for weight in net.weights.values():
            weight += (0.2 * rng.standard_normal(weight.shape)).astype(np.float32)
        net.forward(article, chosen, 5)[1](dscores, gradients)
        check_gradients(net, gradients, loss, 3e-3)
    net, usual = Net(np, size, 20, 0, standard), {}
    scores, pullback = net.forward(article, chosen, 5)
    pullback(dscores, usual)
    net.attend, ours = tiled, {}
    same, pullback = net.forward(article, chosen, 5)
    pullback(dscores, ours)
    np.testing.assert_allclose(same, scores, atol=1e-5)
    for name in usual:
        np.testing.assert_allclose(ours[name], usual[name], atol=2e-5, err_msg=name)


def test_text_gradients_in_float16(rng):
    """As a GPU computes them: gradients that float16 itself would lose; both ways of attention."""
    from text_data import FEATURES, Article
    from text_net import Net, standard, tiled

    size = {"heads": 2, "head_dim": 16, "head_dim_v": 8, "hidden": 8}
    starts = np.arange(0, 301, 20)
    features = rng.standard_normal((300, FEATURES)).astype(np.float32)
    article = Article("", [], [], [], rng.integers(0, 40, (300, 2)), starts, features, np.zeros(15))
    chosen, dscores = np.arange(15), rng.standard_normal(15).astype(np.float32)
    net, exact = Net(np, size | {"dtype": "float32"}, 40, 0, tiled), {}
    scores, pullback = net.forward(article, chosen, 15)
    pullback(dscores, exact)
    net.size = size | {"dtype": "float16"}
    for net.attend in (tiled, standard):
        close, pullback = net.forward(article, chosen, 15)
        np.testing.assert_allclose(close, scores, atol=5e-3)
        for small in (1, 1e-8):
            found: dict = {}
            pullback(np.float32(small) * dscores, found)
            for name, gradient in exact.items():
                error = np.linalg.norm(found[name] / small - gradient)
                assert error < 0.01 * np.linalg.norm(gradient), (net.attend, small, name)


def test_rouge_l():
    """By its definition, on cases counted by hand."""
    from text_data import rouge_l

    assert rouge_l("a b c d".split(), "a x c d y z".split()) == pytest.approx(0.6)
    assert rouge_l("d c b a".split(), "a b c d".split()) == pytest.approx(0.25)
    assert rouge_l([], ["a"]) == rouge_l(["b"], ["a"]) == 0


def test_genome(tmp_path, capsys):
    """A base that sees its neighbourhood knows its strand, one that does not guesses."""
    import genome

    found = genome.run(np, genome.SMALL | {"timed": 8192}, tmp_path, seed=0)
    held_out = {net: found[net]["E. coli, held out"] for net in genome.NETS}
    for net in ("window", "window, key points"):
        for mine, guess in zip(held_out[net], held_out["no attention"]):
            assert mine > guess + 0.15  # three seeds: 0.22, F1 0.27
        assert held_out[net][0] > 0.65
    assert found["gain"]["in place"] < 2 < 20 < found["gain"]["first"] < found["gain"]["pairs"]
    assert found["gain"]["measured"] > 1.3
    assert (tmp_path / "genome.png").read_bytes()[:4] == b"\x89PNG"
    assert "| window, key points |" in capsys.readouterr().out


def test_genome_gradients_match_differences(rng):
    """Every weight of the net, what a codon's phase adds among them, by a central difference."""
    import genome

    size = {"length": 40, "window": 6, "every": 10, "layers": 2, "width": 6, "heads": 3}
    net = genome.Net(np, size, 0, True)
    for weight in net.weights.values():
        weight *= 0.5
        weight += (0.3 * rng.standard_normal(weight.shape)).astype(np.float32)
    tokens, labels = rng.integers(0, 64, (2, 40)), rng.integers(0, 3, (2, 40))
    _, gradients = net.step(tokens, labels)
    check_gradients(net, gradients, lambda net: net.step(tokens, labels)[0], 1e-2)


def test_genome_is_seen_by_place(rng):
    """With key points stored first, a base still reaches its neighbours along the genome alone."""
    import genome

    size = {"length": 60, "window": 4, "every": 20, "layers": 1, "width": 6, "heads": 3}
    net = genome.Net(np, size, 0, True)
    net.weights["out"] += rng.standard_normal((6, 3)).astype(np.float32)
    tokens = rng.integers(0, 64, (1, 60))
    place, keys = np.arange(60), np.arange(60) % 20 == 10
    for at in (0, 10, 25, 59):  # 10 is a key point
        other = tokens.copy()
        other[0, at] ^= 21
        both = [net.order.undo(net.forward(x)[0], axis=1)[0] for x in (tokens, other)]
        reached = (abs(place - at) <= 4) | keys | keys[at]
        np.testing.assert_array_equal((both[0] != both[1]).any(axis=1), reached)


def test_layers_of_the_examples(rng):
    """Norms and gelu: the pullback is the derivative; half precision keeps small gradients."""
    import nn

    x, dy, direction = (rng.standard_normal((3, 5)) for _ in range(3))
    for layer in (nn.rmsnorm, nn.layernorm, nn.gelu):
        ends = [(layer(x + sign * 1e-6 * direction)[0] * dy).sum() for sign in (1, -1)]
        exact = (layer(x)[1](dy) * direction).sum()
        assert (ends[0] - ends[1]) / 2e-6 == pytest.approx(exact, rel=1e-6), layer.__name__
    w = {"a_qkv": rng.standard_normal((8, 24)) / 3, "a_mix": rng.standard_normal((8, 8)) / 3}
    w = {name: weight.astype(np.float32) for name, weight in w.items()}
    x, dy = (rng.standard_normal((2, 9, 8)).astype(np.float32) for _ in range(2))
    whole, half = {}, {}
    dx = nn.attention(w, "a", x, heads=2)[1](1e-9 * dy, whole)
    other = nn.attention(w, "a", x, heads=2, dtype=np.float16)[1](1e-9 * dy, half)
    np.testing.assert_allclose(other, dx, atol=5e-3 * abs(dx).max())
    for name in whole:
        np.testing.assert_allclose(half[name], whole[name], atol=5e-3 * abs(whole[name]).max())
