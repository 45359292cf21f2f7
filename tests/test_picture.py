"""Masks to look at: arrays, densities and pictures agree with the plain definitions."""

import numpy as np
import pytest
from cases import Case

import cuflash


def test_to_array() -> None:
    mask = cuflash.SlidingWindow(3, 1) & cuflash.Mask(lambda b, h, q, k: (q + h) % 2 == b)
    array = mask.to_array(5, 9, batch=2, heads=3)
    b, h, row, k = np.ogrid[:2, :3, :5, :9]
    q = row + 4
    np.testing.assert_array_equal(array, (q - 3 <= k) & (k <= q + 1) & ((q + h) % 2 == b))


def test_positions() -> None:
    order = cuflash.order.first([7, 3], 10)
    array = cuflash.Causal().to_array(10, positions=order.positions)[0, 0]
    np.testing.assert_array_equal(array, order.positions[:, None] >= order.positions[None, :])


@pytest.mark.parametrize("n", [100, 600])
def test_density(n: int) -> None:
    mask = cuflash.SlidingWindow(9, 9) | cuflash.GlobalTokens(np.arange(n) % 50 == 7)
    array = mask.to_array(n)[0, 0]
    assert mask.density(n) == array.mean()
    count = -(-n // 64)
    padded = np.zeros((count * 64, count * 64), bool)
    padded[:n, :n] = array
    visited = padded.reshape(count, 64, count, 64).any(axis=(1, 3)).mean()
    assert visited <= mask.density(n, tile=64) <= 1


def test_density_of_a_causal_mask() -> None:
    assert cuflash.Causal().density(1000) == pytest.approx(1001 / 2000)
    assert cuflash.Causal().density(1024, tile=64) == (16 * 17 / 2) / 256


def test_plot() -> None:
    pytest.importorskip("matplotlib").use("Agg")
    axes = cuflash.SlidingWindow(100, 100).plot(512, tile=64)
    image = np.asarray(axes.images[0].get_array())
    assert image.shape == (8, 8) and set(image.ravel()) == {0, 1, 2}


def test_errors() -> None:
    with pytest.raises(ValueError, match="seqlen_q must be at least 1"):
        cuflash.Causal().to_array(0)
    ids = np.zeros(Case().seqlen_q, int)
    with pytest.raises(ValueError, match="can leave axis 0"):
        cuflash.Documents(ids).density(Case().seqlen_q + 1)
