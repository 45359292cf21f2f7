"""What is measured: one row a case. Sizes follow the published tables: 16384 tokens a batch."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

ITEMSIZE = {"float16": 2, "bfloat16": 2, "float32": 4, "float64": 8}


@dataclass(frozen=True)
class Case:
    """Sizes, dtype and mask of one attention call; quick cases are in ``--quick`` too."""

    batch: int
    heads_q: int
    heads_k: int
    seqlen_q: int
    seqlen_k: int
    head_dim: int
    dtype: str
    causal: bool = False
    window: tuple[int | None, int | None] | None = None
    quick: bool = False

    @property
    def name(self) -> str:
        """Like ``bf16 d128 h16 b4 s4096 causal``; what ``--case`` matches."""
        short = {"float16": "fp16", "bfloat16": "bf16", "float32": "fp32", "float64": "fp64"}
        heads = f"h{self.heads_q}"
        if self.heads_k != self.heads_q:
            heads += f"/{self.heads_k}"
        length = f"s{self.seqlen_q}"
        if self.seqlen_k != self.seqlen_q:
            length += f"x{self.seqlen_k}"
        words = [short[self.dtype], f"d{self.head_dim}", heads, f"b{self.batch}", length]
        if self.causal:
            words.append("causal")
        if self.window is not None:
            words.append("window" + ",".join(str(side) for side in self.window))
        return " ".join(words)

    def options(self) -> dict[str, object]:
        """The mask as ``cuflash.attention`` takes it."""
        return {"causal": self.causal, "window": self.window}

    def key_range(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """First key and one past the last key that each of these query rows sees."""
        diagonal = rows + self.seqlen_k - self.seqlen_q
        first, stop = np.zeros_like(rows), np.full_like(rows, self.seqlen_k)
        if self.causal:
            stop = np.minimum(stop, diagonal + 1)
        if self.window is not None:
            left, right = self.window
            if left is not None:
                first = np.maximum(first, diagonal - left)
            if right is not None:
                stop = np.minimum(stop, diagonal + right + 1)
        return first, np.maximum(stop, first)

    def pairs(self) -> int:
        """Pairs of a query and a key that the mask allows, over all heads and batch items."""
        first, stop = self.key_range(np.arange(self.seqlen_q, dtype=np.int64))
        return self.batch * self.heads_q * int((stop - first).sum())

    def flops(self, backward: bool) -> int:
        """Operations of the matrix products on allowed pairs: two forward, five backward."""
        return self.pairs() * 2 * self.head_dim * (5 if backward else 2)

    def bytes_moved(self, backward: bool) -> int:
        """The fewest bytes a pass can move: every input read once, every output written once."""
        query = self.batch * self.seqlen_q * self.heads_q
        key = self.batch * self.seqlen_k * self.heads_k
        size = ITEMSIZE[self.dtype]
        lse = query * (8 if self.dtype == "float64" else 4)
        if backward:  # q o do dq, k v dk dv
            return self.head_dim * size * (4 * query + 4 * key) + lse
        return self.head_dim * size * (2 * query + 2 * key) + lse


def _grid(heads: tuple[tuple[int, int, int], ...], lengths: tuple[int, ...]) -> list[Case]:
    """bf16 over head dim, length and mask, 16384 tokens a batch."""
    cases = []
    for head_dim, heads_q, heads_k in heads:
        for seqlen in lengths:
            for causal in (False, True):
                quick = (head_dim, heads_k, seqlen) in ((128, 16, 4096), (64, 32, 4096))
                sizes = (16384 // seqlen, heads_q, heads_k, seqlen, seqlen, head_dim)
                cases.append(Case(*sizes, "bfloat16", causal, quick=quick))
    return cases


def _table() -> list[Case]:
    """bf16 over head dim, length and mask, then float16, float32 and float64, and a window."""
    heads = ((128, 16, 16), (64, 32, 32), (256, 8, 8), (128, 32, 8))
    cases = _grid(heads, (1024, 4096, 16384))
    cases += [
        Case(4, 16, 16, 4096, 4096, 128, "float16"),
        Case(1, 16, 16, 4096, 4096, 64, "float32", quick=True),
        Case(1, 16, 16, 4096, 4096, 64, "float32", causal=True),
        Case(1, 4, 4, 4096, 4096, 64, "float64"),
        Case(1, 16, 16, 16384, 16384, 128, "bfloat16", window=(512, 0)),
    ]
    return cases


GPU = _table()
GRID = _grid(
    ((64, 32, 32), (128, 16, 16), (256, 8, 8)), (512, 1024, 2048, 4096, 8192, 16384)
) + _grid(((128, 32, 8),), (2048, 4096, 16384))
SIMT = [Case(1, 16, 16, 4096, 4096, 64, "float32")]
CPU = [
    Case(1, 2, 2, 1024, 1024, 64, "float32", quick=True),
    Case(1, 2, 2, 1024, 1024, 64, "float32", causal=True, quick=True),
    Case(1, 2, 2, 4096, 4096, 64, "float32"),
    Case(1, 2, 2, 4096, 4096, 64, "float32", causal=True),
    Case(1, 2, 2, 4096, 4096, 64, "float32", window=(256, 0)),
    Case(1, 2, 2, 2048, 2048, 64, "float16"),
    Case(1, 2, 2, 2048, 2048, 64, "float64"),
]
