"""What all tests share: the ``gpu`` mark, a generator a test, one BLAS thread a worker."""

import os
import zlib

# Workers of pytest-xdist share the cores; a BLAS pool in each of them would only make them wait.
if "PYTEST_XDIST_WORKER" in os.environ:
    for name in ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        os.environ.setdefault(name, "1")

import numpy as np
import pytest


def gpu_missing() -> str | None:
    """Why the tests marked ``gpu`` cannot run here, or None."""
    try:
        import cupy
    except ImportError:
        return "CuPy is not installed"
    try:
        return None if cupy.cuda.runtime.getDeviceCount() > 0 else "no GPU"
    except cupy.cuda.runtime.CUDARuntimeError as error:
        return f"no GPU: {error}"


def pytest_collection_modifyitems(config, items):
    """Skip, with the reason, what needs a GPU on a machine that has none."""
    marked = [item for item in items if item.get_closest_marker("gpu")]
    reason = gpu_missing() if marked else None
    if reason is not None:
        for item in marked:
            item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture
def rng(request) -> np.random.Generator:
    """A generator seeded by the name of the test: new numbers a case, the same in every run."""
    return np.random.default_rng(zlib.crc32(request.node.nodeid.encode()))
