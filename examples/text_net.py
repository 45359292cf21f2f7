"""The net of `long_document.py`: one layer of attention over a whole document, gradients by hand.

A word's vector is random, that of its stem added: two words are alike where they are the same, and
nothing about them was learned before. Attention of such vectors asks of each word where in the
document it comes again: lse, the log of the sum of exp(q k), is a soft count of the word, o tells
what the places are like. Both are learned from, so the gradient flows back through both. A small
MLP makes of them and of plain facts (`text_data.FEATURES`) what a word is worth, the mean over a
sentence and a second MLP what a sentence is worth.
"""

import math
from collections.abc import Callable
from typing import Any

import nn
import numpy as np
from text_data import FEATURES, Article

import cuflash

# (q, k, v) -> ((o, lse), pullback), pullback(do, dlse) -> dq, dk, dv
Attend = Callable[..., tuple[tuple[Any, Any], Callable[..., Any]]]
SHARP, BROAD = 14.0, 6.0  # scores of a word with itself at the start, in every other head


def tiled(q: Any, k: Any, v: Any, **options: Any) -> tuple[tuple[Any, Any], Callable[..., Any]]:
    """Attention by cuflash: no array of the size tokens x tokens."""
    return cuflash.attention_vjp(q, k, v, scale=1.0, return_lse=True, **options)


def standard(q: Any, k: Any, v: Any) -> tuple[tuple[Any, Any], Callable[..., Any]]:
    """The same by the definition, each line a pass over memory."""
    xp = nn.library(q)
    q, k, v = (x.swapaxes(0, 1) for x in (q, k, v))  # (heads, tokens, d)
    s = q @ k.swapaxes(1, 2)  # (heads, tokens, tokens)
    largest = s.max(axis=2, keepdims=True)
    p = s - largest  # S and P are there at once
    del s
    xp.exp(p, out=p)
    total = p.sum(axis=2, keepdims=True, dtype=np.float32)
    p /= total
    o = p @ v
    lse = (xp.log(total) + largest)[:, :, 0]

    def pullback(do: Any, dlse: Any) -> list[Any]:
        do = do.swapaxes(0, 1).astype(q.dtype)
        delta = (do * o).sum(axis=2, dtype=np.float32) - dlse
        dp = do @ v.swapaxes(1, 2)
        ds = dp - delta.astype(q.dtype)[:, :, None]  # P, dP and dS are there at once
        del dp
        ds *= p
        of = [ds @ k, ds.swapaxes(1, 2) @ q, p.swapaxes(1, 2) @ do]
        return [x.swapaxes(0, 1) for x in of]

    return (o.swapaxes(0, 1), lse), pullback


class Net:
    """A document in, a score for each of its sentences out.

    Parameters
    ----------
    size : the table SMALL or FULL of `long_document.py`
    vocabulary : how many numbers there are for words and stems
    attend : `tiled`, `standard`, or None for the baseline without attention
    window : how many words about it a word sees; None is all that are read (`tiled` only)
    """

    def __init__(
        self, xp: Any, size: dict[str, Any], vocabulary: int, seed: int,
        attend: Attend | None = tiled, window: int | None = None,
    ) -> None:  # fmt: skip
        self.xp, self.size, self.attend, self.window = xp, size, attend, window
        rng = np.random.default_rng(seed)
        heads, d, d_v, hidden = (size[x] for x in ("heads", "head_dim", "head_dim_v", "hidden"))
        vectors = rng.standard_normal((vocabulary, d)) / d**0.5
        self.vectors = xp.asarray(vectors, np.float32)
        alike = np.zeros((d + FEATURES, heads, d), np.float32)
        for head in range(heads):
            alike[:d, head] = np.eye(d) * math.sqrt((SHARP, BROAD)[head % 2])
        w = {name: xp.array(alike.reshape(d + FEATURES, -1)) for name in ("q", "k")}
        w |= {"v": nn.normal(xp, rng, d + FEATURES, heads * d_v)}
        w |= {"word": 1.4 * nn.normal(xp, rng, FEATURES + heads * (d_v + 1), hidden)}
        w |= {"sentence": 1.4 * nn.normal(xp, rng, hidden, hidden)}
        w |= {"score": nn.normal(xp, rng, hidden, 1)}
        w |= {f"{name}_bias": xp.zeros(hidden, np.float32) for name in ("word", "sentence")}
        self.weights = w

    def forward(self, article: Article, chosen: np.ndarray, sentences: int) -> nn.Layer:
        """Scores of the chosen ones among the first so many sentences, and the pullback.

        Words of the chosen sentences are the queries; keys are all words of the first sentences.
        """
        xp, w, starts = self.xp, self.weights, article.starts
        tokens = int(starts[sentences])
        vectors = self.vectors[xp.asarray(article.ids[:tokens])].sum(axis=1) / math.sqrt(2)
        x = xp.concatenate([vectors, xp.asarray(article.features[:tokens])], axis=1)
        lengths = starts[chosen + 1] - starts[chosen]
        rows = np.concatenate([np.arange(starts[i], starts[i + 1]) for i in chosen])
        asked = x[xp.asarray(rows)]
        y, pull_attention = self.attention(asked, x, rows)
        y, pull_word = nn.linear(w, "word", y)
        y, pull_gelu = nn.gelu(y)
        y, pull_mean = sentence_means(y, lengths)
        y, pull_sentence = nn.linear(w, "sentence", y)
        y, pull_gelu_again = nn.gelu(y)
        scores, pull_score = nn.linear(w, "score", y)

        def pullback(dscores: Any, g: nn.Weights) -> None:
            dy = pull_gelu_again(pull_score(dscores[:, None], g))
            dy = pull_gelu(pull_mean(pull_sentence(dy, g)))
            pull_attention(pull_word(dy, g), g)

        return scores[:, 0], pullback

    def attention(self, asked: Any, x: Any, rows: np.ndarray) -> nn.Layer:
        """What is known of each word asked about: plain facts, o and lse of every head."""
        xp, w, heads, dtype = self.xp, self.weights, self.size["heads"], self.size["dtype"]
        width = FEATURES + heads * (self.size["head_dim_v"] + 1)
        y = xp.zeros((len(asked), width), np.float32)
        y[:, :FEATURES] = asked[:, -FEATURES:]
        if self.attend is None:
            return y, lambda dy, g: None
        parts = [nn.linear(w, name, a) for name, a in (("q", asked), ("k", x), ("v", x))]
        q, k, v = (a.reshape(len(a), heads, -1).astype(dtype) for a, _ in parts)
        options: dict[str, Any] = {}
        if self.window is not None:
            of_keys = xp.arange(len(x))
            options = {"window": self.window // 2, "positions": (xp.asarray(rows), of_keys)}
        (o, lse), pull = self.attend(q, k, v, **options)
        y[:, FEATURES:-heads] = o.reshape(len(o), -1)
        seen = min(len(x), self.window or len(x))
        y[:, -heads:] = (lse.T - math.log(seen) - 3) / 3  # about -1 to 3

        def pullback(dy: Any, g: nn.Weights) -> None:
            do, dlse = dy[:, FEATURES:-heads].reshape(o.shape), dy[:, -heads:].T / 3
            unit = xp.maximum(abs(do).max(), abs(dlse).max()) + 1e-30  # float16 would lose them
            grads = pull((do / unit).astype(dtype), dlse / unit)
            for (_, pull_part), grad in zip(parts, grads):
                pull_part(unit * grad.reshape(len(grad), -1).astype(np.float32), g)

        return y, pullback


def sentence_means(y: Any, lengths: np.ndarray) -> nn.Layer:
    """The mean over the words of each sentence: y (words, width), lengths in words."""
    xp = nn.library(y)
    ends = xp.asarray(np.cumsum(lengths) - 1)
    of_word = xp.asarray(np.repeat(np.arange(len(lengths)), lengths))  # its sentence
    lengths = xp.asarray(lengths[:, None], np.float32)
    sums = xp.diff(xp.cumsum(y, axis=0)[ends], axis=0, prepend=np.float32(0))
    return sums / lengths, lambda dy: (dy / lengths)[of_word]
