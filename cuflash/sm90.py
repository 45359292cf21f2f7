"""The sm90 family: Hopper's tensor cores and copy engine; its Config and its table of tiles."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import NamedTuple

from cuflash.config import Config, shared_limit_of
from cuflash.expr.interval import row_interval
from cuflash.problem import Problem

PANEL = 64  # columns of a shared tile that the copy engine writes as one box
ROWS_STEP = 128  # numbers a query are padded to a multiple of it; of the tiles of queries too
DTYPES = ("float16", "bfloat16")


@dataclass(frozen=True)
class Sm90Config(Config):
    """A Config of warp roles: one warpgroup loads, the others compute 64 rows each.

    stages : passing tiles, and those of the values or do beside them, in shared memory at a time
    scale_first : 1: scores are scaled before anything else (a scale that is not positive)
    registers_load, registers_compute : of a thread of each role
    """

    stages: int
    scale_first: int
    registers_load: int
    registers_compute: int

    family = "sm90"
    stays = True

    @property
    def warpgroups(self) -> int:
        """Warpgroups that compute."""
        raise NotImplementedError

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return 128 * (self.warpgroups + 1)

    @property
    def widths(self) -> tuple[int, int]:
        """Columns in registers of results like q and k, and like v."""
        return _round_up(self.head_dim, 32), _round_up(self.head_dim_v, 32)

    @property
    def padded(self) -> tuple[int, int]:
        """Columns in shared memory, and of the sums of dq, like q and k, and like v and do."""
        return _round_up(self.head_dim, PANEL), _round_up(self.head_dim_v, PANEL)

    @property
    def boxes(self) -> dict[str, int]:
        """By operand: tokens that the copy engine brings at a time; tiles are whole boxes."""
        queries, keys = (math.gcd(*tokens) for tokens in zip(*self.tiles.values()))
        return {"q": queries, "k": keys, "v": keys, "do": queries}

    def constants(self) -> dict[str, int]:
        """The constants of `struct Config`."""
        return {
            **super().constants(),
            "warpgroups": self.warpgroups,
            "panel": PANEL,
            **dict(zip(("width", "width_v"), self.widths)),
            "box_q": self.boxes["q"],
            "box_k": self.boxes["k"],
        }

    def _token_bytes(self) -> tuple[int, int]:
        """Bytes in shared memory of a token of q or k, and of v or do."""
        return 2 * self.padded[0], 2 * self.padded[1]


@dataclass(frozen=True)
class Sm90Forward(Sm90Config):
    """Of the forward kernel.

    pingpong : 1: two warpgroups take turns, the products of one run during the softmax of the other
    lazy : a row's maximum is followed once it has grown by more than 2^lazy; -1 follows always
    """

    pingpong: int
    lazy: int

    @property
    def warpgroups(self) -> int:
        """Warpgroups that compute."""
        return self.block_q // 64

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory of a block; the kernels assert that they lay out as much."""
        q_or_k, v = self._token_bytes()
        tiles = self.block_q * q_or_k + self.stages * self.block_k * (q_or_k + v)
        return tiles + 1024  # barriers and messages


@dataclass(frozen=True)
class Sm90Backward(Sm90Config):
    """Of the backward kernels. block_q and block_k are those of dk_dv, which owns keys.

    fused : 1: dk_dv sums dq too, by atomics; 0: a kernel of its own makes dq, in one order
    paired : 1: two warpgroups share 64 keys, one makes dv and one dk
    dq_block_q, dq_block_k, dq_stages, dq_stages_v : tile and stages of that kernel
    """

    fused: int
    paired: int
    dq_block_q: int
    dq_block_k: int
    dq_stages: int
    dq_stages_v: int

    @property
    def warpgroups(self) -> int:
        """Warpgroups that compute."""
        return 2

    @property
    def kernels(self) -> tuple[str, ...]:
        """The kernels that do the work, in their order."""
        return ("delta", "dk_dv", "round_dq" if self.fused else "dq")

    @property
    def tiles(self) -> dict[str, tuple[int, int]]:
        """Of the kernels that own tiles: queries and keys of a tile of scores."""
        dk_dv = {"dk_dv": (self.block_q, self.block_k)}
        return dk_dv if self.fused else {**dk_dv, "dq": (self.dq_block_q, self.dq_block_k)}

    @property
    def rows_a_warp(self) -> dict[str, int]:
        """Of the kernels that own no tiles: queries that a warp does at a time."""
        lanes = 1 << (math.ceil(self.head_dim_v / 8) - 1).bit_length()  # 16 bytes of do each
        return {"delta": 32 // lanes, "round_dq": 16}

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory of a block; the kernels assert that they lay out as much."""
        return max(self._bytes(kernel, self.own_stages(kernel)) for kernel in self.tiles)

    def own_stages(self, kernel: str) -> int:
        """Owned tiles in shared memory at a time: the next one too, where it fits."""
        return 2 if self._bytes(kernel, 2) <= shared_limit_of(90) else 1

    def _bytes(self, kernel: str, own_stages: int) -> int:
        q_or_k, v_or_do = self._token_bytes()
        more = 1024  # barriers and messages
        if kernel == "dq":
            more += self.dq_block_k * (self.dq_stages * q_or_k + self.dq_stages_v * v_or_do)
            return own_stages * self.dq_block_q * (q_or_k + v_or_do) + more
        more += self.stages * self.block_q * (q_or_k + v_or_do + 8)  # 8: lse, delta
        more += self.block_q * (6 * self.block_k * self.fused + 256 * self.paired)  # dS; P given
        return own_stages * self.block_k * (q_or_k + v_or_do) + more

    def constants(self) -> dict[str, int]:
        """The constants of `struct Config`."""
        return {
            **super().constants(),
            "own_stages": self.own_stages("dk_dv"),
            "dq_own_stages": self.own_stages("dq"),
            "delta_rows": self.rows_a_warp["delta"],
            "rows_step": ROWS_STEP,
        }


def _round_up(number: int, step: int) -> int:
    return math.ceil(number / step) * step


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
# on 2026-12-01 (16384 tokens a batch, heads x head_dim = 2048; thresholds lie between lengths that
# were measured, "anything" was not):
#   d 64    192 x 128 against 128 x 128: 9 to 32 % faster; causal 8 % slower at 512 and 1024 keys
#   d 128   three stages against 128 x 176: 2 to 4 % faster up to 4096 keys, 2 % slower at 16384
#   d 256   causal, 64 keys against 80: 2 to 5 % faster at 512 and 1024
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


class _BackwardTile(NamedTuple):
    """A row of the table of backward: head dims up to `widest`; `dq` is tile and stages of dq."""

    widest: int
    block_q: int
    block_k: int
    stages: int
    fused: int
    paired: int
    dq: tuple[int, int, int, int]
    registers: tuple[int, int] = (40, 232)


# Measured on an H200 on 2026-12-01: up to d 128 the fused kernel is 4 to 35 % faster than the two
# (causal at 512 keys as fast, at d 64 6 % slower); beyond there is no room for its sums.
_BACKWARD = (
    _BackwardTile(64, 128, 128, 2, 1, 0, (128, 128, 2, 2)),
    _BackwardTile(128, 64, 128, 2, 1, 0, (128, 128, 2, 2)),
    _BackwardTile(192, 64, 64, 2, 0, 1, (128, 64, 2, 2)),
    _BackwardTile(256, 64, 64, 2, 0, 1, (128, 64, 2, 1)),
)


def why_not(problem: Problem, arch: int, is_readable: bool) -> str | None:
    """Why the family does not take a pass of a problem; None if it does."""
    if arch != 90:
        return f"sm90: for compute capability 9.0, this GPU has {arch / 10}"
    if 0 in (problem.batch, problem.heads_q, problem.heads_k, problem.seqlen_q, problem.seqlen_k):
        return "sm90: there is nothing to compute"
    if problem.dtype not in DTYPES:
        return f"sm90: for {' and '.join(DTYPES)}, q is {problem.dtype}"
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
            "sm90: the copy engine cannot read q, k, v (or o, do) in place: it wants a start and "
            "steps that are multiples of 16 bytes, no negative or zero steps, head_dim contiguous"
        )
    return None


def sm90_config(problem: Problem, kernel: str = "forward") -> Sm90Config:
    """The Config of a pass of a problem that the family takes."""
    dims = problem.head_dim, problem.head_dim_v
    scale_first = not 2**-100 < problem.scale < 2**100
    if kernel == "backward":
        tile = next(tile for tile in _BACKWARD if max(dims) <= tile.widest)
        return _backward(tile, problem.dtype, *dims, scale_first, problem.deterministic)
    mask = problem.mask
    kind = "nothing"
    if problem.score is not None or (mask is not None and row_interval(mask.root) is None):
        kind = "anything"
    elif mask is not None:
        kind = "interval"
    row = next(
        row for row in _TILES[kind]
        if dims[0] <= row.widest and dims[1] <= row.widest_v and row.least <= problem.seqlen_k
    )  # fmt: skip
    return _forward(row, problem.dtype, *dims, scale_first)


def widest_configs() -> list[Sm90Config]:
    """Every row of the tables, for each dtype, at its widest."""
    configs: list[Sm90Config] = []
    for dtype in DTYPES:
        for row in itertools.chain(*_TILES.values()):
            configs.append(_forward(row, dtype, row.widest, row.widest_v, False))
        for tile in _BACKWARD:
            for deterministic in (False, True)[: 1 + tile.fused]:
                width = tile.widest
                configs.append(_backward(tile, dtype, width, width, False, deterministic))
    return configs


def _forward(
    row: _Tile, dtype: str, head_dim: int, head_dim_v: int, scale_first: bool
) -> Sm90Forward:
    return Sm90Forward(
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


def _backward(
    row: _BackwardTile, dtype: str, head_dim: int, head_dim_v: int, scale_first: bool,
    deterministic: bool,
) -> Sm90Backward:  # fmt: skip
    return Sm90Backward(
        kernel="backward",
        dtype=dtype,
        head_dim=head_dim,
        head_dim_v=head_dim_v,
        block_q=row.block_q,
        block_k=row.block_k,
        blocks_per_sm=1,
        stages=row.stages,
        fused=int(row.fused and not deterministic),
        paired=row.paired,
        dq_block_q=row.dq[0],
        dq_block_k=row.dq[1],
        dq_stages=row.dq[2],
        dq_stages_v=row.dq[3],
        scale_first=int(scale_first),
        registers_load=row.registers[0],
        registers_compute=row.registers[1],
    )
