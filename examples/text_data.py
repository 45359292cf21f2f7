"""Articles, their summaries and how alike two texts are: the data of `long_document.py`."""

import json
import lzma
import re
from collections import Counter
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

DATA = Path(__file__).parent / "data" / "wikipedia_articles.json.xz"
COUNT = 81  # articles
LONGEST = 8192  # words of an article; what follows is cut off
BUDGET = 150  # words of a summary
FEATURES = 9  # plain facts about a word and its sentence: the columns of `Article.features`
OPENINGS = {"he", "she", "it", "they", "this", "these", "however", "but", "also", "in"}


@dataclass
class Article:
    """An article without its lead section, and the lead section as the summary to come near to.

    words : of each sentence, lower case
    summary : the first 150 words of the lead section
    ids : (tokens, 2) numbers of each word and of its stem in the vocabulary
    starts : (sentences + 1,) the token at which each sentence starts
    features : (tokens, FEATURES)
    gain : (sentences,) how much a sentence shares with the summary; what the net learns
    """

    title: str
    sentences: list[str]
    words: list[list[str]]
    summary: list[str]
    ids: np.ndarray
    starts: np.ndarray
    features: np.ndarray
    gain: np.ndarray

    def within(self, context: int) -> int:
        """How many sentences end within the first so many words, at least one."""
        return max(1, int((self.starts[1:] <= context).sum()))


def split(text: str) -> list[str]:
    return re.findall("[a-z0-9]+", text.lower())


def articles(learned_from: np.ndarray) -> tuple[list[Article], int]:
    """All articles, and how many numbers there are for words and stems.

    learned_from : the articles whose words are counted; a rare word says more than a common one
    """
    raw = json.loads(lzma.decompress(DATA.read_bytes()))
    bodies = [[split(sentence) for sentence in each["body"]] for each in raw]
    known = [set().union(*bodies[i]) for i in learned_from]
    count = Counter(word for each in known for word in each)
    numbers: dict[str, int] = {}
    found = []
    for each, words in zip(raw, bodies):
        fits = int((np.cumsum([len(x) for x in words]) <= LONGEST).sum())
        words, sentences = words[:fits], each["body"][:fits]
        lengths = np.array([len(x) for x in words])
        flat = [word for x in words for word in x]
        ids = [[numbers.setdefault(x, len(numbers)) for x in (w, w[:5] + "-")] for w in flat]
        seen = np.array([count[word] for word in flat])
        title = set(split(each["title"]))
        sentence = np.repeat(np.arange(fits), lengths)
        opens = np.diff(sentence, prepend=-1) > 0
        length = lengths[sentence]
        features = [
            np.log(len(known) / (seen + 0.5)) / 2 - 0.7,  # rare or common
            np.array([word in title for word in flat]),
            np.array([word.isdigit() for word in flat]),
            opens,
            opens & np.array([word in OPENINGS for word in flat]),  # leans on the one before
            np.log(length / 20),
            (length - 25) ** 2 / 400,
            np.exp(-sentence / 5),
            sentence / 300,
        ]
        summary = [word for sentence in each["lead"] for word in split(sentence)][:BUDGET]
        gain = np.array([shared(x, summary) for x in words])
        found.append(
            Article(
                each["title"], sentences, words, summary, np.array(ids),
                np.concatenate([[0], np.cumsum(lengths)]),
                np.stack(features, axis=1).astype(np.float32),
                (gain - gain.mean()) / gain.std(),
            )
        )  # fmt: skip
    return found, len(numbers)


def shared(words: list[str], summary: list[str]) -> float:
    """How much of a sentence is in the summary: words, and pairs of words twice."""
    single = (Counter(words) & Counter(summary)).total() / max(8, len(words))
    pairs = [Counter(pairwise(x)) for x in (words, summary)]
    return single + 4 * (pairs[0] & pairs[1]).total() / max(1, pairs[0].total() + pairs[1].total())


def rouge_l(text: list[str], summary: list[str]) -> float:
    """F1 of the longest common subsequence of two lists of words (no stemming)."""
    row = np.zeros(len(summary) + 1, int)  # longest with the words so far and i of the summary
    summary_words = np.array(summary)
    for word in text:
        longer = row[:-1] + (summary_words == word)
        row[1:] = np.maximum.accumulate(np.maximum(row[1:], longer))
    return 2 * int(row[-1]) / max(1, len(text) + len(summary))


def select(article: Article, best_first: Any) -> list[int]:
    """Sentences in this order until 150 words are full, told in the order of the article."""
    chosen: list[int] = []
    total = 0
    for i in best_first:
        more = len(article.words[i])
        if chosen and total + more > 1.15 * BUDGET:
            continue
        chosen.append(int(i))
        total += more
        if total >= BUDGET:
            break
    return sorted(chosen)


def score(article: Article, best_first: Any) -> float:
    """ROUGE-L of the sentences selected."""
    chosen = select(article, best_first)
    return rouge_l([word for i in chosen for word in article.words[i]], article.summary)
