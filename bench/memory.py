"""Peak memory over the length of the sequence, forward and backward, against what explain says.

One head of 64 in float16 on a GPU: what the call takes from CuPy's pool at its peak, inputs left
out. ``beyond`` leaves out o, dq, dk and dv too, so lse counts, as does the workspace. On a CPU it
is what NumPy takes, float32; there the tiles in work count, which ``explain`` does not list.
"""

from __future__ import annotations

import json
import math
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from .machine import Machine
from .report import Row

SHORTEST = 1024
LONGEST = {"cuda": 131072, "cpu": 8192}
HEAD_DIM = 64
ROUNDING = 512 * 8  # CuPy's pool rounds each array up to 512 bytes; a call makes at most 8


def run(machine: Machine, longest: int | None, folder: Path) -> int:
    """Measure, print, write; 0 where measured and explained agree and growth is linear."""
    rows = [
        row
        for seqlen in lengths(longest or LONGEST[machine.kind])
        for row in measure(machine, seqlen)
    ]
    exponents = {part: exponent(rows, part) for part in ("forward", "backward")}
    header = machine.header()
    page = [f"# Memory on {header['machine']}", ""]
    page += [f"{header['date']}, commit {header['commit']}, `{header['command']}`", ""]
    page += ["| tokens | pass | peak | explain | beyond o, dq, dk, dv |", "|---|---|---|---|---|"]
    for row in rows:
        page.append(
            f"| {row['tokens']} | {row['pass']} | {row['peak']:,} | {row['explained']:,} "
            f"| {row['beyond']:,} |"
        )
    page += [
        "",
        "Bytes. Exponent of the growth of the last column, by least squares in logarithms: ",
    ]
    page[-1] += ", ".join(f"{part} {value:.3f}" for part, value in exponents.items()) + "."
    folder.mkdir(parents=True, exist_ok=True)
    stem = folder / f"{machine.label}-memory"
    result = {"header": header, "exponents": exponents, "rows": rows}
    stem.with_suffix(".json").write_text(json.dumps(result, indent=1) + "\n")
    stem.with_suffix(".md").write_text("\n".join(page) + "\n")
    print("\n".join(page))
    if machine.kind == "cpu":
        return 0
    wrong = [row for row in rows if abs(row["peak"] - row["explained"]) > ROUNDING]
    for row in wrong:
        print(f"peak and explain differ by {row['peak'] - row['explained']:,} bytes: {row}")
    straight = all(abs(value - 1) <= 0.02 for value in exponents.values())
    return 0 if straight and not wrong else 1


def lengths(longest: int) -> list[int]:
    return [SHORTEST * 2**i for i in range(int(math.log2(max(longest // SHORTEST, 1))) + 1)]


def measure(machine: Machine, seqlen: int) -> list[Row]:
    """Peak bytes of a forward and of a backward call of this length."""
    import cuflash

    dtype = "float16" if machine.kind == "cuda" else "float32"
    rng = np.random.default_rng(seqlen)
    shape = (1, seqlen, 1, HEAD_DIM)
    q, k, v, do = (machine.normal(rng, shape, dtype) for _ in range(4))

    def forward() -> Any:
        return cuflash.attention(q, k, v, causal=True, return_lse=True)

    o, lse = forward()

    def backward() -> Any:
        return cuflash.attention_backward(do, q, k, v, o, lse, causal=True)

    rows = []
    for part, call, results in (("forward", forward, 1), ("backward", backward, 3)):
        call()  # what is made once is not the call's
        plan = cuflash.explain(q, k, v, causal=True, backward=part == "backward")
        taken = peak(machine, call)
        row = {"tokens": seqlen, "pass": part, "peak": taken}
        row["explained"] = plan.output_bytes + plan.workspace_bytes
        row["beyond"] = taken - results * q.nbytes
        rows.append(row)
    return rows


def peak(machine: Machine, call: Callable[[], Any]) -> int:
    """The most bytes a call held at a time beyond what was held before it."""
    if machine.kind == "cpu":
        tracemalloc.start()
        call()
        most = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return most
    cupy = machine.xp
    machine.synchronize()
    pool = cupy.get_default_memory_pool()
    before = pool.used_bytes()
    held = [before]

    class Watch(cupy.cuda.MemoryHook):
        name = "peak"

        def malloc_postprocess(self, **_: Any) -> None:
            held.append(pool.used_bytes())

    with Watch():
        call()
    machine.synchronize()
    return max(held) - before


def exponent(rows: list[Row], part: str) -> float:
    """Slope of log(beyond) over log(tokens)."""
    points = [(row["tokens"], row["beyond"]) for row in rows if row["pass"] == part]
    if len(points) < 2 or min(taken for _, taken in points) <= 0:
        return math.nan
    tokens, taken = np.log(np.array(points, float).T)
    return float(np.polyfit(tokens, taken, 1)[0])
