"""Heads in random poses, and volumes as sequences of cubes: the data of `brain_mri.py`."""

from pathlib import Path
from typing import Any

import numpy as np

DATA = Path(__file__).parent / "data" / "brains_2mm.npz"


def load(xp: Any, who: str) -> tuple[Any, Any]:
    """T1 intensities (90, 108, 90) at 2 mm, 0 to 255, and lobes, 0 to 7, of "icbm" or "colin"."""
    data = np.load(DATA)
    return xp.asarray(data[f"{who}_t1"]), xp.asarray(data[f"{who}_lobes"])


def lobe_names() -> list[str]:
    return [str(name) for name in np.load(DATA)["lobe_names"]]


def rotation(rng: np.random.Generator, degrees: float) -> np.ndarray:
    """A turn about each of the three axes, by up to so many degrees."""
    turn = np.eye(3)
    for i, j in ((0, 1), (1, 2), (0, 2)):
        angle = np.deg2rad(rng.uniform(-degrees, degrees))
        one = np.eye(3)
        one[[i, j], [i, j]], one[i, j], one[j, i] = np.cos(angle), np.sin(angle), -np.sin(angle)
        turn = turn @ one
    return turn


def sample(xp: Any, head: tuple[Any, Any], size: dict, rng: Any, augment: bool) -> tuple[Any, Any]:
    """T1 intensities and lobes of a head, turned, stretched and moved, on the grid of the net."""
    image, lobes = head
    grid = size["grid"]
    spread = rotation(rng, 25) @ np.diag(rng.uniform(0.9, 1.1, 3)) * size["voxel_mm"] / 2  # 2 mm
    if augment and rng.random() < 0.5:
        spread = spread @ np.diag([-1, 1, 1])
    at = xp.indices(grid).reshape(3, -1).astype(np.float32)
    at -= xp.asarray(np.array(grid).reshape(3, 1) / 2 - 0.5, np.float32)
    at = xp.asarray(spread, np.float32) @ at
    shift = rng.uniform(-6, 6, 3)  # voxels of 2 mm
    at += xp.asarray((np.array(image.shape) / 2 + shift)[:, None], np.float32)
    low = xp.floor(at).astype(np.int64)
    value = xp.zeros(at.shape[1], np.float32)
    for corner in np.ndindex(2, 2, 2):  # linear between the eight voxels about a point
        share = xp.ones(at.shape[1], np.float32)
        for axis, up in enumerate(corner):
            part = at[axis] - low[axis]
            share *= part if up else 1 - part
        value += share * look_up(xp, image, low + xp.asarray(corner).reshape(3, 1))
    truth = look_up(xp, lobes, xp.rint(at).astype(np.int64))
    value /= 160.0
    slope = xp.asarray(rng.uniform(-0.1, 0.1, 3) * augment, np.float32)  # uneven light
    value *= xp.exp(slope @ (2 * xp.indices(grid).reshape(3, -1) / grid[0] - 1))
    value += xp.asarray(0.03 * rng.standard_normal(len(value), np.float32))
    return value.reshape(grid), truth.astype(np.int64).reshape(grid)


def look_up(xp: Any, volume: Any, at: Any) -> Any:
    """Voxels at integer coordinates (3, n); 0 outside of the volume."""
    inside = xp.ones(at.shape[1], bool)
    for axis, n in enumerate(volume.shape):
        inside &= (at[axis] >= 0) & (at[axis] < n)
    index = tuple(xp.clip(at[axis], 0, n - 1) for axis, n in enumerate(volume.shape))
    return xp.where(inside, volume[index], 0)


def smooth(xp: Any, volume: Any) -> Any:
    """The mean of the 27 voxels about each."""
    for axis, n in enumerate(volume.shape):
        wide = xp.pad(volume, [(int(i == axis),) * 2 for i in range(3)], mode="edge")
        volume = sum(xp.take(wide, xp.arange(i, i + n), axis=axis) for i in range(3)) / 3
    return volume


def cubes(volume: Any, patch: int, order: Any) -> Any:
    """(tokens, patch^3): the voxels of each cube, cubes in tile order."""
    g = [n // patch for n in volume.shape]
    parts = volume.reshape(g[0], patch, g[1], patch, g[2], patch).transpose(0, 2, 4, 1, 3, 5)
    return order.apply(parts.reshape(g[0] * g[1] * g[2], patch**3))


def whole(values: Any, grid: tuple[int, ...], patch: int, order: Any) -> Any:
    """The volume from its cubes: `cubes` undone."""
    g = [n // patch for n in grid]
    parts = order.undo(values).reshape(*g, patch, patch, patch)
    return parts.transpose(0, 3, 1, 4, 2, 5).reshape(grid)
