"""Gene finding, base by base: windows of a genome with local attention, key points and a period.

E. coli K-12 has 4.6 million bases, 4,319 genes on two strands. For every base the net says whether
it lies between genes, in a gene of the forward strand, or in one of the reverse strand. A token is
a base with its two followers. It tells little: any three bases occur everywhere. But a gene is read
in steps of three, and the triplets read are used unevenly, so a base must look at those about it,
and at each third of them above all.

* `cuflash.SlidingWindow` lets a base see its neighbourhood; `cuflash.GlobalTokens` makes one base
  in 64, or in 500, a key point that sees all and is seen by all;
* `cuflash.order.first` stores the key points in front, where they fill few tiles instead of many;
* `cuflash.Score` adds a number by (q - k) % 3 to each score. It is a `cuflash.Param`: its gradient
  comes with dq, dk, dv. Each head starts with one of the three frames.

    python examples/genome.py            # on a GPU if there is one: windows of 100,000 bases
    python examples/genome.py --small    # on the CPU, in a minute and a half

The same net without attention, and with the window only, are the baselines. Learned from the first
3.6 million bases of E. coli, tested on its last 600,000 and, harder, on two other species.
"""

import time
from pathlib import Path
from typing import Any

import nn
import numpy as np
from genome_report import cost, draw
from saved_report import table

import cuflash

SMALL = {"length": 1024, "batch": 2, "window": 128, "every": 64, "layers": 1, "width": 48,
         "heads": 3, "steps": 100, "rate": 1e-2, "test": 32, "timed": 16_384}  # fmt: skip
FULL = {"length": 100_000, "batch": 1, "window": 2048, "every": 500, "layers": 2, "width": 128,
        "heads": 4, "steps": 240, "rate": 5e-3, "test": 6, "timed": 100_000}  # fmt: skip
NETS = {"no attention": None, "window": False, "window, key points": True}
SHARE = np.array([0.16, 0.42, 0.42], np.float32)  # of each label in the loss, whatever a batch has
LEARNED = 3_600_000  # bases of E. coli to learn from
SPECIES = {"E. coli, held out": ("ecoli", 4_000_000, 4_600_000),
           "V. cholerae": ("vc", 0, 2_900_000), "C. trachomatis": ("ct", 0, 1_000_000)}  # fmt: skip
DATA = Path(__file__).parent / "data" / "genomes.npz"


# 1. The genome ------------------------------------------------------------------------------------


def load(xp: Any, name: str) -> tuple[Any, Any]:
    """Tokens, 0 to 63, the three bases from each on, and labels, 0 to 2, of each base."""
    data = np.load(DATA)
    bases = np.minimum(data[f"{name}_seq"], 3).astype(np.int64)
    labels = np.zeros(len(bases), np.int64)
    for start, end, strand in data[f"{name}_cds"]:
        labels[start - 1 : end] = 1 if strand > 0 else 2
    tokens = 16 * bases + 4 * np.roll(bases, -1) + np.roll(bases, -2)
    return xp.asarray(tokens), xp.asarray(labels)


# 2. The net ---------------------------------------------------------------------------------------


class Net:
    """Tokens of a window in, scores of the three labels for each base out."""

    def __init__(self, xp: Any, size: dict[str, Any], seed: int, keys: bool | None) -> None:
        self.xp, self.size, self.keys, rng = xp, size, keys, np.random.default_rng(seed)
        n, width, heads = size["length"], size["width"], size["heads"]
        flags = np.arange(n) % size["every"] == size["every"] // 2
        self.order = cuflash.order.first(np.flatnonzero(flags), n)
        self.mask = cuflash.SlidingWindow(size["window"], size["window"])
        self.mask = self.mask | cuflash.GlobalTokens(flags) if keys else self.mask
        w = {"in": nn.normal(xp, rng, 1, 64 * width).reshape(64, width)}
        w |= {"out": 0 * nn.normal(xp, rng, width, 3), "out_bias": xp.zeros(3, np.float32)}
        self.scores = []
        for i in range(size["layers"]):
            w[f"mlp{i}_up"] = nn.normal(xp, rng, width, 4 * width)
            w[f"mlp{i}_down"] = nn.normal(xp, rng, 4 * width, width)
            if keys is not None:
                w[f"att{i}_qkv"] = nn.normal(xp, rng, width, 3 * width)
                w[f"att{i}_qkv"][:, : 2 * width] *= 0.3  # at first the period decides
                w[f"att{i}_mix"] = 8 * nn.normal(xp, rng, width, width)  # a mean of many is small
                frame = np.arange(3) == np.arange(heads)[:, None] % 3  # one head a reading frame
                w[f"phase{i}"] = xp.asarray(3 * frame, np.float32)
                phase = cuflash.Param(w[f"phase{i}"])  # Adam changes in place what it holds
                codon = cuflash.Score(lambda x, b, h, q, k, p=phase: x + p[h, (q - k) % 3])
                self.scores.append((phase, codon))
        self.weights = w

    def forward(self, tokens: Any) -> tuple[Any, list[Any]]:
        """Scores (batch, length, 3) and the pullbacks, both with key points first."""
        x, pull = nn.embedding(self.weights, "in", self.order.apply(tokens, axis=1))
        tape = [pull]
        for i in range(self.size["layers"]):
            if self.keys is not None:
                phase, codon = self.scores[i]
                x, pull = nn.residual(
                    nn.attention, self.weights, f"att{i}", x, heads=self.size["heads"],
                    params={f"phase{i}": phase}, dtype=None if self.xp is np else np.float16,
                    mask=self.mask, score=codon, positions=self.order.positions,
                )  # fmt: skip
                tape.append(pull)
            x, pull = nn.residual(nn.mlp, self.weights, f"mlp{i}", x)
            tape.append(pull)
        x, norm = nn.rmsnorm(x)
        x, pull = nn.linear(self.weights, "out", x)
        return x, [*tape, lambda dy, g: norm(pull(dy, g))]

    def step(self, tokens: Any, labels: Any) -> tuple[Any, dict[str, Any]]:
        """The loss of a batch and its gradient by every weight."""
        scores, tape = self.forward(tokens)
        labels = self.order.apply(labels, axis=1)
        share = self.xp.asarray(SHARE) / self.xp.bincount(labels.reshape(-1), minlength=3).clip(1)
        loss, dx = nn.cross_entropy(scores, labels, share[labels])
        gradients: dict[str, Any] = {}
        for pullback in reversed(tape):
            dx = pullback(dx, gradients)
        return loss, gradients


# 3. Training, testing, cost -----------------------------------------------------------------------


def train(xp: Any, genome: tuple[Any, Any], size: dict[str, Any], seed: int, label: str) -> Net:
    """One of NETS; the same seed gives the same windows."""
    net, rng = Net(xp, size, seed, NETS[label]), np.random.default_rng(seed + 1)
    adam = nn.Adam(net.weights, size["steps"], size["rate"])
    for tell in nn.training(size["steps"], f"{label:18}"):
        start = rng.integers(0, LEARNED - size["length"], size["batch"])
        at = xp.asarray(start[:, None] + np.arange(size["length"]))
        loss, gradients = net.step(*(values[at] for values in genome))
        adam.step(gradients)
        tell(loss)
    return net


def test(net: Net, genome: tuple[Any, Any], first: int, last: int) -> tuple[float, float, Any]:
    """Accuracy and macro-F1 (mean over the labels), and (2, bases) labels, true and found.

    From windows that are spread evenly from base `first` to `last`.
    """
    xp, n, seen = net.xp, net.size["length"], []
    for start in np.linspace(first, last - n, net.size["test"]).astype(int):
        tokens, truth = (values[None, start : start + n] for values in genome)
        found = net.order.undo(net.forward(tokens)[0].argmax(axis=2), axis=1)
        seen.append(xp.stack([truth[0], found[0]]))
    labels = xp.concatenate(seen, axis=1)
    counts = xp.bincount(3 * labels[0] + labels[1], minlength=9).reshape(3, 3)  # true, found
    f1 = 2 * counts.diagonal() / (counts.sum(axis=0) + counts.sum(axis=1)).clip(1)
    return float(counts.trace() / counts.sum()), float(f1.mean()), labels


# 4. All of it -------------------------------------------------------------------------------------


def run(xp: Any, size: dict[str, Any], out: Path, seed: int = 0) -> dict[str, Any]:
    """Train and test NETS, measure cost; {net: {species: (accuracy, macro-F1)}, "gain": ...}."""
    genomes = {name: (load(xp, file), *where) for name, (file, *where) in SPECIES.items()}
    learned_from, *_ = genomes["E. coli, held out"]
    to_host = (lambda x: x) if xp is np else xp.asnumpy
    tracks, results, lines = {}, {}, []
    for label in NETS:
        clock = time.perf_counter()
        net = train(xp, learned_from, size, seed, label)
        seconds = time.perf_counter() - clock
        tests = {species: test(net, *genome) for species, genome in genomes.items()}
        results[label] = {species: each[:2] for species, each in tests.items()}
        truth, found = to_host(tests["E. coli, held out"][2][:, :20_000])
        tracks |= {"true": truth, label: found}
        cells = [f"{a:.3f}, {f1:.3f}" for a, f1 in results[label].values()]
        lines.append([label, *cells, f"{seconds:.0f} s"])
    costs, results["gain"] = cost(xp, size)
    page = table(["accuracy, macro-F1", *SPECIES, "training"], lines) + "\n\n"
    page += table(["forward and backward of one sequence", "time", "peak memory"], costs)
    print(f"\n{size}, seed {seed}\n\n{page}\n")
    out.mkdir(parents=True, exist_ok=True)
    (out / "genome.md").write_text(page + "\n")
    draw(tracks, to_host(net.weights["phase0"]), out / "genome.png")
    return results


if __name__ == "__main__":
    nn.start(__doc__, run, SMALL, FULL)
