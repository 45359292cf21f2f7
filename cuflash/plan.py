"""Which kernel computes a problem: families, their tables of tiles, the choice and its reasons."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import NamedTuple

from cuflash.errors import Unsupported
from cuflash.family import FAMILIES
from cuflash.problem import Problem

OLDEST_ARCH = 75
# Bytes of shared memory that a block may have, by compute capability (CUDA C++ guide, appendix).
_SHARED_LIMIT = {
    75: 65536, 80: 166912, 86: 101376, 87: 166912, 89: 101376, 90: 232448, 100: 232448,
    103: 232448, 110: 232448, 120: 101376, 121: 101376,
}  # fmt: skip
# Splitting of owned tiles (kernels_cu/order.cuh). More slots make segments more even and cost
# workspace; in the model of tests/test_kernels_order.py the last block ends within 1 % of the dense
# time after an even share.
LEAST_VISITS = 32  # tiles of scores in a segment, so that starting and combining do not count
SLOTS = 4  # segments' results in the workspace, a block that the GPU holds at a time
BUCKETS = 64  # lengths that the order tells apart
SLICES = 64  # of the tiles that pass, which a walk leaves out where they hold no visit

_RESERVED = 1024  # bytes of shared memory that the system takes from each block


@dataclass(frozen=True)
class Config:
    """What one kernel file is compiled for. A field in upper case is the constant in CUDA.

    block_q, block_k : tokens of a tile of scores; the kernel of dk and dv, which owns keys and has
        queries pass, swaps the two
    thread_rows, thread_columns : the grid that the threads of a block form
    chunk, chunk_v : numbers of a head dimension (of q and k, of v and o) in shared memory at a time
    blocks_per_sm : blocks that an SM must be able to hold; it caps the registers of a thread
    """

    family: str
    kernel: str  # "forward" or "backward": the file under kernels_cu/<family>
    dtype: str
    head_dim: int
    head_dim_v: int
    block_q: int
    block_k: int
    thread_rows: int
    thread_columns: int
    chunk: int
    chunk_v: int
    blocks_per_sm: int

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

    @property
    def partial_numbers(self) -> int:
        """Numbers in the type of the sums that a block leaves of a tile that others share."""
        row = 2 if self.kernel == "forward" else self.head_dim  # maximum and sum, or dk beside dv
        return self.block_q * (self.head_dim_v + row)

    def constants(self) -> dict[str, int]:
        """The constants of `struct Config`."""
        fields = {name: value for name, value in asdict(self).items() if isinstance(value, int)}
        return {
            **fields,
            "shared_bytes": self.shared_bytes,
            "partial_numbers": self.partial_numbers,
            "least_visits": LEAST_VISITS,
            "buckets": BUCKETS,
            "slices": SLICES,
        }


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


@dataclass(frozen=True)
class Plan:
    """How one pass of a problem is computed on one kind of device.

    reasons : a line for each faster family: why it was not taken
    """

    config: Config
    reasons: tuple[str, ...] = ()


def choose(
    problem: Problem, kernel: str, arch: int, shared_limit: int | None = None,
    family: str | None = None,
) -> Plan:  # fmt: skip
    """The plan for a GPU of compute capability `arch` (90 is 9.0).

    Parameters
    ----------
    kernel : "forward" or "backward"
    shared_limit : bytes of shared memory that a block may have; None looks the arch up
    family : force this family, or None

    Raises
    ------
    Unsupported : no kernel takes this head dimension, dtype or GPU; the message names the limit
    """
    if family is not None and family not in FAMILIES:
        raise ValueError(f"family must be one of {FAMILIES}, got {family!r}")
    if arch < OLDEST_ARCH:
        raise Unsupported(
            f"GPU kernels need compute capability 7.5 or newer, this GPU has {arch / 10}"
        )
    limit = shared_limit_of(arch) if shared_limit is None else shared_limit
    return Plan(simt_config(kernel, problem.dtype, problem.head_dim, problem.head_dim_v, limit))


def simt_config(
    kernel: str, dtype: str, head_dim: int, head_dim_v: int, shared_limit: int
) -> Config:
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


def shared_limit_of(arch: int) -> int:
    """Bytes of shared memory that a block may have; the least of the newer ones if unknown."""
    return _SHARED_LIMIT.get(arch, 101376)


def configs_for(arch: int) -> list[Config]:
    """Every row of the tables that a GPU of this arch is given, for each dtype, at its widest."""
    limit = shared_limit_of(arch)
    configs = []
    for (kernel, number), rows in _SIMT.items():
        dtypes = ("float64",) if number == 8 else ("float32", "float16", "bfloat16")
        for width in sorted({row.widest for row in rows}):
            configs += [simt_config(kernel, dtype, width, width, limit) for dtype in dtypes]
    return configs


def _config(kernel: str, dtype: str, head_dim: int, head_dim_v: int, row: _Tile) -> Config:
    vector = 2 if dtype == "float64" else 4
    result = row.thread_columns * vector  # a chunk of a result is dealt out in vectors
    inner = result if kernel == "backward" else 2 * vector  # q and k are results in backward only
    return Config(
        family="simt",
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
