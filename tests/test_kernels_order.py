"""Work lists of uneven masks (kernels_cu/order.cuh): what is in them, that results do not depend on
how tiles are cut, and what the order is worth; on a CPU by the emulator (no GPU needed).

Longer than other files, for the model of a GPU's schedule at its end.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import pytest
from cases import MASKS, Case, MaskCase, logical
from test_kernels_cpu import cast, check, emulator, problem_of, run

import cuflash
from cuflash import config as constants
from cuflash import simt
from cuflash.config import Config, shared_limit_of
from cuflash.expr.bounds import TileMask
from cuflash.gpu import launch, schedule
from cuflash.problem import Problem, make

needs_compiler = pytest.mark.skipif(
    emulator.compiler() is None, reason="g++ is not installed: the emulator needs it"
)

LONG = Case(seqlen_q=140, seqlen_k=201, batch=1, heads_q=4, heads_k=2, head_dim=16, head_dim_v=24)
BANDS = ("causal", "top-left", "window", "window-left")


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    """A segment may be a single visit: small problems are split as large ones are."""
    monkeypatch.setattr(constants, "LEAST_VISITS", 1)
    monkeypatch.setattr(schedule, "LEAST_VISITS", 1)


class Entry(NamedTuple):
    """One segment of a list."""

    row: int
    slot: int
    skip: int
    left: int
    slices: int


def unpack(words: np.ndarray, size: schedule.WorkList) -> tuple[list[int], list[Entry], list[Any]]:
    """Visits of rows, segments, splits of a list as the kernels leave it."""
    visits = words[2 : 2 + size.rows]
    at = 2 + 2 * size.rows
    segments = [
        Entry(int(row), int(slot), int(pair & 0xFFFFFFFF), int(pair >> 32), int(slices))
        for row, slot, pair, slices in words[at : at + 4 * words[0]].reshape(-1, 4)
    ]
    at += 4 * (size.rows + size.slots)
    return visits.tolist(), segments, words[at : at + 3 * words[1]].reshape(-1, 3).tolist()


def expected_visits(problem: Problem, config: Config, name: str) -> list[int]:
    """Visits of each row of a list, by the mask on NumPy."""
    return [len(tiles) for tiles in expected_tiles(problem, config, name)]


def expected_tiles(problem: Problem, config: Config, name: str) -> list[list[int]]:
    """The passing tiles that each row of a list visits, of all members of its group."""
    mask = problem.mask
    assert mask is not None
    arrays = [captured.array for captured in mask.arrays]
    tile = config.block_q, config.block_k
    by_q = name == "order_q"
    states = TileMask(mask, arrays, problem, *(tile if by_q else tile[::-1]))
    group = 1 if by_q else problem.heads_q // problem.heads_k
    heads = problem.heads_q // group
    tiles = -(-(problem.seqlen_q if by_q else problem.seqlen_k) // config.block_q)
    ask = states.states if by_q else states.states_k
    return [
        [
            int(at)
            for member in range(group)
            for at in np.flatnonzero(ask(b, head * group + member, tile))
        ]
        for b in range(problem.batch if states.depends_on_batch else 1)
        for head in range(heads if states.depends_on_head else 1)
        for tile in range(tiles)
    ]


@needs_compiler
@pytest.mark.parametrize(
    ("name", "blocks"), [("documents-causal", 1), ("by-head", 6), ("array-empty-rows", 6)]
)
def test_the_list(tiny: None, name: str, blocks: int) -> None:
    """Every visit of every tile once, longest first, no more slots than there are."""
    case = replace(LONG, mask=name, batch=2)
    check_lists(case, blocks)


def check_lists(case: Case, blocks: int) -> None:
    arrays = cast(case, case.inputs())
    problem, text = problem_of(case, arrays), launch.call_text(problem_of(case, arrays))
    kept: dict[str, np.ndarray] = {}
    check(case, arrays, blocks=blocks, keep=kept)
    for kernel in ("forward", "backward"):
        dims = case.head_dim, case.head_dim_v
        config = simt.simt_config(kernel, "float32", *dims, shared_limit_of(90))
        sizes = schedule.work_lists(config, problem, text, blocks)
        assert sizes
        for order, size in sizes.items():
            words = kept[f"{kernel} {order}"]
            assert words.size == size.words
            tiles = expected_tiles(problem, config, order)
            check_list(words, size, tiles, problem, config.block_k)


def check_list(
    words: np.ndarray, size: schedule.WorkList, tiles: list[list[int]], problem: Problem, block: int
) -> None:
    visits, segments, splits = unpack(words, size)
    assert visits == [len(each) for each in tiles]
    of_row: dict[int, list[Entry]] = {row: [] for row in range(size.rows)}
    for segment in segments:
        of_row[segment.row].append(segment)
    slots = []
    for row, parts in of_row.items():
        ends = np.cumsum([0, *(part.left for part in parts)]).tolist()
        assert [part.skip for part in parts] == ends[:-1] and ends[-1] == visits[row]
        used = [part.slot for part in parts if part.slot >= 0]
        if used:
            assert used == list(range(used[0], used[0] + len(parts)))
            assert [row, used[0], len(used)] in splits
        else:
            assert len(parts) == 1
        slots += used
        passing = -(-max(problem.seqlen_q, problem.seqlen_k) // block)
        width = 32 * -(-passing // (32 * constants.SLICES))
        held = {1 << at // width for at in tiles[row]}
        assert all(part.slices & 2**constants.SLICES - 1 == sum(held) for part in parts)
    assert len(set(slots)) == len(slots) <= size.slots
    assert sum(count for *_, count in splits) == len(slots)
    lengths = [segment.left for segment in segments]
    coarse = max(lengths) / constants.BUCKETS + 1
    assert all(a >= b - coarse for a, b in itertools.pairwise(lengths))


@needs_compiler
@pytest.mark.parametrize(("slices", "lengths"), [(3, (40, 9000)), (64, (9000, 40))])
def test_slices(
    tiny: None, monkeypatch: pytest.MonkeyPatch, slices: int, lengths: tuple[int, int]
) -> None:
    """Tiles far apart: a walk leaves out what lies between, in one test of 32 tiles or several."""
    monkeypatch.setattr(constants, "SLICES", slices)
    far = cuflash.Mask(lambda b, h, q, k: (q - k) % 8900 < 30)
    mask = MaskCase(lambda *_: {"mask": far}, lambda case: np.subtract(*logical(case)) % 8900 < 30)
    monkeypatch.setitem(MASKS, "far", mask)
    case = Case(*lengths, batch=1, heads_q=2, heads_k=1, mask="far")
    check_lists(case, 4)
    with pytest.raises(AssertionError, match="are wrong"):  # a walk that leaves out the last ones
        check(case, edit=lambda text: text.replace("first_ = rest == 0", "first_ = true"))


@needs_compiler
@pytest.mark.parametrize("name", ["outside", "by-head", "array", "array-empty-rows", "prefix",
                                  "local-global", "positions-global"])  # fmt: skip
def test_split_tiles_give_the_same(tiny: None, name: str) -> None:
    """In both passes, with tiles in as many segments as the slots allow."""
    kept: dict[str, np.ndarray] = {}
    check(replace(LONG, mask=name), keep=kept, blocks=8)
    assert all(kept[key][1] > 0 for key in kept if "order" in key)


@needs_compiler
@pytest.mark.parametrize(
    "change",
    [{"seqlen_q": 1}, {"seqlen_k": 65, "seqlen_q": 257}, {"heads_q": 6, "heads_k": 2, "batch": 2},
     {"dtype": "float64", "heads_q": 1, "heads_k": 1},
     {"dtype": "bfloat16", "head_dim": 130, "heads_q": 1, "heads_k": 1}, {"seqlen_k": 0}],
    ids=str,
)  # fmt: skip
def test_sizes(tiny: None, change: Mapping[str, Any]) -> None:
    case = replace(LONG, mask="by-head", **change)
    if case.seqlen_k:
        check(case, blocks=7)
    else:
        results = run(case, cast(case, case.inputs()), blocks=7)
        assert np.all(results["lse"] == -np.inf) and np.all(results["o"] == 0)


@needs_compiler
def test_repeats_are_equal_to_the_bit(tiny: None) -> None:
    """Whatever the number of blocks launched, and the order of threads."""
    case = replace(LONG, mask="documents-causal")
    arrays = cast(case, case.inputs())
    first = run(case, arrays, blocks=9)
    grids: tuple[Callable[[int], int], ...] = (lambda grid: grid, lambda grid: 1)
    for grid in grids:
        again = run(case, arrays, blocks=9, grid=grid, reverse=grid(2) == 1)
        assert all(np.array_equal(first[name], again[name]) for name in first)


@needs_compiler
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_masked_values_reach_nothing(tiny: None, value: float) -> None:
    """Keys that no query sees, in segments whose other keys are seen."""
    case = replace(LONG, mask="array-keys")
    arrays = cast(case, case.inputs())
    right = check(case, arrays, blocks=9)
    unseen = ~case.allowed()[0, 0].any(axis=0)
    for name in "kv":
        arrays[name] = arrays[name].copy()
        arrays[name][:, unseen] = value
    dirty = run(case, arrays, blocks=9)
    for name, array in right.items():
        np.testing.assert_allclose(dirty[name], array, rtol=2e-5, atol=2e-5)


@needs_compiler
def test_nan_in_an_attended_pair_propagates(tiny: None) -> None:
    case = replace(LONG, mask="prefix", seqlen_k=140)
    arrays = cast(case, case.inputs())
    arrays["v"][0, 40, 0, 3] = np.nan
    arrays["k"][0, 50, 1, 2] = np.nan
    results = run(case, arrays, blocks=9)
    rows = np.arange(140)
    assert np.array_equal(np.isnan(results["o"][0, :, :2, 3]), np.stack([rows >= 40] * 2, 1))
    assert np.array_equal(np.isnan(results["lse"][0, 2]), rows >= 50)
    assert not np.isnan(results["o"][0, :, :2, :3]).any()
    assert np.isnan(results["dq"][0, rows >= 40, 0]).all()
    assert not np.isnan(results["dq"][0, rows < 40]).any()


@needs_compiler
def test_large_logits(tiny: None) -> None:
    """The maxima of segments differ by less than one step of their lse: the merge is exact."""
    case = replace(LONG, mask="documents-1d", head_dim=64, head_dim_v=64)
    arrays = cast(case, {name: np.full_like(array, 133120.0)
                         for name, array in case.inputs().items() if name in "qkv"})  # fmt: skip
    results = run(case, arrays, blocks=9)
    np.testing.assert_allclose(results["o"], 133120, rtol=2e-7)
    np.testing.assert_allclose(results["lse"], 133120.0**2 * 8, rtol=1e-6)


MUTANTS = [
    ("starts each segment at the first visit", "visits_.skip > 0; --visits_.skip", "false;"),
    ("lets a segment run to the end", "if (visits_.left == 0) return false;", ";"),
    ("forgets the maxima of segments", "part.row_sum * row.weigh(part.row_max)", "part.row_sum"),
    ("takes another copy's slot", "slot * copies + copy", "slot * copies"),
    ("leaves out the last segment", "split.slot * list.copies + copy, list.copies, split.segments",
     "split.slot * list.copies + copy, list.copies, split.segments - 1"),
    ("trusts a bad segment", "if (is_bad) row[i].row_sum =", "if (false) row[i].row_sum ="),
]  # fmt: skip


@needs_compiler
@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant[0])
def test_a_wrong_kernel_fails(tiny: None, mutant: tuple[str, str, str]) -> None:
    """The checks above see a kernel that is wrong by one line."""
    name, old, new = mutant
    case = replace(LONG, mask="documents-1d")
    arrays = cast(case, {each: array for each, array in case.inputs().items() if each in "qkv"})
    arrays["q"] *= 4  # so that maxima differ
    if name == "trusts a bad segment":
        arrays["v"][:, 23:46] = np.nan  # a document of its own
    seen: list[bool] = []

    def edit(text: str) -> str:
        seen.append(old in text)
        return text.replace(old, new)

    right = run(case, arrays, blocks=9)
    wrong = run(case, arrays, blocks=9, edit=edit)
    assert any(seen), "the line is not in the kernels any more"
    assert not all(np.allclose(wrong[n], right[n], 1e-4, 1e-4, equal_nan=True) for n in right)


def test_which_masks_have_a_list() -> None:
    for name in MASKS:
        case = Case(mask=name)
        text = launch.call_text(problem_of(case, case.inputs()))
        assert (text is not None and text.has_order) == (name not in (*BANDS, "none")), name
    for window in ((3, None), (None, 3)):
        mask = cuflash.SlidingWindow(*window)
        case = Case()
        text = launch.call_text(_problem(case.seqlen_q, 1, {"mask": mask}))
        assert text is not None and text.has_order == (window[1] is None)


def _problem(seqlen: int, heads: int, options: Mapping[str, Any]) -> Problem:
    class Shape:
        shape, dtype = (1, seqlen, heads, 64), "float32"

    return make(Shape(), Shape(), Shape(), **options)[0]


def test_what_is_reserved() -> None:
    """A list is O(N); results of segments are bounded; small and even problems have neither."""
    blocks = 132 * 2
    flags = np.arange(100_000) < 1000
    local = cuflash.SlidingWindow(512, 512) | cuflash.GlobalTokens(flags)
    for kernel in ("forward", "backward"):
        config = simt.simt_config(kernel, "float32", 64, 64, shared_limit_of(90))
        problem = _problem(100_000, 2, {"mask": local})
        specs = dict((name, shape) for name, shape, _ in launch.workspaces(config, problem, blocks))
        slots, numbers = specs["partials"]
        assert slots <= constants.SLOTS * blocks and slots * numbers * 4 < 40e6
        assert specs["order_q"][0] < 10 * (100_000 // config.block_q + constants.SLOTS * blocks)
        for n, heads, options in (
            (16384, 16, {"causal": True}), (16384, 16, {"window": (1024, 0)}), (16384, 16, {}),
            (1024, 1, {"mask": cuflash.BlockLocal(100)}),
        ):  # fmt: skip
            names = [
                each for each, *_ in launch.workspaces(config, _problem(n, heads, options), blocks)
            ]
            assert set(names) <= {"delta"}, options


def makespan(visits: list[int], copies: int, blocks: int, in_order: bool, cost: float) -> float:
    """When the last block is done, in visits, by the rules of order.cuh; `cost` of a segment."""
    slots = constants.SLOTS * blocks // copies if in_order else 0
    unit = max(constants.LEAST_VISITS, -(-sum(visits) // max(slots, 1)))
    segments = []
    for count in visits:
        pieces = count // unit if slots and count >= 2 * unit else 1
        segments += [count * (n + 1) // pieces - count * n // pieces for n in range(pieces)]
    if in_order:
        step = max(segments) / (constants.BUCKETS - 1) or 1
        segments.sort(key=lambda count: -int(count / step))
    done = [0.0] * blocks
    for count in segments:
        for _ in range(copies):
            heapq.heapreplace(done, done[0] + count + cost)
    return max(done)


def model(
    seqlen: int, heads: int, options: Mapping[str, Any], kernel: str, in_order: bool | None = None
) -> dict[str, tuple[float, float]]:
    """Of each list (share of tiles, share of the dense time) on 132 SMs of 2 blocks.

    A segment costs a visit more (its own loads and stores), and a list 8 visits (three launches).
    """
    problem, blocks = _problem(seqlen, heads, options), 132 * 2
    config = simt.simt_config(kernel, "float32", 64, 64, shared_limit_of(90))
    text = launch.call_text(problem)
    assert text is not None
    result = {}
    for name in ("order_q", "order_k")[: 1 if kernel == "forward" else 2]:
        visits = expected_visits(problem, config, name)
        ordered = text.has_order if in_order is None else in_order
        if not ordered and name == "order_q":
            visits = visits[::-1]
        passing = -(-seqlen // config.block_k)
        dense = makespan([passing] * len(visits), heads, blocks, False, 1)
        time = makespan(visits, heads, blocks, ordered, 1) + 8 * ordered
        result[name] = sum(visits) / (passing * len(visits)), time / dense
    return result


def documents() -> dict[str, Any]:
    ends = np.cumsum(np.random.default_rng(0).integers(1024, 4096, 64))
    ids = np.searchsorted(ends, np.arange(32768), side="right").astype(np.int32)
    return {"mask": cuflash.Documents(ids), "causal": True}


def globals_first() -> dict[str, Any]:
    flags = np.zeros(100_000, bool)
    flags[50::100] = True
    order = cuflash.order.first(np.flatnonzero(flags), 100_000)
    near = cuflash.SlidingWindow(512, 512)
    return {"mask": near | cuflash.GlobalTokens(flags), "positions": order.positions}


def neighborhood() -> dict[str, Any]:
    order = cuflash.order.tiles((64,) * 3, (4, 4, 8))
    return {"mask": cuflash.Neighborhood((64,) * 3, 7), "positions": order.positions}


ACCEPTANCE = {
    "causal": (16384, 16, lambda: {"causal": True}),
    "window": (16384, 16, lambda: {"window": (1024, 0)}),
    "documents": (32768, 8, documents),
    "prefix": (16384, 16, lambda: {"mask": cuflash.PrefixLM(4096)}),
    "global first": (100_000, 2, globals_first),
    "neighbourhood": (64**3, 1, neighborhood),
}


@pytest.mark.parametrize("name", ACCEPTANCE)
@pytest.mark.parametrize("kernel", ["forward", "backward"])
def test_time_follows_the_tiles(name: str, kernel: str) -> None:
    """A mask that keeps a share f of the tiles takes at most f + 0.05 of the dense time."""
    seqlen, heads, options = ACCEPTANCE[name]
    for order, (kept, time) in model(seqlen, heads, options(), kernel).items():
        print(f"{name} {kernel} {order}: f {kept:.4f}, time {time:.4f}")
        assert time <= kept + 0.02


def test_without_a_list_global_rows_are_a_tail() -> None:
    kept, time = model(100_000, 2, globals_first(), "forward", in_order=False)["order_q"]
    assert time > kept + 0.05
