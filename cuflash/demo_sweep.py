"""Time and memory of attention over the length of the sequence: the demo's second half.

Tiled attention, as cuflash computes it, against standard attention, which builds the matrix of all
pairs. Standard attention is measured while it fits and scaled by the square of the length beyond;
tables and picture say which is which.
"""

from __future__ import annotations

import math
import time
import tracemalloc
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

import cuflash

__all__ = ["Row", "draw", "measure", "report", "standard_attention", "sweep"]

STANDARD_MATRICES = 2.25  # (n, n) matrices that standard_attention holds at once: p, ds, the mask


def standard_attention(xp: Any, q: Any, k: Any, v: Any, do: Any) -> tuple[Any, Any, Any, Any]:
    """Causal attention o and dq, dk, dv by the definition, with its (n, n) matrices."""
    scale = 1 / math.sqrt(q.shape[1])
    s = q @ k.T
    s *= scale
    s[~xp.tri(len(q), dtype=bool)] = -math.inf
    s -= s.max(axis=1, keepdims=True)
    p = xp.exp(s, out=s)
    p /= p.sum(axis=1, keepdims=True)
    o = p @ v
    dv = p.T @ do
    ds = do @ v.T
    ds -= (do * o).sum(axis=1, keepdims=True)
    ds *= p
    ds *= scale
    return o, ds @ k, ds.T @ q, dv


@dataclass
class Row:
    """One length of the sweep; a standard figure that was not measured is scaled by n squared."""

    seqlen: int
    seconds: float
    peak_bytes: int
    standard_seconds: float
    standard_bytes: float
    standard_measured: bool


def measure(xp: Any, call: Callable[[], Any]) -> tuple[float, int]:
    """Seconds of one call, and the most bytes it held at a time beyond what was there before."""
    peak = peak_bytes(xp, call)  # first: this call also compiles and loads
    synchronize(xp)
    start = time.perf_counter()
    call()
    synchronize(xp)
    return time.perf_counter() - start, peak


def peak_bytes(xp: Any, call: Callable[[], Any]) -> int:
    """The most bytes a call held at a time, its results included, its inputs not."""
    if xp is np:
        tracemalloc.start()
        call()
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return peak
    pool = xp.get_default_memory_pool()
    before = pool.used_bytes()
    peaks = [before]

    class Watch(xp.cuda.MemoryHook):
        name = "peak"

        def malloc_postprocess(self, **_: Any) -> None:
            peaks.append(pool.used_bytes())

    with Watch():
        call()
    return max(peaks) - before


def synchronize(xp: Any) -> None:
    if xp is not np:
        xp.cuda.runtime.deviceSynchronize()


def sweep(xp: Any, longest: int, head_dim: int, patience: float = 6.0) -> list[Row]:
    """One causal head, forward and backward, at doubling lengths up to ``longest``.

    The next length takes three times as long as all before it, so none is begun once they took
    ``patience`` seconds.
    """
    start = time.perf_counter()
    room = 2**30 if xp is np else 0.8 * xp.cuda.runtime.memGetInfo()[0]
    rng = np.random.default_rng(0)
    rows: list[Row] = []
    seqlen = min(512, longest)
    while seqlen <= longest and (not rows or time.perf_counter() - start < patience):
        q, k, v, do = (
            xp.asarray(rng.standard_normal((seqlen, head_dim), dtype=np.float32)) for _ in range(4)
        )

        def tiled(q: Any = q, k: Any = k, v: Any = v, do: Any = do) -> Any:
            o, pullback = cuflash.attention_vjp(q, k, v, causal=True)
            return o, pullback(do)

        def standard(q: Any = q, k: Any = k, v: Any = v, do: Any = do) -> Any:
            return standard_attention(xp, q, k, v, do)

        seconds, peak = measure(xp, tiled)
        fits = STANDARD_MATRICES * 4 * seqlen**2 <= room
        if fits:
            other_seconds, other_peak = measure(xp, standard)
            rows.append(Row(seqlen, seconds, peak, other_seconds, other_peak, True))
        else:
            last = rows[-1]
            growth = (seqlen / last.seqlen) ** 2
            other = (last.standard_seconds * growth, last.standard_bytes * growth)
            rows.append(Row(seqlen, seconds, peak, *other, False))
        seqlen *= 2
    return rows


def report(rows: list[Row]) -> None:
    """Print the sweep as a table."""
    print(
        "\nOne causal head, forward and backward, float32: time, and memory beyond the inputs\n"
        "   seqlen    cuflash               standard attention"
    )
    for row in rows:
        note = "" if row.standard_measured else "   (scaled, not run)"
        print(
            f"  {row.seqlen:7d}  {row.seconds * 1e3:9.1f} ms {row.peak_bytes / 2**20:8.1f} MiB"
            f"  {row.standard_seconds * 1e3:9.1f} ms {row.standard_bytes / 2**20:9.1f} MiB{note}"
        )


def draw(rows: list[Row], without: list[float], with_attention: list[float], plot: str) -> Path:
    """Draw losses, time and memory into one PNG and return where it lies."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, middle, right) = pyplot.subplots(1, 3, figsize=(15, 4.5))
    for losses, label in ((without, "without attention"), (with_attention, "with attention")):
        left.plot(losses, label=label)
    left.set(title="Training loss", xlabel="step", ylabel="bits a byte")

    lengths = [row.seqlen for row in rows]
    measured = [row for row in rows if row.standard_measured]
    scaled = rows[max(len(measured) - 1, 0) :]
    panels: tuple[tuple[Any, str, float, str, str], ...] = (
        (middle, "seconds", 1e3, "Time, forward and backward", "ms"),
        (right, "bytes", 2.0**-20, "Memory beyond the inputs", "MiB"),
    )
    for axes, what, factor, title, unit in panels:
        ours = "seconds" if what == "seconds" else "peak_bytes"
        axes.loglog(lengths, [getattr(r, ours) * factor for r in rows], "o-", label="cuflash")
        for part, style, label in ((measured, "s-", "standard"), (scaled, ":", "scaled by n²")):
            values = [getattr(r, f"standard_{what}") * factor for r in part]
            if len(part) > (label != "standard"):
                axes.loglog([r.seqlen for r in part], values, style, color="C3", label=label)
        axes.set(title=title, xlabel="sequence length", ylabel=unit)
    for axes in (left, middle, right):
        axes.grid(alpha=0.3)
        axes.legend()
    figure.tight_layout()
    path = Path(plot).resolve()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
    return path
