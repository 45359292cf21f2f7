"""The commands run, say what they should, and fail with a sentence instead of a traceback."""

import subprocess
import sys
from pathlib import Path

import pytest

from cuflash import cli

SMALL = ("--batch=1", "--seqlen-q=64", "--heads-q=2", "--head-dim=16", "--device=cpu")


def test_info(capsys):
    assert cli.main(["info"]) == 0
    assert "numpy" in capsys.readouterr().out.lower()


def test_memory(capsys):
    assert cli.main(["memory", "--seqlen=8192", "--heads=32"]) == 0
    assert capsys.readouterr().out.strip()


@pytest.mark.parametrize("extra", ([], ["--causal"], ["--window", "16", "0"], ["--backward"]))
def test_explain(extra, capsys):
    assert cli.main(["explain", *SMALL, "--dtype=float32", *extra]) == 0
    assert "cpu" in capsys.readouterr().out.lower()


@pytest.mark.parametrize("extra", ([], ["--backward"]))
def test_warmup(extra):
    assert cli.main(["warmup", *SMALL, "--dtype=float32", *extra]) == 0


def test_wrong_value_is_one_line(capsys):
    assert cli.main(["explain", *SMALL, "--dtype=float8"]) == 1
    error = capsys.readouterr().err
    assert error.startswith("cuflash explain: dtype must be") and error.count("\n") == 1


def test_heads_that_do_not_divide(capsys):
    arguments = ["explain", *SMALL, "--dtype=float32", "--heads-k=3"]
    assert cli.main(arguments) == 1
    assert "heads" in capsys.readouterr().err


def test_demo_without_a_gpu_says_so(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "cupy", None)
    assert cli.main(["demo", "--device=cuda"]) == 1
    assert "CuPy" in capsys.readouterr().err


@pytest.mark.parametrize(
    "start", (["-m", "cuflash"], [str(Path(sys.executable).parent / "cuflash")])
)
def test_command_line(start):
    """``python -m cuflash`` and the installed script are the same command."""
    if start[0] != "-m" and not Path(start[0]).exists():
        pytest.skip("cuflash is not installed in this environment")
    command = [sys.executable, *start] if start[0] == "-m" else start
    result = subprocess.run([*command, "--help"], capture_output=True, text=True, timeout=60)
    assert result.returncode == 0
    for name in ("demo", "info", "memory", "explain", "warmup"):
        assert name in result.stdout
