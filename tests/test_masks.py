"""Masks as expressions: values against plain definitions, bounds against enumeration."""

import numpy as np
import pytest
from cases import MASKS, NEEDS_KEYS, Case
from hypothesis import given, settings
from hypothesis import strategies as st

import cuflash
from cuflash.expr.bounds import TileMask
from cuflash.expr.expression import Expression
from cuflash.expr.nodes import apply, as_node
from cuflash.problem import Problem, make

SHAPES = [(100, 131), (131, 100), (1, 40), (64, 64), (40, 1)]
TILES = [(16, 16), (64, 32), (48, 100)]


class Described:
    """A shape and a dtype, which is all that `make` looks at."""

    def __init__(self, *shape: int, dtype: str = "float32") -> None:
        self.shape, self.dtype = shape, dtype


def problem_of(case: Case) -> Problem:
    q = Described(case.batch, case.seqlen_q, case.heads_q, case.head_dim)
    k = Described(case.batch, case.seqlen_k, case.heads_k, case.head_dim)
    v = Described(case.batch, case.seqlen_k, case.heads_k, case.head_dim_v)
    return make(q, k, v, **case.options())[0]


def tile_mask(problem: Problem, block_q: int, block_k: int) -> TileMask:
    assert problem.mask is not None
    arrays = [captured.array for captured in problem.mask.arrays]
    return TileMask(problem.mask, arrays, problem, block_q, block_k)


def check_states(mask: TileMask, full: np.ndarray, block_q: int, block_k: int) -> int:
    """Never and always must be right in every tile, seen from both sides; count of "perhaps"."""
    perhaps = 0
    batch, heads, seqlen_q, seqlen_k = full.shape
    for b in range(batch):
        for h in range(heads):
            for i, row in enumerate(range(0, seqlen_q, block_q)):
                states = mask.states(b, h, i)
                assert states.shape == (-(-seqlen_k // block_k),)
                for j, column in enumerate(range(0, seqlen_k, block_k)):
                    assert mask.states_k(b, h, j)[i] == states[j]
                    tile = full[b, h, row : row + block_q, column : column + block_k]
                    assert states[j] != 0 or not tile.any()
                    assert states[j] != 2 or tile.all()
                    perhaps += states[j] == 1
    return int(perhaps)


@pytest.mark.parametrize("name", [name for name in MASKS if name != "none"])
@pytest.mark.parametrize("shape", SHAPES)
def test_mask_of_the_table(name: str, shape: tuple[int, int]) -> None:
    if name in NEEDS_KEYS and shape[0] > shape[1]:
        pytest.skip("its arrays are indexed by q, which is negative with more queries than keys")
    case = Case(seqlen_q=shape[0], seqlen_k=shape[1], heads_q=2, heads_k=1, mask=name)
    problem = problem_of(case)
    for block_q, block_k in TILES:
        mask = tile_mask(problem, block_q, block_k)
        full = np.stack(
            [
                [mask.values(b, h, slice(0, shape[0]), slice(0, shape[1])) for h in range(2)]
                for b in range(2)
            ]
        )
        np.testing.assert_array_equal(full, case.allowed())
        check_states(mask, full, block_q, block_k)


@pytest.mark.parametrize("name", ["causal", "top-left", "window", "outside", "nothing"])
def test_bounds_of_bands_are_exact(name: str) -> None:
    case = Case(heads_q=1, heads_k=1, batch=1, mask=name)
    mask = tile_mask(problem_of(case), 16, 16)
    tiles = case.allowed()[0, 0]
    mixed = 0
    for row in range(0, case.seqlen_q, 16):
        for column in range(0, case.seqlen_k, 16):
            tile = tiles[row : row + 16, column : column + 16]
            mixed += bool(tile.any() and not tile.all())
    full = np.broadcast_to(case.allowed(), (1, 1, case.seqlen_q, case.seqlen_k))
    assert check_states(mask, full, 16, 16) == mixed


def test_a_nan_makes_no_comparison_certain() -> None:
    values = np.zeros(64)
    values[5] = np.nan
    for condition in (
        lambda b, h, q, k: values[k] < 1.0,
        lambda b, h, q, k: ~(values[k] >= 1.0),
        lambda b, h, q, k: values[k] == values[k],
        lambda b, h, q, k: values[q] * values[k] != 1.0,
    ):
        case = Case(seqlen_q=64, seqlen_k=64, batch=1, heads_q=1, heads_k=1)
        q = Described(1, 64, 1, 8)
        problem, _ = make(q, q, q, mask=cuflash.Mask(condition))
        mask = tile_mask(problem, 16, 16)
        full = mask.values(0, 0, slice(0, 64), slice(0, 64))[None, None]
        check_states(mask, full, 16, 16)
        assert case.pairs == full.shape


def test_masks_combine() -> None:
    near, causal = cuflash.SlidingWindow(5, 5), cuflash.Causal()
    q = Described(1, 30, 1, 8)
    rows, columns = np.arange(30)[:, None], np.arange(30)[None, :]
    for mask, wanted in (
        (near & causal, (abs(rows - columns) <= 5) & (columns <= rows)),
        (near | causal, (abs(rows - columns) <= 5) | (columns <= rows)),
        (~near & ~causal, (abs(rows - columns) > 5) & (columns > rows)),
    ):
        found = tile_mask(make(q, q, q, mask=mask)[0], 8, 8)
        np.testing.assert_array_equal(found.values(0, 0, slice(0, 30), slice(0, 30)), wanted)


def test_new_numbers_and_arrays_are_the_same_structure() -> None:
    q = Described(1, 30, 1, 8)

    def documents(ids: np.ndarray) -> cuflash.Mask:
        return cuflash.Mask(lambda b, h, q, k: ids[q] == ids[k])

    def key(**options: object) -> object:
        return make(q, q, q, **options)[0].key

    assert key(window=(3, 4)) == key(window=(9, 9))
    assert key(window=(3, None)) != key(window=(3, 4))
    assert key(mask=documents(np.zeros(30, int))) == key(mask=documents(np.ones(31, int)))
    assert key(mask=documents(np.zeros(30, int))) != key(mask=documents(np.zeros(30, np.int32)))


NUMBER = st.integers(-20, 20)
OPERATIONS = (
    "add", "subtract", "multiply", "floor_divide", "remainder", "minimum", "maximum", "absolute",
    "negative", "where",
)  # fmt: skip


@st.composite
def integers(draw: st.DrawFn, depth: int = 3) -> object:
    """A random integer expression of q, k, h and one captured array."""
    if depth == 0 or draw(st.booleans()):
        leaf = draw(st.sampled_from(["q", "k", "h", "number", "load"]))
        return (leaf, draw(NUMBER))
    op = draw(st.sampled_from(OPERATIONS))
    return (op, *(draw(integers(depth=depth - 1)) for _ in range(3)), draw(NUMBER))


def build(tree: tuple, b: object, h: object, q: object, k: object, array: np.ndarray) -> object:
    """The same tree for symbols and for NumPy arrays."""
    op, *rest = tree
    if op in ("q", "k", "h"):
        return {"q": q, "k": k, "h": h}[op]
    if op == "number":
        return as_node(rest[0]) if hasattr(q, "op") else rest[0]
    if op == "load":
        side = q if rest[0] % 2 else k
        index = side % 11 if rest[0] % 3 else abs(side) // 4 % 11
        return cuflash.captured(array)[index] if hasattr(q, "op") else array[index]
    x, y, z = (build(part, b, h, q, k, array) for part in rest[:3])
    number = rest[3] or 7
    if hasattr(q, "op"):
        if op == "where":
            return cuflash.where(as_node(x) < y, y, z)
        if op in ("floor_divide", "remainder"):
            return apply(op, x, number)
        return apply(op, x) if op in ("absolute", "negative") else apply(op, x, y)
    if op == "where":
        return np.where(np.less(x, y), y, z)
    if op in ("floor_divide", "remainder"):
        return getattr(np, op)(x, number)
    function = getattr(np, op)
    return function(x) if op in ("absolute", "negative") else function(x, y)


@settings(max_examples=150, deadline=None)
@given(integers(), integers(), st.sampled_from(["less", "equal", "not_equal", "greater_equal"]))
def test_random_expressions(left: tuple, right: tuple, comparison: str) -> None:
    array = np.random.default_rng(5).integers(-9, 9, 11)
    symbols = cuflash.Mask(
        lambda b, h, q, k: apply(
            comparison,
            build(left, b, h, q, k, array),
            build(right, b, h, q, k, array),
        )
    )
    expression = Expression(symbols.node)
    problem = Problem(1, 2, 1, 40, 50, 8, 8, "float32", 1.0, mask=expression, q_offset=10)
    mask = TileMask(expression, [c.array for c in expression.arrays], problem, 16, 16)
    q, k = np.arange(40)[:, None] + 10, np.arange(50)[None, :]
    full = np.empty((1, 2, 40, 50), bool)
    for h in range(2):
        wanted = getattr(np, comparison)(
            build(left, 0, h, q, k, array), build(right, 0, h, q, k, array)
        )
        full[0, h] = mask.values(0, h, slice(0, 40), slice(0, 50))
        np.testing.assert_array_equal(full[0, h], np.broadcast_to(wanted, (40, 50)))
    check_states(mask, full, 16, 16)
