"""Orders of tokens: permutations that undo, and that make sparse masks dense in tiles."""

import numpy as np
import pytest
from test_masks import Described, check_states, tile_mask

import cuflash
from cuflash.problem import make


def share_computed(n: int, tile: int, **options: object) -> tuple[float, np.ndarray]:
    """The share of tiles that is not skipped, and the mask itself."""
    q = Described(1, n, 1, 8)
    mask = tile_mask(make(q, q, q, **options)[0], tile, tile)
    full = mask.values(0, 0, slice(0, n), slice(0, n))[None, None]
    check_states(mask, full, tile, tile)
    count = -(-n // tile)
    return sum((mask.states(0, 0, i) > 0).sum() for i in range(count)) / count**2, full[0, 0]


def test_apply_and_undo() -> None:
    order = cuflash.order.tiles((4, 6), (2, 3))
    assert sorted(order.positions) == list(range(24))
    assert list(order.positions[:6]) == [0, 1, 2, 6, 7, 8]
    x = np.random.default_rng(0).standard_normal((2, 24, 3, 5))
    np.testing.assert_array_equal(order.apply(x), x[:, order.positions])
    np.testing.assert_array_equal(order.undo(order.apply(x)), x)
    np.testing.assert_array_equal(order.undo(order.apply(x[0]), axis=0), x[0])
    torch = pytest.importorskip("torch")
    t = torch.from_numpy(x)
    assert torch.equal(order.undo(order.apply(t)), t)


def test_first() -> None:
    order = cuflash.order.first([7, 2], 10)
    assert list(order.positions) == [7, 2, 0, 1, 3, 4, 5, 6, 8, 9]


def test_global_tokens_first_fill_few_tiles() -> None:
    n, flags = 1024, np.zeros(1024, bool)
    flags[5::32] = True
    options = {"mask": cuflash.SlidingWindow(16, 16) | cuflash.GlobalTokens(flags)}
    native, mask = share_computed(n, 32, **options)
    order = cuflash.order.first(np.flatnonzero(flags), n)
    put_first, moved = share_computed(n, 32, **options, positions=order.positions)
    np.testing.assert_array_equal(moved, mask[order.positions][:, order.positions])
    assert native == 1.0
    assert put_first < 0.2


def test_bounds_of_a_grid_in_tiles_are_exact() -> None:
    shape = (8, 8, 32)
    options = {"mask": cuflash.Neighborhood(shape, (5, 3, 7))}
    order = cuflash.order.tiles(shape, (4, 4, 4))
    native, mask = share_computed(2048, 64, **options)
    tiled, moved = share_computed(2048, 64, **options, positions=order.positions)
    np.testing.assert_array_equal(moved, mask[order.positions][:, order.positions])
    assert tiled == moved.reshape(32, 64, 32, 64).any(axis=(1, 3)).mean()
    assert tiled < native


def test_attention_in_another_order_is_the_same() -> None:
    rng = np.random.default_rng(1)
    q, k, v = (rng.standard_normal((2, 96, 2, 8)) for _ in range(3))
    order = cuflash.order.tiles((8, 12), (4, 4))
    options = {"mask": cuflash.Neighborhood((8, 12), (3, 5))}
    wanted = cuflash.attention(q, k, v, **options)
    moved = (order.apply(x) for x in (q, k, v))
    found = cuflash.attention(*moved, **options, positions=order.positions)
    np.testing.assert_allclose(order.undo(found), wanted, rtol=1e-12, atol=1e-14)


ERRORS = [
    ({"positions": (np.arange(6),)}, TypeError, "a pair (pos_q, pos_k)"),
    ({"positions": 3}, TypeError, "positions must hold integer arrays, got int"),
    ({"positions": np.zeros(6)}, TypeError, "positions must be integers, got float64"),
    ({"positions": np.arange(7)}, ValueError, "positions of q must have shape (6,) or (2, 6)"),
    ({"positions": np.arange(6), "causal": "top-left"}, ValueError, "got 'top-left'"),
]


@pytest.mark.parametrize(("options", "kind", "message"), ERRORS)
def test_errors(options: dict, kind: type[Exception], message: str) -> None:
    q = np.zeros((2, 6, 1, 8), np.float32)
    with pytest.raises(kind) as error:
        cuflash.attention(q, q, q, **options)
    assert message in str(error.value)


def test_errors_of_orders() -> None:
    with pytest.raises(ValueError, match="tile must have an axis"):
        cuflash.order.tiles((4, 4), (2,))
    with pytest.raises(ValueError, match="indices must lie in"):
        cuflash.order.first([10], 10)
    with pytest.raises(ValueError, match="each be there once"):
        cuflash.order.first([1, 1], 10)
    with pytest.raises(ValueError, match="must have the 16 tokens"):
        cuflash.order.tiles((4, 4), 2).apply(np.zeros((15, 3)))
