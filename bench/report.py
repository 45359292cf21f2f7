"""Rows of results into JSON and Markdown; a later run replaces the rows it measured again."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).resolve().parent / "results"
Row = dict[str, Any]


def key(row: Row) -> tuple[str, str, str, str]:
    return row["case"], row["pass"], row["contender"], row["family"]


def merge(folder: Path, label: str, header: dict[str, Any], rows: list[Row]) -> Path:
    """Add rows to ``<label>.json`` and write ``<label>.md`` beside it; returns the latter."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{label}.json"
    old = json.loads(path.read_text())["rows"] if path.exists() else []
    stamped = [row | {"date": header["date"], "commit": header["commit"]} for row in rows]
    fresh = {key(row) for row in rows}
    kept = [row for row in old if key(row) not in fresh]
    together = sorted(kept + stamped, key=lambda row: (row["order"], row["pass"], row["contender"]))
    path.write_text(json.dumps({"header": header, "rows": together}, indent=1) + "\n")
    page = folder / f"{label}.md"
    page.write_text(markdown(header, together))
    return page


def markdown(header: dict[str, Any], rows: list[Row]) -> str:
    """The page: what the machine is, then one table a pass."""
    lines = [f"# {header['machine']}", "", "The latest run:", ""]
    for name, value in header.items():
        if isinstance(value, dict):
            value = ", ".join(f"{part} {number}" for part, number in value.items())
        lines.append(f"* {name}: {value}")
    lines += tables(rows)
    lines += [
        "",
        "TFLOP/s count allowed pairs only. Percentages are of this machine's own matrix product",
        "and copy, measured in the same run. error: norm of the difference to float64 over the",
        "norm. ratio: time over that of cuflash, above 1 where cuflash is faster. (h): timed by",
        "the clock of the host.",
    ]
    return "\n".join(lines) + "\n"


def tables(rows: list[Row]) -> list[str]:
    """Lines of a table a pass."""
    lines = []
    for title in ("forward", "backward"):
        part = [row for row in rows if row["pass"] == title]
        if part:
            lines += ["", f"## {title.capitalize()}", "", *table(part)]
    return lines


def table(rows: list[Row]) -> list[str]:
    """Lines of a Markdown table; a contender that did not run shows why."""
    ours = {row["case"]: row.get("ms") for row in rows if row["contender"] == "cuflash"}
    lines = [
        "| case | contender | ms | TFLOP/s | % matmul | % copy | error | ratio |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        name = row["contender"] + (f" ({row['family']})" if row["family"] else "")
        if row.get("ms") is None:
            lines.append(f"| {row['case']} | {name} | {row['skipped']} | | | | | |")
            continue
        base = ours.get(row["case"])
        ratio = f"{row['ms'] / base:.2f}" if base else ""
        clock = " (h)" if row["host_clock"] else ""
        lines.append(
            f"| {row['case']} | {name} | {row['ms']:.3f}{clock} | {row['tflops']:.3g} "
            f"| {row['matmul_percent']:.1f} | {row['copy_percent']:.1f} | {row['error']:.1e} "
            f"| {ratio} |"
        )
    return lines
