"""Command line of the benches; see ``python -m bench --help``."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

# JAX would take most of the GPU's memory when it is first used; the others need some too.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

from . import attention, cases, flex, grid, machine, masks, memory, report


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one bench, print it and write its results."""
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    parser.add_argument(
        "what",
        nargs="?",
        choices=("attention", "flex", "grid", "masks", "memory", "simt"),
        default="attention",
        help="attention: against rivals; flex: masks and scores against FlexAttention; grid: 42 "
        "cells against the best rivals; masks: time against tiles left; memory: peak against "
        "explain; simt: the float32 cell",
    )
    parser.add_argument("--quick", action="store_true", help="a few cases, no FlexAttention")
    parser.add_argument("--case", help="only cases whose name holds this (or a glob)")
    parser.add_argument("--list", action="store_true", help="print the names of the cases")
    parser.add_argument("--rivals", help="comma-separated parts of names, 'none' for cuflash alone")
    parser.add_argument("--family", default="", help="hold cuflash to one kernel family")
    parser.add_argument("--seconds", type=float, default=540, help="start no case after this long")
    parser.add_argument("--results", type=Path, default=report.RESULTS, help="folder of results")
    parser.add_argument("--part", choices=attention.PASSES, default="forward", help="of the grid")
    parser.add_argument("--longest", type=int, help="memory: longest sequence, in tokens")
    options = parser.parse_args(arguments)

    here = machine.find()
    if options.what == "memory":
        return memory.run(here, options.longest, options.results)
    if options.what == "masks":
        return masks.run(here, options.results, options.family)
    if options.what == "flex":
        return flex.run(here, options.results)
    if options.what == "grid":
        settings = attention.Settings(family=options.family, seconds=options.seconds)
        return grid.run(here, options.part, settings, options.results)
    table = cases.GPU if here.kind == "cuda" else cases.CPU
    rivals = None if options.rivals is None else options.rivals.split(",")
    settings = attention.Settings(rivals, options.family, options.seconds, quick=options.quick)
    order = [case.name for case in table]
    if options.what == "simt":
        table = cases.SIMT if here.kind == "cuda" else cases.CPU[:1]
        settings.rivals = rivals or ["EFFICIENT", "MATH"]
        settings.family = options.family or ("simt" if here.kind == "cuda" else "")
    if options.list:
        print("\n".join(case.name for case in table))
        return 0
    rows = attention.run(here, attention.select(table, options.case, options.quick), settings)
    for row in rows:
        row["order"] = order.index(row["case"])
    page = report.merge(options.results, here.label, here.header(), rows)
    print(f"\n{page}")
    print("\n".join(report.tables(rows)))
    wrong = [row for row in rows if row["contender"] == "cuflash" and row.get("ms") is None]
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
