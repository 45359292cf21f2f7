"""The comparison: check every contender, then time them in turns, forward and backward."""

from __future__ import annotations

import fnmatch
import statistics
import time
import zlib
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import numpy as np

from . import baselines, check
from .cases import Case
from .machine import Machine
from .report import Row

PASSES = ("forward", "backward")
ROUNDS = 4  # calls in a row where only the host's clock can see them, to spread its own time


@dataclass
class Settings:
    """What the command line chose."""

    rivals: list[str] | None = None
    family: str = ""
    seconds: float = 540.0  # no new case after this long
    case_seconds: float = 1.5  # timed work of a pass of a case
    quick: bool = False
    parts: tuple[str, ...] = PASSES
    started: float = field(default_factory=time.monotonic)


def select(cases: list[Case], pattern: str | None, quick: bool) -> list[Case]:
    """The cases whose name holds or matches the pattern; all, or the quick ones, without."""
    if pattern is not None:
        found = [c for c in cases if pattern in c.name or fnmatch.fnmatch(c.name, pattern)]
        if not found:
            raise SystemExit(f"no case matches {pattern!r}: " + ", ".join(c.name for c in cases))
        return found
    return [case for case in cases if case.quick or not quick]


def run(machine: Machine, cases: list[Case], settings: Settings) -> list[Row]:
    """Rows of every case that the time allowed; says which were left out."""
    matmul = cache(machine.matmul_rate)
    copy = machine.copy_rate()
    rows: list[Row] = []
    for order, case in enumerate(cases):
        if time.monotonic() - settings.started > settings.seconds:
            print(f"out of time: {len(cases) - order} cases left out, from {case.name}")
            break
        for row in measure(machine, case, settings):
            row |= {"order": order, "family": settings.family if _ours(row) else ""}
            if row.get("ms") is not None:
                backward = row["pass"] == "backward"
                row["tflops"] = case.flops(backward) / row["ms"] / 1e9
                row["matmul_percent"] = 100 * row["tflops"] / matmul(case.dtype)
                row["copy_percent"] = case.bytes_moved(backward) / row["ms"] / 1e4 / copy
            rows.append(row)
            print(_line(row), flush=True)
        machine.release()
    return rows


def measure(machine: Machine, case: Case, settings: Settings) -> list[Row]:
    """Build, check and time one case."""
    rng = np.random.default_rng(zlib.crc32(case.name.encode()))
    shape_q = (case.batch, case.seqlen_q, case.heads_q, case.head_dim)
    shape_k = (case.batch, case.seqlen_k, case.heads_k, case.head_dim)
    shapes = {"q": shape_q, "k": shape_k, "v": shape_k, "do": shape_q}
    arrays = {name: machine.normal(rng, shape, case.dtype) for name, shape in shapes.items()}
    exact = check.definition(machine.xp, case, arrays)
    sizes = [arrays[name].nbytes for name in ("q", "q", "k", "v")]

    rows: list[Row] = []
    alive: dict[str, dict[str, baselines.Contender]] = {name: {} for name in settings.parts}
    for name in baselines.installed(machine, settings.rivals, settings.quick):
        try:
            with _family(settings, name):
                machine.poison(sizes)
                contender = baselines.ALL[name](machine, case, arrays)
        except Exception as reason:
            rows += [_skipped(case, part, name, reason) for part in settings.parts]
            continue
        for part in settings.parts:
            row: Row = {"case": case.name, "pass": part, "contender": name}
            try:
                with _family(settings, name):
                    row["error"] = _check(machine, case, contender, part, exact, sizes)
            except Exception as reason:
                rows.append(_skipped(case, part, name, reason))
                continue
            if not row["error"] <= check.LIMITS[case.dtype]:
                row |= {"ms": None, "skipped": f"wrong: error {row['error']:.1e}"}
            else:
                row["host_clock"] = contender.wait is not None and machine.kind == "cuda"
                alive[part][name] = contender
            rows.append(row)
    for part in settings.parts:
        times = race(machine, alive[part], part, settings)
        for row in rows:
            if row["pass"] == part and row["contender"] in times:
                samples = times[row["contender"]]
                quarters = statistics.quantiles(samples, n=4)
                row["ms"] = statistics.median(samples)
                row["spread"] = (quarters[2] - quarters[0]) / row["ms"]
                row["repeats"] = len(samples)
    return rows


def _check(
    machine: Machine,
    case: Case,
    contender: baselines.Contender,
    part: str,
    exact: dict[str, Any],
    sizes: list[int],
) -> float:
    """The largest error of a pass, its outputs allocated where NaN lay before."""
    machine.poison(sizes)
    if part == "forward":
        results = {"o": contender.forward()}
    else:
        results = dict(zip(("dq", "dk", "dv"), contender.backward()))
    machine.synchronize()
    errors = [
        check.error(machine.xp, case, name, contender.numbers(result), exact)
        for name, result in results.items()
    ]
    return float(np.max(errors))  # NaN wins


def race(
    machine: Machine, contenders: dict[str, baselines.Contender], part: str, settings: Settings
) -> dict[str, list[float]]:
    """Milliseconds of each contender, taken in turns, each call on a flushed cache."""
    calls: dict[str, Callable[[], float]] = {}
    for name, contender in contenders.items():
        call = contender.forward if part == "forward" else contender.backward
        calls[name] = _turn(machine, settings, name, call, contender.wait)
    for call in calls.values():
        call()
    once = sum(call() for call in calls.values()) / 1e3
    repeats = int(np.clip(settings.case_seconds / max(once, 1e-9), 5, 25))
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(repeats):
        for name, call in calls.items():
            times[name].append(call())
    return times


def _turn(
    machine: Machine,
    settings: Settings,
    name: str,
    call: Callable[[], Any],
    wait: Callable[[Any], Any] | None,
) -> Callable[[], float]:
    """One timed call: flush, run, wait, read the clock."""
    rounds = ROUNDS if machine.kind == "cuda" else 1

    def by_the_host() -> float:
        machine.flush()
        machine.synchronize()
        start = time.perf_counter()
        for _ in range(rounds):
            result = call()
        wait(result)
        return (time.perf_counter() - start) * 1e3 / rounds

    def by_the_machine() -> float:
        with _family(settings, name):
            machine.flush()
            mark = machine.timed(call)
            machine.synchronize()
            return mark()

    return by_the_machine if wait is None else by_the_host


def _family(settings: Settings, name: str) -> Any:
    """Hold cuflash to the kernel family that the command line named."""
    if not settings.family or name != "cuflash":
        return nullcontext()
    import cuflash

    return cuflash.using(family=settings.family)


def _ours(row: Row) -> bool:
    return row["contender"] == "cuflash"


def _skipped(case: Case, part: str, name: str, reason: Exception) -> Row:
    text = " ".join(str(reason).split())[:120].replace("|", "/") or type(reason).__name__
    return {"case": case.name, "pass": part, "contender": name, "ms": None, "skipped": text}


def _line(row: Row) -> str:
    start = f"{row['case']:34s} {row['pass']:8s} {row['contender']:16s}"
    if row.get("ms") is None:
        return f"{start} -  {row['skipped']}"
    return (
        f"{start} {row['ms']:10.3f} ms ±{50 * row['spread']:3.0f}% {row['tflops']:8.3g} TFLOP/s "
        f"{row['matmul_percent']:5.1f}% matmul  error {row['error']:.1e}"
    )
