"""The simt family: any GPU, any dtype; its Config and its table of tiles."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

from cuflash.config import Config
from cuflash.errors import Unsupported

_RESERVED = 1024  # bytes of shared memory that the system takes from each block


@dataclass(frozen=True)
class SimtConfig(Config):
    """A Config whose sums lie in registers, dealt out to a grid of threads.

    thread_rows, thread_columns : the grid that the threads of a block form
    chunk, chunk_v : numbers of a head dimension (of q and k, of v and o) in shared memory at a time
    """

    thread_rows: int
    thread_columns: int
    chunk: int
    chunk_v: int

    family = "simt"

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return self.thread_rows * self.thread_columns

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory of a block; the kernels assert that they lay out as much."""
        number = 8 if self.dtype == "float64" else 4

        def tile(rows: int, columns: int) -> int:  # SharedTile: a vector of padding a row
            return rows * (columns * number + 16)

        widths = self.chunk, self.chunk_v
        if self.kernel == "forward":  # q, k, v, p
            tiles = tile(self.block_q, self.chunk) + sum(tile(self.block_k, w) for w in widths)
            return tiles + tile(self.block_k, self.block_q)
        tiles = sum(tile(self.block_q, w) + tile(self.block_k, w) for w in widths)  # q, do, k, v
        rows = 2 * max(self.block_q, self.block_k) * number  # lse, delta
        return tiles + tile(self.block_k, self.block_q) + rows


class _Tile(NamedTuple):
    """A row of the table: the tile of a kernel for head dims up to `widest`."""

    widest: int
    block_q: int
    block_k: int
    thread_rows: int
    thread_columns: int
    chunk: int
    blocks_per_sm: int


# The first row that is wide enough and whose blocks fit into an SM's shared memory is taken; by
# kernel and bytes of a number in the sums.
_SIMT = {
    ("forward", 4): (
        _Tile(64, 128, 64, 16, 16, 64, 2),
        _Tile(128, 64, 64, 16, 16, 64, 2),
        _Tile(128, 64, 32, 16, 16, 64, 2),
        _Tile(256, 64, 64, 16, 16, 64, 1),
        _Tile(256, 64, 32, 16, 16, 64, 1),
        _Tile(512, 32, 32, 8, 32, 128, 1),
    ),
    ("forward", 8): (
        _Tile(128, 64, 64, 16, 16, 64, 1),
        _Tile(256, 32, 32, 16, 16, 64, 1),
        _Tile(512, 16, 32, 8, 32, 64, 1),
    ),
    ("backward", 4): (
        _Tile(64, 64, 64, 16, 16, 64, 2),
        _Tile(128, 64, 64, 16, 16, 64, 1),
        _Tile(128, 32, 32, 8, 16, 64, 1),
        _Tile(512, 32, 32, 8, 32, 128, 1),
        _Tile(512, 16, 32, 4, 32, 128, 1),
    ),
    ("backward", 8): (
        _Tile(128, 32, 32, 16, 16, 64, 1),
        _Tile(512, 16, 32, 8, 32, 64, 1),
    ),
}


def simt_config(
    kernel: str, dtype: str, head_dim: int, head_dim_v: int, shared_limit: int
) -> SimtConfig:
    """The simt family's Config, whose shared memory fits; Unsupported where none does."""
    number = 8 if dtype == "float64" else 4
    rows = _SIMT[kernel, number]
    widest = max(row.widest for row in rows)
    if max(head_dim, head_dim_v) > widest:
        raise Unsupported(
            f"head_dim {head_dim} and head_dim_v {head_dim_v}: the GPU kernels hold a result in "
            f"registers and go up to {widest}; NumPy arrays (the CPU back end) have no such limit"
        )
    for row in rows:
        config = _config(kernel, dtype, head_dim, head_dim_v, row)
        blocks = row.blocks_per_sm * (config.shared_bytes + _RESERVED)
        if row.widest >= max(head_dim, head_dim_v) and blocks <= shared_limit + _RESERVED:
            return config
    raise Unsupported(
        f"head_dim {head_dim} and head_dim_v {head_dim_v} in {dtype} need {config.shared_bytes} "
        f"bytes of shared memory a block, this GPU has {shared_limit}"
    )


def widest_configs(limit: int) -> list[SimtConfig]:
    """Every row of the table that a GPU with this much shared memory is given, for each dtype."""
    configs = []
    for (kernel, number), rows in _SIMT.items():
        dtypes = ("float64",) if number == 8 else ("float32", "float16", "bfloat16")
        for width in sorted({row.widest for row in rows}):
            configs += [simt_config(kernel, dtype, width, width, limit) for dtype in dtypes]
    return configs


def _config(kernel: str, dtype: str, head_dim: int, head_dim_v: int, row: _Tile) -> SimtConfig:
    vector = 2 if dtype == "float64" else 4
    result = row.thread_columns * vector  # a chunk of a result is dealt out in vectors
    inner = result if kernel == "backward" else 2 * vector  # q and k are results in backward only
    return SimtConfig(
        kernel=kernel,
        dtype=dtype,
        head_dim=head_dim,
        head_dim_v=head_dim_v,
        block_q=row.block_q,
        block_k=row.block_k,
        thread_rows=row.thread_rows,
        thread_columns=row.thread_columns,
        chunk=_chunk(head_dim, row.chunk, inner),
        chunk_v=_chunk(head_dim_v, row.chunk, result),
        blocks_per_sm=row.blocks_per_sm,
    )


def _chunk(width: int, limit: int, step: int) -> int:
    """The width of equal chunks, each at most `limit` and a multiple of `step`."""
    chunks = math.ceil(width / limit)
    return math.ceil(width / (chunks * step)) * step
