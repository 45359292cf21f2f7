"""What the sparse attention of `genome.py` saves, measured and by formula; the picture."""

from pathlib import Path
from typing import Any

import matplotlib
import numpy as np

import cuflash
from cuflash.demo_sweep import measure

matplotlib.use("Agg")
from matplotlib import pyplot


def pattern(n: int) -> tuple[Any, Any]:
    """Mask and order of n tokens, in the proportions of 100,000, +-2,048 and each 500th."""
    flags = np.arange(n) % max(n // 200, 1) == 0
    reach = round(0.02048 * n)
    mask = cuflash.SlidingWindow(reach, reach) | cuflash.GlobalTokens(flags)
    return mask, cuflash.order.first(np.flatnonzero(flags), n)


def cost(xp: Any, size: dict[str, Any]) -> tuple[list[list[str]], dict[str, float]]:
    """Forward and backward of one sequence: sparse, dense tiled, and standard (not run)."""
    n, dim, rng = size["timed"], size["width"] // size["heads"], np.random.default_rng(0)
    heads, dtype = (1, "float32") if xp is np else (size["heads"], "float16")
    shape, gain = (1, n, heads, dim), {}
    q, k, v, do = (xp.asarray(rng.standard_normal(shape, np.float32), dtype) for _ in range(4))

    def both(**options: Any) -> Any:
        o, pullback = cuflash.attention_vjp(q, k, v, **options)
        return o, pullback(do)

    mask, order = pattern(n)
    seconds, peak = measure(xp, lambda: both(mask=mask, positions=order.positions))
    dense, dense_peak = measure(xp, both)
    model = cuflash.memory(seqlen=n, heads=heads, head_dim=dim, dtype=dtype)
    standard = model.tensors_forward + model.standard_backward
    lines = [
        [f"window and key points, {n:,} bases", f"{seconds:.3g} s", f"{peak / 2**20:,.0f} MiB"],
        ["all pairs, tiled", f"{dense:.3g} s", f"{dense_peak / 2**20:,.0f} MiB"],
        ["all pairs, standard: not run, by cuflash.memory", "", f"{standard / 2**20:,.0f} MiB"],
    ]
    for length in sorted({n, 100_000}):
        mask, order = pattern(length)
        x = xp.zeros((1, length, heads, dim), dtype)
        ways = {"in place": None, "first": order.positions}
        tiles = {
            way: cuflash.explain(x, x, x, mask=mask, positions=p).tiles for way, p in ways.items()
        }
        gain = {way: total / computed for way, (computed, _, total) in tiles.items()}
        gain |= {"pairs": 1 / mask.density(length, length), "measured": dense / seconds}
        lines.append([f"saved, {length:,} bases: by pairs {gain['pairs']:.1f}, by tiles "
                      f"{gain['first']:.1f} (key points in place: {gain['in place']:.1f})",
                      f"{gain['measured']:.1f} times" if length == n else "", ""])  # fmt: skip
    return lines, gain


def draw(tracks: dict[str, Any], phase: Any, path: Path) -> None:
    """Labels along the genome, true and found; tiles with key points in place and in front."""
    figure = pyplot.figure(figsize=(12, 6))
    grid = figure.add_gridspec(2, 3, height_ratios=(2, 3))
    axes = figure.add_subplot(grid[0, :])
    colours = matplotlib.colors.ListedColormap(["0.9", "C0", "C3"])
    style = {"aspect": "auto", "interpolation": "nearest", "vmin": 0, "vmax": 2}
    axes.imshow(np.stack(list(tracks.values())), cmap=colours, **style)
    axes.set_yticks(range(len(tracks)), list(tracks))
    axes.set(
        title="Between genes (grey), genes forward (blue) and reverse (red)",
        xlabel="base, windows side by side",
    )
    mask, order = pattern(16_384)
    for column, (name, positions) in enumerate(
        {"in place": None, "first": order.positions}.items()
    ):
        axes = mask.plot(
            16_384, positions=positions, tile=128, ax=figure.add_subplot(grid[1, column])
        )
        axes.get_legend().remove()
        axes.set_title(f"Key points {name}: tiles computed")
    axes = figure.add_subplot(grid[1, 2])
    for head, values in enumerate(phase):
        axes.plot(range(3), values, "o-", label=f"head {head}")
    axes.set(title="Learned score", xlabel="(query - key) % 3", xticks=range(3))
    axes.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=70)
    pyplot.close(figure)
