"""Does work follow the pairs? Time of each mask against the share of tiles that it leaves.

A mask that keeps a share f of the tiles should take at most f + 0.05 of the time without a mask, on
arrays of the same shape. The first call of each mask, compiling included, and the memory beyond
outputs are noted beside it.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

import cuflash

from . import memory
from .machine import Machine
from .report import Row

ALLOWED = 0.05  # of the time without a mask, beyond the share of tiles


@dataclass(frozen=True)
class Pattern:
    """A mask at a length, as options of a call; sizes shrink on a CPU."""

    name: str
    seqlen: int
    heads: int
    options: Callable[[int], dict[str, Any]]


def _documents(n: int) -> dict[str, Any]:
    rng = np.random.default_rng(0)
    ends = np.cumsum(rng.integers(n // 32, n // 8, 64))
    ids = np.searchsorted(ends, np.arange(n), side="right").astype(np.int32)
    return {"mask": cuflash.Documents(ids), "causal": True}


def _globals_first(n: int) -> dict[str, Any]:
    flags = np.zeros(n, bool)
    flags[50::100] = True
    order = cuflash.order.first(np.flatnonzero(flags), n)
    near = cuflash.SlidingWindow(512, 512)
    return {"mask": near | cuflash.GlobalTokens(flags), "positions": order.positions}


def _neighborhood(n: int) -> dict[str, Any]:
    side = round(n ** (1 / 3))
    order = cuflash.order.tiles((side,) * 3, (4, 4, 8))
    mask = cuflash.Neighborhood((side,) * 3, 7)
    return {"mask": mask, "positions": order.positions}


def _prefix(n: int) -> dict[str, Any]:
    return {"mask": cuflash.PrefixLM(n // 4)}


def _genome(n: int) -> dict[str, Any]:
    flags = np.zeros(n, bool)
    flags[:: n // 200] = True
    order = cuflash.order.first(np.flatnonzero(flags), n)
    near = cuflash.SlidingWindow(1024, 1024)
    return {"mask": near | cuflash.GlobalTokens(flags), "positions": order.positions}


PATTERNS = (
    Pattern("causal", 16384, 16, lambda n: {"causal": True}),
    Pattern("window 1024", 16384, 16, lambda n: {"window": (1024, 0)}),
    Pattern("documents, causal", 32768, 8, _documents),
    Pattern("prefix", 16384, 16, _prefix),
    Pattern("local 512 + 1 % global first", 100_000, 2, _globals_first),
    Pattern("window 2048 + 200 globals first", 100_000, 2, _genome),
    Pattern("7^3 neighbourhood, tile order", 64**3, 1, _neighborhood),
)


def run(machine: Machine, folder: Path, family: str = "") -> int:
    """Measure, print, write; 0 where every time is within f + 0.05 of the one without a mask."""
    if machine.kind != "cuda":
        kinds = [("", "float32")]
    else:
        kinds = [("simt", "float32"), ("simt", "bfloat16"), ("", "bfloat16")]
    rows: list[Row] = []
    dense: dict[Any, float] = {}  # milliseconds without a mask
    folder.mkdir(parents=True, exist_ok=True)
    for pattern in PATTERNS:
        for held, dtype in kinds:
            if family and held != family:
                continue
            with cuflash.using(family=held) if held else nullcontext():
                rows += measure(machine, pattern, dtype, dense)
            _write(machine, rows, folder)  # after each: a run that is cut off leaves what it has
    return 0 if all(row["over"] <= ALLOWED for row in rows) else 1


def _write(machine: Machine, rows: list[Row], folder: Path) -> None:
    header = machine.header()
    page = [f"# Masks on {header['machine']}", ""]
    page += [f"{header['date']}, commit {header['commit']}, `{header['command']}`", ""]
    page += [
        "| mask | dtype | kernel | tokens, heads | pass | tiles kept f | ms without | ms "
        "| share of time | time - f | first call s | beyond outputs |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        text = (
            "| {mask} | {dtype} | {kernel} | {tokens}, {heads} | {pass} | {kept:.3f} "
            "| {dense_ms:.2f} | {ms:.2f} | {share:.3f} | {over:+.3f} | {first_s:.2f} | {beyond:,} |"
        )
        page.append(text.format(**row))
    stem = folder / f"{machine.label}-masks"
    result = {"header": header, "rows": rows}
    stem.with_suffix(".json").write_text(json.dumps(result, indent=1) + "\n")
    stem.with_suffix(".md").write_text("\n".join(page) + "\n")
    print("\n".join(page[-2:] if len(rows) > 2 else page), flush=True)


def measure(machine: Machine, pattern: Pattern, dtype: str, known: dict[Any, float]) -> list[Row]:
    """Both passes of one mask, against arrays of the same shape without it.

    known : milliseconds without a mask, by shape, dtype, kernel and pass
    """
    seqlen = pattern.seqlen if machine.kind == "cuda" else min(pattern.seqlen, 4096)
    rng = np.random.default_rng(seqlen)
    shape = (1, seqlen, pattern.heads if machine.kind == "cuda" else 1, 64)
    q, k, v, do = (machine.normal(rng, shape, dtype) for _ in range(4))
    options = pattern.options(seqlen)
    o, lse = cuflash.attention(q, k, v, return_lse=True)
    passes = {
        "forward": lambda more: cuflash.attention(q, k, v, return_lse=True, **more),
        "backward": lambda more: cuflash.attention_backward(do, q, k, v, o, lse, **more),
    }
    rows = []
    for name, call in passes.items():
        machine.synchronize()
        start = time.perf_counter()
        call(options)
        machine.synchronize()
        first = time.perf_counter() - start
        plan = cuflash.explain(q, k, v, **options, backward=name == "backward")
        computed, _, total = plan.tiles
        kernel = plan.kernel.split()[0]
        key = shape, dtype, kernel, name
        if key not in known:
            known[key] = machine.median(partial(call, {}), 5)
        dense, masked = known[key], machine.median(partial(call, options), 5)
        beyond = memory.peak(machine, partial(call, options)) - plan.output_bytes
        share, kept = masked / dense, computed / total
        rows.append(
            {
                "mask": pattern.name, "dtype": dtype, "kernel": kernel,
                "tokens": seqlen, "heads": shape[2], "pass": name,
                "kept": kept, "dense_ms": dense, "ms": masked, "share": share,
                "over": share - kept, "first_s": first, "beyond": beyond,
            }
        )  # fmt: skip
    return rows
