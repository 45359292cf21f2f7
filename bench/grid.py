"""The grid of the published tables against the best rival of each cell, 16384 tokens a batch.

Not every rival can be installed beside cuflash. What the best of FlashAttention-2, -3, -4 and cuDNN
reached on an H200 is kept as a ratio to cuDNN, which is measured here again: `BARS`, of 2026-12-01,
in one process, bf16, driver 580.159, torch 2.11 (cuDNN 9.19), FlashAttention-3 of 2026-08 built by
nvcc 13.0, flash-attn-4 4.0.0b36. Equal ratios mean equal speed, within the 4 % that ratios move.
"""

from __future__ import annotations

import json
from math import exp, log
from pathlib import Path

from . import attention
from .cases import GRID, Case
from .machine import Machine
from .report import Row

RIVALS = ("CUDNN", "FLASH")
# (head_dim, key heads, causal) -> TFLOP/s of the best rival over those of cuDNN, by length: 512 to
# 16384, with 8 key heads for 32 query heads at d 128: 2048, 4096, 16384
BARS: dict[str, dict[tuple[int, int, bool], tuple[float, ...]]] = {
    "forward": {
        (64, 32, False): (1.000, 1.000, 1.094, 1.137, 1.253, 1.252),
        (64, 32, True): (1.000, 1.000, 1.084, 1.132, 1.211, 1.275),
        (128, 16, False): (1.000, 1.046, 1.071, 1.084, 1.106, 1.145),
        (128, 16, True): (1.000, 1.095, 1.154, 1.178, 1.191, 1.253),
        (256, 8, False): (1.014, 1.075, 1.090, 1.091, 1.124, 1.125),
        (256, 8, True): (1.000, 1.080, 1.159, 1.210, 1.252, 1.309),
        (128, 8, False): (1.088, 1.094, 1.014),
        (128, 8, True): (1.139, 1.204, 1.166),
    },
    "backward": {
        (64, 32, False): (1.237, 1.216, 1.201, 1.255, 1.240, 1.240),
        (64, 32, True): (1.308, 1.303, 1.297, 1.339, 1.361, 1.349),
        (128, 16, False): (1.065, 1.114, 1.140, 1.167, 1.137, 1.119),
        (128, 16, True): (1.157, 1.153, 1.163, 1.189, 1.237, 1.167),
        (256, 8, False): (1.225, 1.265, 1.194, 1.170, 1.323, 1.320),
        (256, 8, True): (1.115, 1.159, 1.184, 1.179, 1.136, 1.219),
        (128, 8, False): (1.054, 1.026, 1.115),
        (128, 8, True): (1.099, 1.140, 1.031),
    },
}  # fmt: skip


def run(machine: Machine, part: str, settings: attention.Settings, folder: Path) -> int:
    """Measure the grid's cells for one pass, print and write the page; 0 if none went wrong."""
    settings.rivals, settings.parts, settings.case_seconds = list(RIVALS), (part,), 0.3
    rows = attention.run(machine, GRID, settings)
    header = machine.header()
    lines = page(header, part, rows)
    folder.mkdir(parents=True, exist_ok=True)
    stem = folder / f"{machine.label}-grid-{part}"
    stem.with_suffix(".json").write_text(json.dumps({"header": header, "rows": rows}, indent=1))
    stem.with_suffix(".md").write_text("\n".join(lines) + "\n")
    print("\n".join(lines))
    return sum(row["contender"] == "cuflash" and row.get("ms") is None for row in rows)


def page(header: dict, part: str, rows: list[Row]) -> list[str]:
    """A table of cells, and of each head dim's cells the geometric mean and the worst."""
    lines = [f"# {part.capitalize()} on {header['machine']}", ""]
    lines += [f"* {name}: {header[name]}" for name in header if name != "machine"]
    lines += ["", "| cell | cuDNN | FA2 | cuflash | over cuDNN | best rival | over the best |"]
    lines += ["|---|---|---|---|---|---|---|"]
    shares: dict[int, list[float]] = {}
    for case in GRID:
        rate = {row["contender"]: row.get("tflops") for row in rows if row["case"] == case.name}
        cudnn, flash = (
            next((rate[name] for name in rate if rival in name), None) for rival in RIVALS
        )
        ours, bar = rate.get("cuflash"), bar_of(part, case)
        cells = [case.name, *(f"{x:.0f}" if x else "-" for x in (cudnn, flash, ours))]
        if ours and cudnn:
            shares.setdefault(case.head_dim, []).append(ours / cudnn / bar)
            cells += [f"{ours / cudnn:.3f}", f"{bar:.3f}", f"{shares[case.head_dim][-1]:.3f}"]
        lines.append("| " + " | ".join(cells) + " |")
    lines += ["", "TFLOP/s; the best rival over cuDNN is `BARS` of bench/grid.py.", ""]
    for head_dim, found in shares.items():
        mean = exp(sum(map(log, found)) / len(found))
        lines.append(f"* d {head_dim}: geometric mean {mean:.3f}, worst {min(found):.3f}")
    return lines


def bar_of(part: str, case: Case) -> float:
    """TFLOP/s of the best rival over those of cuDNN in a cell."""
    bars = BARS[part][case.head_dim, case.heads_k, case.causal]
    lengths = (2048, 4096, 16384) if len(bars) == 3 else (512, 1024, 2048, 4096, 8192, 16384)
    return bars[lengths.index(case.seqlen_q)]
