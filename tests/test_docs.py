"""The documents say what is true: examples run, named files exist, sizes stay within budget."""

import ast
import doctest
import importlib
import importlib.util
import re
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parent.parent
README = (REPOSITORY / "README.md").read_text(encoding="utf-8")
PYTHON_LINES, CUDA_LINES, FUNCTION_LINES = 350, 400, 80
# cuflash/: 4500 at first. Half of it is docstrings by now, and arrays of five kinds, expressions
# with bounds and derivatives, and masks to look at came to 8500; a second family to 9200.
CORE_LINES = {"cuflash": 9200, "kernels_cu": 4500}

EXAMPLES = re.findall(r"^```python\n(.*?)^```", README, re.MULTILINE | re.DOTALL)


def title(example: str) -> str:
    """The first line of an example that says something, for the test's name."""
    lines = [line for line in example.splitlines() if line and not line.startswith("import numpy")]
    return lines[0][:40]


def require_libraries(example: str) -> None:
    """Skip an example whose library, or GPU, is not here."""
    for name in re.findall(r"^import (\w+)", example, re.MULTILINE):
        if importlib.util.find_spec(name) is None:
            pytest.skip(f"{name} is not installed")
    if "import cupy" in example:
        import conftest

        reason = conftest.gpu_missing()
        if reason is not None:
            pytest.skip(reason)


@pytest.mark.parametrize("example", EXAMPLES, ids=title)
def test_readme_example_runs(example):
    """Each example starts from the names of the first one."""
    require_libraries(example)
    names: dict = {}
    exec(compile(EXAMPLES[0], "README.md, first example", "exec"), names)
    exec(compile(example, "README.md", "exec"), names)


def test_readme_begins_with_two_commands():
    block = re.search(r"^```bash\n(.*?)^```", README, re.MULTILINE | re.DOTALL)
    first, second = block.group(1).splitlines()
    assert README[: block.start()].count("\n") <= 3
    assert "cuflash demo" in first and "pytest" in second


def test_readme_names_files_that_exist():
    names = set(re.findall(r"`([\w./-]+/[\w./-]*|[\w-]+\.(?:py|md|toml|cu))`", README))
    names |= set(re.findall(r"\bbash (\S+)$", README, re.MULTILINE))
    assert "tests/cases.py" in names
    missing = [name for name in sorted(names) if is_path(name) and not exists(name)]
    assert not missing


def is_path(name: str) -> bool:
    """Whether a quoted word with a slash is a path of this repository rather than a fraction."""
    return not name.startswith(("~", "1/"))


def exists(name: str) -> bool:
    return (REPOSITORY / name).exists()


def test_contributing_is_short():
    section = README.split("## Contributing", 1)[1].split("\n## ", 1)[0]
    assert section.count("\n") < 40


def modules() -> list[str]:
    """Every module of the package, by its dotted name."""
    paths = sorted((REPOSITORY / "cuflash").rglob("*.py"))
    names = [".".join(path.relative_to(REPOSITORY).with_suffix("").parts) for path in paths]
    return [name.removesuffix(".__init__") for name in names if not name.endswith("__main__")]


@pytest.mark.parametrize("name", modules())
def test_docstring_examples_run(name):
    """Examples in docstrings know np, cuflash and small q, k, v."""
    try:
        module = importlib.import_module(name)
    except ImportError as error:
        pytest.skip(str(error))
    import numpy as np

    import cuflash

    rng = np.random.default_rng(0)
    names = {"np": np, "cuflash": cuflash}
    for argument in ("q", "k", "v", "do", "target"):
        names[argument] = rng.standard_normal((1, 8, 2, 16), dtype=np.float32)
    result = doctest.testmod(
        module, extraglobs=names, optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
    )
    assert result.failed == 0


def files(suffixes: tuple[str, ...], *folders: str) -> list[Path]:
    """The files of these folders with these suffixes, build products left out."""
    found = [path for folder in folders for path in (REPOSITORY / folder).rglob("*")]
    return sorted(path for path in found if path.suffix in suffixes and path.is_file())


def count_lines(path: Path) -> int:
    return len(path.read_text(encoding="utf-8").splitlines())


def test_file_sizes():
    limits = [(p, PYTHON_LINES) for p in files((".py",), "cuflash", "tests", "bench", "examples")]
    limits += [(p, CUDA_LINES) for p in files((".cu", ".cuh"), "kernels_cu")]
    over = {
        str(path.relative_to(REPOSITORY)): count_lines(path)
        for path, limit in limits
        if count_lines(path) > limit and not argued(path)
    }
    assert not over


def argued(path: Path) -> bool:
    """Whether a file over its limit says why at its head, in a sentence with "Longer than"."""
    return "Longer than" in path.read_text(encoding="utf-8")[:1500]


@pytest.mark.parametrize("folder", CORE_LINES)
def test_core_budget(folder):
    total = sum(count_lines(path) for path in files((".py", ".cu", ".cuh"), folder))
    assert total <= CORE_LINES[folder]


def test_function_sizes():
    over = []
    for path in files((".py",), "cuflash", "bench"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                lines = node.end_lineno - node.lineno + 1
                if lines > FUNCTION_LINES:
                    over.append(f"{path.name}:{node.lineno} {node.name} {lines}")
    assert not over


def test_no_assert_in_package_code():
    """``python -O`` drops assertions, so the package raises exceptions instead."""
    over = []
    for path in files((".py",), "cuflash"):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        over += [
            f"{path.name}:{node.lineno}" for node in ast.walk(tree) if isinstance(node, ast.Assert)
        ]
    assert not over


def test_continuous_integration_reads_the_readme():
    """.ci/run must take both commands from here, so that they cannot drift apart."""
    script = (REPOSITORY / ".ci" / "run").read_text(encoding="utf-8")
    assert script.count("readme_command") >= 3 and "README.md" in script
