"""The sm90 family: Hopper's tensor cores and copy engine; its Config and its table of tiles."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
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
            "width": self.widths[0],
            "width_v": self.widths[1],
            "box_q": self.boxes["q"],
            "box_k": self.boxes["k"],
        }

    def _token_bytes(self) -> tuple[int, int]:
        """Bytes in shared memory of a token of q or k, and of v or do."""
        return 2 * _round_up(self.head_dim, PANEL), 2 * _round_up(self.head_dim_v, PANEL)


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
    own_stages, dq_own_stages : owned tiles in shared memory at a time, of dk_dv and of dq
    """

    fused: int
    paired: int
    dq_block_q: int
    dq_block_k: int
    dq_stages: int
    dq_stages_v: int
    own_stages: int
    dq_own_stages: int

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
        own, stage, more = self._dk_dv_bytes()
        dq_own, dq_stages = self._dq_bytes()
        dk_dv = self.own_stages * own + self.stages * stage + more
        dq = 0 if self.fused else self.dq_own_stages * dq_own + dq_stages
        return max(dk_dv, dq) + 1024  # barriers and messages

    def with_own_stages(self, limit: int) -> Sm90Backward:
        """The same with the next owned tile in shared memory too, where it fits into `limit`."""
        config = self
        if replace(self, own_stages=2, dq_own_stages=1).shared_bytes <= limit:
            config = replace(config, own_stages=2)
        if replace(self, own_stages=1, dq_own_stages=2).shared_bytes <= limit:
            config = replace(config, dq_own_stages=2)
        return config

    def _dk_dv_bytes(self) -> tuple[int, int, int]:
        """Of dk_dv: bytes of an owned tile, of a stage, and what else it keeps."""
        token = sum(self._token_bytes())
        ds = 6 * self.block_k * self.block_q * self.fused  # three tiles
        given = 256 * self.block_q * self.paired
        return self.block_k * token, self.block_q * (token + 8), ds + given  # 8: lse, delta

    def _dq_bytes(self) -> tuple[int, int]:
        """Of dq: bytes of an owned tile, of all stages."""
        q_or_k, v_or_do = self._token_bytes()
        stages = self.dq_stages * q_or_k + self.dq_stages_v * v_or_do
        return self.dq_block_q * (q_or_k + v_or_do), self.dq_block_k * stages

    def constants(self) -> dict[str, int]:
        """The constants of `struct Config`."""
        rows = {"delta_rows": self.rows_a_warp["delta"], "rows_step": ROWS_STEP}
        return {**super().constants(), **rows}


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
        row = next(row for row in _BACKWARD if max(dims) <= row.widest)
        return _backward(row, problem.dtype, *dims, scale_first, problem.deterministic)
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
        for tile in (tile for tiles in _TILES.values() for tile in tiles):
            configs.append(_forward(tile, dtype, tile.widest, tile.widest_v, False))
        for row in _BACKWARD:
            for deterministic in {False, not row.fused}:
                configs.append(_backward(row, dtype, row.widest, row.widest, False, deterministic))
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
    config = Sm90Backward(
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
        own_stages=1,
        dq_own_stages=1,
        scale_first=int(scale_first),
        registers_load=row.registers[0],
        registers_compute=row.registers[1],
    )
    return config.with_own_stages(shared_limit_of(90))
