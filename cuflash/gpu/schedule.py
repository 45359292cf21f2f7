"""What a pass launches, in order, and the work lists of uneven masks: the host's half of order.cuh.

A mask whose owned tiles differ in length is worked longest first, and tiles of very many visits are
split among blocks (`kernels_cu/order.cuh` says how). The host knows no length: it reserves room for
a list of any lengths, and launches blocks for the longest one; blocks beyond the list end at once.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, NamedTuple

from cuflash.config import BUCKETS, LEAST_VISITS, SLOTS, Config
from cuflash.problem import Problem
from cuflash.sm90 import ROWS_STEP

if TYPE_CHECKING:
    from cuflash.expr.text import CallText

_LISTS = {"forward": "order_q", "dq": "order_q", "dk_dv": "order_k"}  # of kernels that own tiles

_MAX_GRID = 2**31 - 1  # blocks of a one-dimensional grid; kernels loop over what is left
_TABULATE_THREADS = 128
_CACHE = 32 << 20  # bytes of L2 that keys and values may count on; an H200 has 50 MB


class Step(NamedTuple):
    """One launch."""

    kernel: str
    grid: int
    threads: int
    shared_bytes: int


@dataclass(frozen=True)
class WorkList:
    """The size of one list of order.cuh.

    rows : owned tiles that the mask tells apart
    copies : batch items and heads that one row stands for
    slots : results of segments that fit in, a copy; the lists of a pass take turns with them
    """

    rows: int
    copies: int
    slots: int

    @property
    def words(self) -> int:
        """Its 8-byte words: two counts, visits and slices, segments, splits."""
        return 2 + 2 * self.rows + 4 * (self.rows + self.slots) + 3 * (self.slots // 2)

    @property
    def blocks(self) -> int:
        """Segments of all copies, at most."""
        return (self.rows + self.slots) * self.copies


def parts(config: Config, text: CallText | None, deterministic: bool) -> dict[str, list[str]]:
    """The kernels of a text by the part that holds them; parts are compiled side by side."""
    of_kernel = {"dk_dv": "DK_DV", "greatest": "GREATEST", "tabulate": "TABLES"}
    of_kernel |= {"count": "ORDER", "arrange": "ORDER"}
    of_kernel |= dict.fromkeys(map(_combine, _LISTS), "COMBINE")
    result: dict[str, list[str]] = {}
    for name in kernels(config, text, deterministic):
        result.setdefault(of_kernel.get(name, "MAIN"), []).append(name)
    return result


def kernels(config: Config, text: CallText | None, deterministic: bool) -> tuple[str, ...]:
    """Every kernel in a text; all are loaded, some problems launch fewer."""
    names = config.kernels
    if text is not None:
        names += ("tabulate",) * bool(text.tables)
        if text.has_order:
            names += ("count", "arrange", *map(_combine, config.tiles))
        if config.kernel == "backward":
            names += ("clear", "store_params") * bool(text.params)
            names += ("greatest",) * (bool(text.params) and deterministic)
            names += ("dsink",) * text.has_dsink
    return names


def steps(config: Config, problem: Problem, text: CallText | None, blocks: int) -> list[Step]:
    """The launches of a pass; those with nothing to do are left out.

    blocks : that the GPU holds at a time
    """
    result: list[Step] = []

    def add(kernel: str, grid: int, threads: int = config.threads, shared: int = 0) -> None:
        if grid > 0:
            result.append(Step(kernel, min(grid, _MAX_GRID), threads, shared))

    if text is not None and text.tables:
        entries = text.table_elements(problem) // 2
        grid = min(max(1, -(-entries // _TABULATE_THREADS)), 1024)
        add("tabulate", grid, _TABULATE_THREADS)
    has_params = text is not None and bool(text.params) and config.kernel == "backward"
    if has_params:
        add("clear", min(-(-param_elements(problem) // config.threads) + 1, 1024))
    lists, warps = work_lists(config, problem, text, blocks), config.threads // 32
    if lists:
        add("count", max(each.rows for each in lists.values()))
        add("arrange", -(-BUCKETS // warps))
    owned = _owned_tiles(config, problem)
    for kernel in config.kernels:
        if kernel not in config.tiles:
            rows = problem.batch * problem.heads_q * rows_of_head(config, problem)
            add(kernel, -(-rows // (warps * config.rows_a_warp[kernel])))
            continue
        name = _LISTS[kernel]
        grid = lists[name].blocks if name in lists else prod(owned[name][:2])
        if config.stays:
            grid = min(grid, blocks)
        if kernel == "dq" and has_params and problem.deterministic:
            add("greatest", grid, shared=config.shared_bytes)
        add(kernel, grid, shared=config.shared_bytes)
        if name in lists:
            splits = lists[name].slots // 2 * lists[name].copies
            tokens = splits * config.tiles[kernel][kernel == "dk_dv"]
            add(_combine(kernel), min(-(-tokens // warps), 4 * blocks))
    if has_params:
        add("store_params", min(-(-param_elements(problem) // config.threads) + 1, 1024))
    if text is not None and text.has_dsink and config.kernel == "backward":
        add("dsink", -(-problem.heads_q // warps))
    return result


def param_elements(problem: Problem) -> int:
    """Elements of all Params of the score together."""
    return 0 if problem.score is None else sum(prod(each.shape) for each in problem.score.params)


def heads_at_a_time(problem: Problem) -> int:
    """Query heads whose keys and values fit into the L2 cache together, 1 at least."""
    number = {"float64": 8, "float32": 4}.get(problem.dtype, 2)
    head = problem.seqlen_k * (problem.head_dim + problem.head_dim_v) * number
    return max(1, _CACHE // max(head, 1)) * (problem.heads_q // max(problem.heads_k, 1))


def workspaces(
    config: Config, problem: Problem, text: CallText | None, blocks: int
) -> list[tuple[str, tuple[int, ...], str]]:
    """Name, shape and dtype of the lists, of the results of segments, of sums for Params."""
    lists = work_lists(config, problem, text, blocks)
    specs: list[tuple[str, tuple[int, ...], str]] = [
        (name, (each.words,), "int64") for name, each in lists.items()
    ]
    most = max(heads * tiles for heads, tiles, _ in _owned_tiles(config, problem).values())
    if config.stays and (lists or most > blocks):
        specs.append(("turns", (3,), "int64"))
    if text is not None and text.params and config.kernel == "backward":
        elements = max(1, param_elements(problem))
        dtype = "int64" if problem.deterministic else problem.accumulation
        specs.append(("sums", (elements,), dtype))
        if problem.deterministic:
            specs.append(("maxima", (len(text.params),), "int64"))
    slots = max((each.slots * each.copies for each in lists.values()), default=0)
    if slots:
        specs.append(("partials", (slots, config.partial_numbers), problem.accumulation))
    return specs


def work_lists(
    config: Config, problem: Problem, text: CallText | None, blocks: int
) -> dict[str, WorkList]:
    """The lists of a pass, by the field of `struct Params`; none where one changes nothing."""
    owned = _owned_tiles(config, problem)
    if text is None or not text.has_order or not all(heads * n for heads, n, _ in owned.values()):
        return {}
    # of a tile, no more segments than of the least length, and two at least
    useful = max(
        heads * tiles * (visits // LEAST_VISITS if visits >= 2 * LEAST_VISITS else 0)
        for heads, tiles, visits in owned.values()
    )
    slots = min(SLOTS * blocks, useful)
    if not slots and all(heads * tiles <= blocks for heads, tiles, _ in owned.values()):
        return {}  # all tiles are worked at the same time
    result = {}
    for name, (heads, tiles, _) in owned.items():
        own_heads = heads // problem.batch if text.by_head else 1
        planes = own_heads * (problem.batch if text.by_batch else 1)
        copies = heads // planes
        result[name] = WorkList(planes * tiles, copies, slots // copies)
    return result


def rows_of_head(config: Config, problem: Problem) -> int:
    """Queries of a head for which a backward pass has numbers: padded where a copy takes a tile."""
    step = ROWS_STEP if config.family == "sm90" else 1
    return -(-problem.seqlen_q // step) * step


def _combine(kernel: str) -> str:
    """The kernel that adds the segments of the tiles that `kernel` owns."""
    return "combine" if kernel == "forward" else f"combine_{kernel}"


def _owned_tiles(config: Config, problem: Problem) -> dict[str, tuple[int, int, int]]:
    """By list: heads that own tiles, tiles of each, visits of one tile at most."""
    result = {}
    for kernel, (block_q, block_k) in config.tiles.items():
        tiles_q, tiles_k = -(-problem.seqlen_q // block_q), -(-problem.seqlen_k // block_k)
        if kernel == "dk_dv":
            visits = tiles_q * (problem.heads_q // max(problem.heads_k, 1))
            result["order_k"] = problem.batch * problem.heads_k, tiles_k, visits
        else:
            result["order_q"] = problem.batch * problem.heads_q, tiles_q, tiles_k
    return result
