"""Importing cuflash is quick, pulls in no framework and touches no GPU."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parent.parent
FRAMEWORKS = ("cupy", "torch", "jax", "jaxlib", "ml_dtypes", "matplotlib", "tqdm", "scipy")


def run_python(code: str, **environment: str) -> str:
    """What a new interpreter prints, with these environment variables besides."""
    result = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        cwd=REPOSITORY,
        timeout=120,
        env=os.environ | environment,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_import_pulls_in_no_framework():
    code = f"import sys, cuflash; print([n for n in {FRAMEWORKS!r} if n in sys.modules])"
    assert run_python(code).strip() == "[]"


def test_cpu_call_pulls_in_no_framework():
    code = (
        "import sys, numpy as np, cuflash\n"
        "x = np.ones((1, 4, 1, 8), np.float32)\n"
        "cuflash.attention(x, x, x, causal=True)\n"
        f"print([n for n in {FRAMEWORKS!r} if n in sys.modules])"
    )
    assert run_python(code).strip() == "[]"


def test_import_without_cupy_installed():
    code = (
        "import sys\n"
        "sys.modules['cupy'] = None\n"  # import cupy now raises ImportError
        "import cuflash, numpy as np\n"
        "x = np.ones((1, 4, 1, 8), np.float32)\n"
        "print(cuflash.attention(x, x, x).shape)"
    )
    assert run_python(code).strip() == "(1, 4, 1, 8)"


def test_import_adds_little_to_numpy(tmp_path):
    """At most 50 ms over ``import numpy``, in processor time, once Python's bytecode is cached.

    On a busy or slow machine everything takes longer, numpy too: there half of numpy's own time
    (which is about 100 ms) is the measure.
    """
    code = (
        "import time\n"
        "start = time.process_time()\n"
        "import numpy\n"
        "middle = time.process_time()\n"
        "import cuflash\n"
        "print(middle - start, time.process_time() - middle)"
    )
    cached = {"PYTHONPYCACHEPREFIX": str(tmp_path), "PYTHONDONTWRITEBYTECODE": ""}
    runs = [[float(word) for word in run_python(code, **cached).split()] for _ in range(6)]
    assert min(own for _, own in runs) <= max(0.050, 0.5 * min(numpy for numpy, _ in runs))


def test_import_opens_no_cuda_driver():
    """A CUDA context needs the driver's library; import must not even load it."""
    if not Path("/proc/self/maps").exists():
        pytest.skip("needs /proc to see which libraries a process has loaded")
    code = "import cuflash; print('libcuda' in open('/proc/self/maps').read())"
    assert run_python(code).strip() == "False"


def test_public_names_exist():
    code = "import cuflash; print([n for n in cuflash.__all__ if not hasattr(cuflash, n)])"
    assert run_python(code).strip() == "[]"


@pytest.mark.gpu
def test_gpu_works_in_a_child_forked_after_import():
    """A CUDA context made at import would not survive the fork."""
    code = (
        "import os, cuflash\n"
        "child = os.fork()\n"
        "if child == 0:\n"
        "    import cupy\n"
        "    x = cupy.ones((1, 4, 1, 8), cupy.float32)\n"
        "    right = bool((cuflash.attention(x, x, x) == x).all())\n"
        "    os._exit(0 if right else 1)\n"
        "print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))"
    )
    assert run_python(code).strip() == "0"
