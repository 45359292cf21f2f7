"""Masks to look at: as an array, as a density, as a picture of skipped, partial and whole tiles."""

from __future__ import annotations

from typing import Any

import numpy as np

from cuflash import combine
from cuflash.expr.bounds import TileMask
from cuflash.expr.nodes import is_array
from cuflash.problem import Problem

BLOCK = 256  # tile with which densities are counted: any will do


def tile_mask(
    mask: Any, seqlen_q: int, seqlen_k: int | None, batch: int, heads: int, positions: Any,
    block: int,
) -> tuple[Problem, TileMask]:  # fmt: skip
    """The mask on NumPy for a problem of these sizes."""
    seqlen_k = seqlen_q if seqlen_k is None else seqlen_k
    for name, size in (
        ("seqlen_q", seqlen_q), ("seqlen_k", seqlen_k), ("batch", batch), ("heads", heads)
    ):  # fmt: skip
        if size < 1:
            raise ValueError(f"{name} must be at least 1, got {size}")
    shape = batch, heads, seqlen_q, seqlen_k
    logical = combine.read_positions(positions, shape, top_left=False)
    expression = combine.mask_of(False, None, mask, logical, shape)
    if expression is None:
        raise TypeError(f"no mask to look at: {mask!r}")
    offset = seqlen_k - seqlen_q
    expression.survey(
        (
            ("b", 0, batch - 1), ("h", 0, heads - 1),
            ("row", 0, seqlen_q - 1), ("q", offset, seqlen_k - 1),
            ("column", 0, seqlen_k - 1), ("k", 0, seqlen_k - 1),
        )
    )  # fmt: skip
    problem = Problem(
        batch, heads, heads, seqlen_q, seqlen_k, 1, 1, "float32", 1.0, mask=expression,
        q_offset=offset,
    )  # fmt: skip
    arrays = [_host(captured.array) for captured in expression.arrays]
    return problem, TileMask(expression, arrays, problem, block, block)


def _host(array: Any) -> np.ndarray:
    """A captured array on the host; a copy if it lies on a device."""
    if isinstance(array, np.ndarray):
        return array
    if hasattr(array, "get"):  # CuPy
        return array.get()
    if hasattr(array, "cpu"):  # torch
        return array.detach().cpu().numpy()
    return np.asarray(array)


def to_array(
    mask: Any, seqlen_q: int, seqlen_k: int | None, batch: int, heads: int, positions: Any
) -> np.ndarray:
    """(batch, heads, seqlen_q, seqlen_k) bool."""
    problem, values = tile_mask(mask, seqlen_q, seqlen_k, batch, heads, positions, BLOCK)
    rows, columns = slice(0, problem.seqlen_q), slice(0, problem.seqlen_k)
    return np.array(
        [[values.values(b, h, rows, columns) for h in range(heads)] for b in range(batch)]
    )


def density(
    mask: Any, seqlen_q: int, seqlen_k: int | None, batch: int, heads: int, positions: Any,
    tile: int | None,
) -> float:  # fmt: skip
    """The share of pairs that are attended, or with `tile` the share of tiles not skipped."""
    block = BLOCK if tile is None else tile
    problem, values = tile_mask(mask, seqlen_q, seqlen_k, batch, heads, positions, block)
    items = range(batch if values.depends_on_batch else 1)
    of_head = range(heads if values.depends_on_head else 1)
    tiles_q = range(-(-problem.seqlen_q // block))
    total = computed = 0
    for b in items:
        for h in of_head:
            for i in tiles_q:
                states = values.states(b, h, i)
                computed += int(np.count_nonzero(states)) if tile is not None else 0
                total += states.size if tile is not None else 0
                if tile is None:
                    rows = slice(i * block, min((i + 1) * block, problem.seqlen_q))
                    computed += _attended(values, b, h, rows, states, problem.seqlen_k, block)
                    total += (rows.stop - rows.start) * problem.seqlen_k
    return computed / total


def _attended(
    values: TileMask, b: int, h: int, rows: slice, states: np.ndarray, seqlen_k: int, block: int
) -> int:
    count = 0
    for j in np.flatnonzero(states):
        columns = slice(int(j) * block, min((int(j) + 1) * block, seqlen_k))
        if states[j] == 2:
            count += (rows.stop - rows.start) * (columns.stop - columns.start)
        else:
            count += int(np.count_nonzero(values.values(b, h, rows, columns)))
    return count


def plot(
    mask: Any, seqlen_q: int, seqlen_k: int | None, batch: int, head: int, positions: Any,
    tile: int, ax: Any,
) -> Any:  # fmt: skip
    """Draw the states of all tiles of one head; returns the matplotlib axes."""
    if is_array(mask):
        raise TypeError("plot draws masks, got an array")
    import matplotlib.pyplot as plt
    from matplotlib.colors import ListedColormap
    from matplotlib.patches import Patch

    problem, values = tile_mask(mask, seqlen_q, seqlen_k, batch + 1, head + 1, positions, tile)
    tiles_q = range(-(-problem.seqlen_q // tile))
    states = np.stack([values.states(batch, head, i) for i in tiles_q])
    colors = ("white", "#9ecae1", "#08519c")
    axes = plt.subplots()[1] if ax is None else ax
    extent = (0, problem.seqlen_k, problem.seqlen_q, 0)
    axes.imshow(states, cmap=ListedColormap(colors), vmin=0, vmax=2, extent=extent,
                interpolation="nearest")  # fmt: skip
    names = ("skipped", "partly attended", "wholly attended")
    counts = np.bincount(states.ravel(), minlength=3)
    handles = [
        Patch(facecolor=color, edgecolor="grey", label=f"{name}: {count}")
        for color, name, count in zip(colors, names, counts, strict=True)
    ]
    axes.legend(handles=handles, loc="upper center", bbox_to_anchor=(0.5, -0.12), ncols=3)
    axes.set(xlabel="key", ylabel="query", title=f"tiles of {tile} x {tile}")
    return axes
