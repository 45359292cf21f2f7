"""What one kernel file is compiled for: `Config`, and the numbers that every family shares."""

from __future__ import annotations

from dataclasses import asdict, dataclass

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


@dataclass(frozen=True)
class Config:
    """What one kernel file is compiled for. A field in upper case is the constant in CUDA.

    Each family adds its own fields, `shared_bytes` and `threads`.

    block_q, block_k : tokens of a tile of scores
    blocks_per_sm : blocks that an SM must be able to hold; it caps the registers of a thread
    """

    kernel: str  # "forward" or "backward": the file under kernels_cu/<family>
    dtype: str
    head_dim: int
    head_dim_v: int
    block_q: int
    block_k: int
    blocks_per_sm: int

    family = ""
    stays = False  # whether a block works one owned tile after the other

    @property
    def kernels(self) -> tuple[str, ...]:
        """The kernels that do the work, in their order."""
        return ("forward",) if self.kernel == "forward" else ("delta", "dk_dv", "dq")

    @property
    def tiles(self) -> dict[str, tuple[int, int]]:
        """Of the kernels that own tiles: queries and keys of a tile of scores."""
        if self.kernel == "forward":
            return {"forward": (self.block_q, self.block_k)}
        return {"dq": (self.block_q, self.block_k), "dk_dv": (self.block_k, self.block_q)}

    @property
    def rows_a_warp(self) -> dict[str, int]:
        """Of the kernels that own no tiles: queries that a warp does at a time."""
        return {"delta": 1}

    @property
    def threads(self) -> int:
        """Threads of a block."""
        raise NotImplementedError

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory of a block; the kernels assert that they lay out as much."""
        raise NotImplementedError

    @property
    def partial_numbers(self) -> int:
        """Numbers in the type of the sums that a block leaves of a tile that others share."""
        if self.kernel == "forward":  # o, maximum and sum
            return self.block_q * (self.head_dim_v + 2)
        own_k, own_q = self.tiles["dk_dv"][1], self.tiles.get("dq", (0, 0))[0]
        return max(own_k * (self.head_dim_v + self.head_dim), own_q * self.head_dim)

    def constants(self) -> dict[str, int]:
        """The constants of `struct Config`."""
        fields = {name: value for name, value in asdict(self).items() if isinstance(value, int)}
        tiles = self.tiles
        owned = tiles.get("forward") or tiles.get("dq") or (self.block_q, self.block_k)
        passing = tiles.get("dk_dv", owned)
        return {
            **fields,
            "own_q": owned[0],
            "stream_k": owned[1],
            "stream_q": passing[0],
            "own_k": passing[1],
            "threads": self.threads,
            "shared_bytes": self.shared_bytes,
            "partial_numbers": self.partial_numbers,
            "least_visits": LEAST_VISITS,
            "buckets": BUCKETS,
            "slices": SLICES,
        }


def shared_limit_of(arch: int) -> int:
    """Bytes of shared memory that a block may have; the least of the newer ones if unknown."""
    return _SHARED_LIMIT.get(arch, 101376)
