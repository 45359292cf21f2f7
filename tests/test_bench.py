"""The bench harness on a machine without a GPU: it checks, times, writes, and fails when wrong."""

import json
from dataclasses import replace

import numpy as np
import pytest

from bench import __main__ as command
from bench import attention, baselines, cases, check, flex, grid, machine, memory, report

SMALL = cases.Case(1, 4, 2, 192, 256, 32, "float32", causal=True)


@pytest.fixture
def cpu(monkeypatch):
    """A CPU, also where there is a GPU, and quick ceilings."""
    monkeypatch.setattr(machine, "find", machine.Machine)
    monkeypatch.setattr(machine.Machine, "matmul_size", lambda self, dtype: 128)
    monkeypatch.setattr(machine.Machine, "copy_bytes", lambda self: 2**20)
    return machine.Machine()


def test_command_writes_json_and_markdown(cpu, tmp_path, monkeypatch):
    monkeypatch.setattr(cases, "CPU", [cases.Case(1, 2, 2, 128, 128, 32, "float32", quick=True)])
    arguments = ["--quick", "--rivals=standard", f"--results={tmp_path}"]
    assert command.main(arguments) == 0
    assert command.main(arguments) == 0  # the second run replaces the rows of the first
    result = json.loads((tmp_path / "cpu.json").read_text())
    rows = result["rows"]
    assert len(rows) == 4 and {row["contender"] for row in rows} == {"cuflash", "standard"}
    assert all(row["ms"] > 0 and row["error"] < 1e-5 and row["tflops"] > 0 for row in rows)
    assert {"machine", "commit", "command", "date"} <= set(result["header"])
    page = (tmp_path / "cpu.md").read_text()
    assert "## Forward" in page and "## Backward" in page and "| standard |" in page


def test_memory_command(cpu, tmp_path, capsys):
    assert command.main(["memory", "--longest=2048", f"--results={tmp_path}"]) == 0
    result = json.loads((tmp_path / "cpu-memory.json").read_text())
    assert [row["tokens"] for row in result["rows"]] == [1024, 1024, 2048, 2048]
    assert all(row["peak"] >= row["explained"] for row in result["rows"])
    assert "Exponent" in capsys.readouterr().out


def test_unknown_case_lists_the_cases(cpu, tmp_path):
    with pytest.raises(SystemExit, match="no case matches"):
        command.main(["--case=nonsense", f"--results={tmp_path}"])


@pytest.mark.parametrize("window", (None, (20, None), (None, 5), (0, 0)))
@pytest.mark.parametrize("causal", (False, True))
@pytest.mark.parametrize("seqlens", ((5, 5), (3, 9), (9, 3)))
def test_pairs_are_counted_as_the_mask_allows(seqlens, causal, window):
    case = cases.Case(2, 4, 2, *seqlens, 8, "float32", causal, window)
    row, column = np.ogrid[: seqlens[0], : seqlens[1]]
    diagonal = row + seqlens[1] - seqlens[0]
    allowed = np.ones(seqlens, bool)
    if causal:
        allowed &= column <= diagonal
    if window is not None and window[0] is not None:
        allowed &= column >= diagonal - window[0]
    if window is not None and window[1] is not None:
        allowed &= column <= diagonal + window[1]
    assert case.pairs() == 8 * allowed.sum()
    assert case.flops(True) == 2.5 * case.flops(False)


@pytest.mark.parametrize("name", baselines.ALL)
def test_contenders_agree_with_the_definition(name, cpu):
    """Each installed contender, on a square case with as many key heads as query heads."""
    if name not in baselines.installed(cpu, None):
        pytest.skip("not installed, or not for this machine")
    case = cases.Case(1, 2, 2, 96, 96, 32, "float32", causal=True)
    settings = attention.Settings(rivals=[name], case_seconds=0.01)
    rows = [row for row in attention.measure(cpu, case, settings) if row["contender"] == name]
    assert len(rows) == 2
    for row in rows:
        assert row["ms"] is not None, row["skipped"]


def test_a_wrong_result_is_not_timed(cpu, monkeypatch):
    """Grouped heads and unequal lengths, right; then one number of dk made wrong."""
    settings = attention.Settings(rivals=["none"], case_seconds=0.01)
    rows = attention.measure(cpu, SMALL, settings)
    assert [row["pass"] for row in rows] == ["forward", "backward"]
    assert all(row["error"] < 1e-5 and row["ms"] > 0 for row in rows)

    right = baselines.ALL["cuflash"]

    def wrong(*arguments):
        contender = right(*arguments)
        backward = contender.backward

        def spoiled():
            dq, dk, dv = backward()
            dk[-1, 0, -1, 0] += np.nan
            return dq, dk, dv

        contender.backward = spoiled
        return contender

    monkeypatch.setitem(baselines.ALL, "cuflash", wrong)
    forward, backward = attention.measure(cpu, SMALL, settings)
    assert forward["ms"] > 0
    assert backward["ms"] is None and "wrong" in backward["skipped"]
    assert "wrong" in "\n".join(report.table([backward | {"family": "", "tflops": 0}]))


def test_definition_matches_the_formula(cpu, rng):
    """The blocked float64 definition against plain softmax on a whole matrix."""
    arrays = {
        name: rng.standard_normal((1, s, h, 32), dtype=np.float32)
        for name, s, h in (("q", 192, 4), ("k", 256, 2), ("v", 256, 2), ("do", 192, 4))
    }
    exact = check.definition(np, SMALL, arrays)
    q, k, v = arrays["q"][0, :, 3], arrays["k"][0, :, 1], arrays["v"][0, :, 1]
    s = q.astype(float) @ k.T.astype(float) / np.sqrt(32)
    s[np.arange(256) > np.arange(192)[:, None] + 64] = -np.inf
    p = np.exp(s) / np.exp(s).sum(axis=1, keepdims=True)
    assert np.allclose(exact["o"][:, 1], p @ v, rtol=1e-12, atol=1e-12)


def test_memory_exponent():
    rows = [{"tokens": n, "pass": "forward", "beyond": 3 * n**2} for n in (1024, 2048, 8192)]
    assert memory.exponent(rows, "forward") == pytest.approx(2.0)
    assert memory.lengths(131072) == [1024 * 2**i for i in range(8)]


def test_grid_compares_every_cell_with_the_best_rival():
    rows = [
        {"case": case.name, "contender": name, "tflops": rate}
        for case in cases.GRID
        for name, rate in (("cuflash", 600.0), ("torch CUDNN", 500.0), ("torch FLASH", 300.0))
    ]
    lines = grid.page({"machine": "a GPU"}, "forward", rows)
    cell = next(line for line in lines if "d256 h8 b1 s16384 causal" in line)
    assert cell.endswith("| 500 | 300 | 600 | 1.200 | 1.309 | 0.917 |")
    assert len([line for line in lines if "geometric mean" in line]) == 3
    for part in ("forward", "backward"):
        assert all(1 <= grid.bar_of(part, case) < 1.4 for case in cases.GRID)


def test_flex_cells_are_the_same_in_both(cpu):
    pytest.importorskip("torch")
    for cell in flex.CELLS[:5:2]:
        rows = flex.measure(cpu, replace(cell, heads=2))
        assert rows[0]["ratio"] > 0 and float(rows[0]["difference"]) < 1e-4
