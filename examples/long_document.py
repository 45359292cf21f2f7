"""Summaries of documents of 8,000 words: attention that reads them whole, trained by hand.

Eighty-one long Wikipedia articles. The lead section of each, written by people, is taken away and
is what a summary of the rest should come near to. The net scores the sentences of the rest, the
best fill 150 words, and ROUGE-L says how much of the lead section's words they have in its order.

Words that are taken up again, and where, tell what an article is about, so each word attends to all
others (`text_net.py`). Standard attention would hold matrices of 8,192 x 8,192 numbers for each
head; tiled attention never does. Gradients go back through both of its results:

    (o, lse), pullback = cuflash.attention_vjp(q, k, v, return_lse=True)
    dq, dk, dv = pullback(do, dlse)

    python examples/long_document.py            # on a GPU if there is one: all three thirds
    python examples/long_document.py --small    # on the CPU, in about a minute: one third

Baselines: sentences at random, the first ones, the same net without attention, and nets that read
only the first 512 or 2,048 words, or see only 512 about each word (on these articles 2,048 are
enough). A third of the articles is tested; --seed says which third, and what is random.
"""

import time
from pathlib import Path
from typing import Any

import matplotlib
import nn
import numpy as np
from saved_report import table
from text_data import COUNT, LONGEST, Article, articles, score, select
from text_net import Net, standard, tiled
from what_is_saved import measure

import cuflash

matplotlib.use("Agg")
from matplotlib import pyplot

SMALL = {"heads": 2, "head_dim": 64, "head_dim_v": 8, "hidden": 32, "dtype": "float32",
         "steps": 100, "rate": 1e-2, "queries": 1024, "thirds": 1, "room": 2**31}  # fmt: skip
FULL = {"heads": 4, "head_dim": 128, "head_dim_v": 16, "hidden": 64, "dtype": "float16",
        "steps": 300, "rate": 6e-3, "queries": 8192, "thirds": 3, "room": 2**36}  # fmt: skip
# How attention is computed, words read from the start, words about it that a word sees, and how
# many times as long the net learns: those that cost little, as long as it helps them.
NETS = {
    "no attention": (None, LONGEST, None, 4),
    "reads 512": (tiled, 512, None, 3),
    "reads 2,048": (tiled, 2048, None, 1),
    "reads all, sees 512": (tiled, LONGEST, 512, 1),
    "reads and sees all": (tiled, LONGEST, None, 1),
}


# 1. Training and testing --------------------------------------------------------------------------


def loss_gradient(xp: Any, scores: Any, gain: Any) -> tuple[Any, Any]:
    """How far softmax(scores) is from softmax(gain), KL divergence, and its gradient by scores."""
    logs = [x - x.max() - xp.log(xp.exp(x - x.max()).sum()) for x in (scores, gain)]
    found, wanted = (xp.exp(x) for x in logs)
    return (wanted * (logs[1] - logs[0])).sum(), found - wanted


def train(xp: Any, net: Net, data: list[Article], reads: int, seed: int, label: str) -> None:
    """A step is one article: sentences of it, drawn at random, compared by all that is read."""
    rng, size = np.random.default_rng(seed), net.size
    adam = nn.Adam(net.weights, size["steps"], size["rate"])
    queue: list[int] = []
    for tell_loss in nn.training(size["steps"], f"{label:20}"):
        queue = queue or list(rng.permutation(len(data)))
        article = data[queue.pop()]
        sentences = article.within(reads)
        share = size["queries"] / article.starts[sentences]
        count = min(sentences, max(2, int(share * sentences)))
        chosen = np.sort(rng.choice(sentences, count, replace=False))
        scores, pullback = net.forward(article, chosen, sentences)
        gradients: nn.Weights = {}
        loss, dscores = loss_gradient(xp, scores, xp.asarray(article.gain[chosen], np.float32))
        pullback(dscores, gradients)
        adam.step(gradients)
        tell_loss(loss)


def scores_of(xp: Any, net: Net, article: Article, reads: int) -> np.ndarray:
    """The score of each sentence that is read."""
    sentences = article.within(reads)
    scores, _ = net.forward(article, np.arange(sentences), sentences)
    return np.asarray(scores if xp is np else xp.asnumpy(scores))


def third(xp: Any, size: dict, seed: int) -> tuple[dict[str, np.ndarray], Any]:
    """ROUGE-L of every tested article by every way, their lengths, and one article to look at."""
    order = np.random.default_rng(81).permutation(COUNT)
    tested = order[seed % 3 :: 3]
    learned = np.setdiff1d(order, tested)
    data, vocabulary = articles(learned)
    rng, test = np.random.default_rng(seed), [data[i] for i in tested]
    found: dict[str, Any] = {"words": [x.starts[-1] for x in test]}
    shuffled = [[rng.permutation(len(x.words)) for _ in range(5)] for x in test]
    found["random"] = [np.mean([score(x, y) for y in ys]) for x, ys in zip(test, shuffled)]
    found["lead"] = [score(x, range(len(x.words))) for x in test]
    for label, (attend, reads, window, longer) in NETS.items():
        steps = longer * size["steps"]
        net = Net(xp, size | {"steps": steps}, vocabulary, seed, attend, window)
        train(xp, net, [data[i] for i in learned], reads, seed, label)
        scores = [scores_of(xp, net, x, reads) for x in test]
        found[label] = [score(x, np.argsort(-s)) for x, s in zip(test, scores)]
    found["best sentences"] = [score(x, np.argsort(-x.gain)) for x in test]
    longest = int(np.argmax(found["words"]))
    shown = (net, test[longest], scores[longest])
    return {name: np.array(values) for name, values in found.items()}, shown


def speed(xp: Any, net: Net, article: Article) -> list[dict[str, Any]]:
    """Forward and backward of all sentences within each context, by both ways of attention."""
    size, rows = net.size, []
    dims = {name: size[name] for name in ("heads", "head_dim", "head_dim_v", "dtype")}
    for context in (512, 2048, LONGEST):
        sentences = article.within(context)
        model = cuflash.memory(seqlen=context, **dims)
        row: dict[str, Any] = {"words": context, "predicted": model.standard_backward}

        def step(count: int = sentences) -> None:
            scores, pullback = net.forward(article, np.arange(count), count)
            pullback(scores, {})

        for name, net.attend in 2 * (("standard", standard), ("tiled", tiled)):  # the faster of 2
            fits = name == "tiled" or model.standard_backward < size["room"]
            cost = measure(xp, step) if fits else (float("nan"), model.standard_backward)
            row[name] = min(row.get(name, cost), cost)
        rows.append(row)
    return rows


# 2. All of it -------------------------------------------------------------------------------------


def draw(found: dict, article: Article, scores: np.ndarray, rows: list[dict], path: Path) -> None:
    """ROUGE-L of every way; an article's sentences, scored and selected; memory."""
    figure, (left, middle, right) = pyplot.subplots(1, 3, figsize=(16, 4.5))
    names = list(found)[:0:-1]  # all but the lengths, from below
    errors = [found[name].std() / len(found[name]) ** 0.5 for name in names]
    left.errorbar([found[name].mean() for name in names], names, xerr=errors, fmt="o")
    left.set(title="ROUGE-L of 150 words, mean and standard error")
    chosen = select(article, np.argsort(-scores))
    middle.plot(article.starts[:-1], scores, lw=0.6, color="0.5", label="score of a sentence")
    middle.plot(article.starts[chosen], scores[chosen], "o", color="C3", label="selected")
    middle.vlines([512, 2048], *middle.get_ylim(), color="C0", ls=":", lw=1)
    middle.set(title=f"{article.title}, read whole", xlabel="word")
    words = [row["words"] for row in rows]
    for name, marker in (("standard", "s-"), ("tiled", "o-")):
        sizes = [row[name][1] / 2**20 for row in rows]
        right.loglog(words, sizes, marker, label=f"{name} attention")
    right.minorticks_off()
    right.set(title="Peak memory of a training step, MiB", xticks=words, xticklabels=words)
    for axes in (middle, right):
        axes.legend(loc="lower right")
    figure.tight_layout()
    figure.savefig(path, dpi=70)
    pyplot.close(figure)


def tables(found: dict[str, np.ndarray], rows: list[dict]) -> str:
    """Tables: ROUGE-L of every way; time and memory of both ways of attention."""
    lead, long, lines = found["lead"], found["words"] > 2048, []
    for name, values in list(found.items())[1:]:
        more = values - lead
        difference = f"{more.mean():+.4f} ± {more.std() / len(more) ** 0.5:.4f}"
        lines.append([name, f"{values.mean():.4f}", difference, f"{values[long].mean():.4f}"])
    head = [f"{len(lead)} articles", "ROUGE-L", "minus lead", f"the {long.sum()} above 2,048 words"]
    page, lines = table(head, lines), []
    for row in rows:
        (slow, large), (fast, little) = row["standard"], row["tiled"]
        mib = [f"{x / 2**20:,.0f}" for x in (large, row["predicted"], little)]
        lines.append([f"{row['words']:,}", f"{1 / slow:.2f}", f"{1 / fast:.2f}", *mib])
    head = ["words", "documents/s, standard", "tiled", "peak MiB, standard"]
    head += ["of it by cuflash.memory", "peak MiB, tiled"]
    return f"{page}\n\n{table(head, lines)}\n"


def run(xp: Any, size: dict, out: Path, seed: int = 0) -> dict[str, Any]:
    """Train, test, measure, print and write; return ROUGE-L of every article, and the speed."""
    start = time.perf_counter()
    parts = [third(xp, size, seed + i) for i in range(size["thirds"])]
    found = {name: np.concatenate([part[name] for part, _ in parts]) for name in parts[0][0]}
    net, article, scores = parts[-1][1]
    rows = speed(xp, net, article)
    text = [article.sentences[i] for i in select(article, np.argsort(-scores))]
    page = tables(found, rows)
    print(f"\n{article.title}, in 150 words: {' '.join(text)}\n\n{page}")
    out.mkdir(parents=True, exist_ok=True)
    (out / "long-document.md").write_text(page)
    draw(found, article, scores, rows, out / "long-document.png")
    print(f"{time.perf_counter() - start:.0f} s, seed {seed}, {size}")
    return {"rouge": found, "speed": rows}


if __name__ == "__main__":
    nn.start(__doc__, run, SMALL, FULL)
