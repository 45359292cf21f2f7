"""The sm90 family: Hopper's tensor cores and copy engine; its Config and its table of tiles."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

from cuflash.config import Config
from cuflash.expr.interval import row_interval
from cuflash.problem import Problem

PANEL = 64  # columns of a shared tile that the copy engine writes as one box
_DTYPES = ("float16", "bfloat16")


@dataclass(frozen=True)
class Sm90Config(Config):
    """A Config of warp roles: one warpgroup loads, the others compute 64 rows each.

    stages : key tiles, and value tiles, in shared memory at a time
    pingpong : 1: two warpgroups take turns, the products of one run during the softmax of the other
    lazy : a row's maximum is followed once it has grown by more than 2^lazy; -1 follows always
    scale_first : 1: scores are scaled before their maximum is taken (a scale that is not positive)
    registers_load, registers_compute : of a thread of each role
    """

    stages: int
    pingpong: int
    lazy: int
    scale_first: int
    registers_load: int
    registers_compute: int

    family = "sm90"
    stays = True

    @property
    def warpgroups(self) -> int:
        """Warpgroups that compute."""
        return self.block_q // 64

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return 128 * (self.warpgroups + 1)

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory of a block; the kernels assert that they lay out as much."""
        panels, panels_v = (math.ceil(n / PANEL) for n in (self.head_dim, self.head_dim_v))
        rows = self.block_q * panels + self.stages * self.block_k * (panels + panels_v)
        return rows * PANEL * 2 + 1024  # barriers and messages

    def constants(self) -> dict[str, int]:
        """The constants of `struct Config`."""
        return {**super().constants(), "warpgroups": self.warpgroups}


class _Tile(NamedTuple):
    """A row of the table: the tile for head dims of q, k and of v up to these.

    least : keys that a problem has to have
    registers : of a thread that loads, of one that computes; all warpgroups together have what a
        block is launched with (504 a thread of each for three of them, 512 for four), or the kernel
        would wait for ever
    """

    widest: int
    widest_v: int
    least: int
    block_q: int
    block_k: int
    stages: int
    pingpong: int
    lazy: int
    registers: tuple[int, int]


# The first row that fits is taken; by what stands between products and softmax. Measured on an H200
# on 2026-12-01 (16384 tokens a batch, heads x head_dim = 2048): 192 x 128 is 5 to 30 % faster than
# 128 x 128 at d 64, where causal below 2048 keys it is 8 % slower; a third stage 2 to 4 % at d 128
# below 8192 keys, 128 x 176 as much beyond; 64 keys for 80 are 3 to 5 % at d 256 causal below 2048.
_TILES = {
    "nothing": (
        _Tile(64, 64, 0, 192, 128, 4, 0, 8, (32, 160)),
        _Tile(128, 128, 8192, 128, 176, 2, 1, 8, (40, 232)),
        _Tile(128, 128, 0, 128, 128, 3, 0, 8, (40, 232)),
        _Tile(192, 128, 0, 128, 128, 2, 1, 8, (40, 232)),
        _Tile(192, 192, 0, 128, 112, 2, 1, 8, (40, 232)),
        _Tile(256, 256, 0, 128, 80, 2, 1, 8, (40, 232)),
    ),
    "interval": (  # a mask of two comparisons a pair
        _Tile(64, 64, 2048, 192, 128, 4, 0, 8, (32, 160)),
        _Tile(64, 64, 0, 128, 128, 4, 1, 8, (72, 216)),
        _Tile(128, 128, 0, 128, 128, 3, 1, 8, (72, 216)),
        _Tile(192, 128, 0, 128, 128, 2, 1, 8, (72, 216)),
        _Tile(192, 192, 0, 128, 96, 2, 1, 8, (72, 216)),
        _Tile(256, 256, 2048, 128, 80, 2, 1, 8, (40, 232)),
        _Tile(256, 256, 0, 128, 64, 2, 1, 8, (40, 232)),
    ),
    "anything": (  # any other mask, any score
        _Tile(64, 64, 0, 128, 128, 3, 0, 8, (72, 216)),
        _Tile(128, 128, 0, 128, 128, 3, 1, 8, (72, 216)),
        _Tile(192, 128, 0, 128, 96, 2, 1, 8, (72, 216)),
        _Tile(192, 192, 0, 128, 80, 2, 1, 8, (72, 216)),
        _Tile(256, 256, 0, 128, 64, 2, 1, 8, (72, 216)),
    ),
}


def why_not(problem: Problem, kernel: str, arch: int, is_readable: bool) -> str | None:
    """Why the family does not take a pass of a problem; None if it does."""
    if arch != 90:
        return f"sm90: for compute capability 9.0, this GPU has {arch / 10}"
    if kernel != "forward":
        return "sm90: has a forward kernel only"
    if 0 in (problem.batch, problem.heads_q, problem.heads_k, problem.seqlen_q, problem.seqlen_k):
        return "sm90: there is nothing to compute"
    if problem.dtype not in _DTYPES:
        return f"sm90: for {' and '.join(_DTYPES)}, q is {problem.dtype}"
    widest = max(problem.head_dim, problem.head_dim_v)
    if widest > 256:
        return f"sm90: for head dims up to 256, got {widest}"
    if problem.head_dim % 8 or problem.head_dim_v % 8:
        return (
            "sm90: the copy engine reads rows of whole 16 bytes: head dims have to be multiples of "
            f"8, got {problem.head_dim} and {problem.head_dim_v}"
        )
    if not is_readable:
        return (
            "sm90: the copy engine cannot read q, k or v in place: it wants a start and steps that "
            "are multiples of 16 bytes, no negative or zero steps, and head_dim contiguous"
        )
    return None


def sm90_config(problem: Problem) -> Sm90Config:
    """The Config of a problem that the family takes."""
    mask, dims = problem.mask, (problem.head_dim, problem.head_dim_v)
    kind = "nothing"
    if problem.score is not None or (mask is not None and row_interval(mask.root) is None):
        kind = "anything"
    elif mask is not None:
        kind = "interval"
    row = next(
        row for row in _TILES[kind]
        if dims[0] <= row.widest and dims[1] <= row.widest_v and row.least <= problem.seqlen_k
    )  # fmt: skip
    return _config(row, problem.dtype, *dims, not 2**-100 < problem.scale < 2**100)


def widest_configs() -> list[Sm90Config]:
    """Every row of the table, for each dtype, at its widest."""
    return [
        _config(row, dtype, row.widest, row.widest_v, False)
        for rows in _TILES.values()
        for row in rows
        for dtype in _DTYPES
    ]


def _config(
    row: _Tile, dtype: str, head_dim: int, head_dim_v: int, scale_first: bool
) -> Sm90Config:
    return Sm90Config(
        kernel="forward",
        dtype=dtype,
        head_dim=head_dim,
        head_dim_v=head_dim_v,
        block_q=row.block_q,
        block_k=row.block_k,
        blocks_per_sm=1,
        stages=row.stages,
        pingpong=row.pingpong,
        lazy=row.lazy,
        scale_first=int(scale_first),
        registers_load=row.registers[0],
        registers_compute=row.registers[1],
    )
