"""The simt kernels on a CPU: their flattened text, compiled by g++ with `cuda.hpp` for CUDA."""

from __future__ import annotations

import ctypes
import hashlib
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from cuflash import simt
from cuflash.arrays import View
from cuflash.arrays.numpy import numpy_view
from cuflash.config import shared_limit_of
from cuflash.gpu import launch, schedule, source
from cuflash.problem import Problem

HEADER = Path(__file__).with_name("cuda.hpp")
FLAGS = ("-std=c++17", "-O1", "-march=native", "-ffp-contract=off", "-fPIC", "-shared", "-w")
SHARED_BYTES = 1 << 18


def compiler() -> str | None:
    """Path of g++, or None."""
    return shutil.which("g++")


class Emulated:
    """The kernels of one translation unit."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library

    def launch(
        self, kernel: str, params: bytes, grid: int, threads: int, reverse: bool = False
    ) -> None:
        """Run every block; RuntimeError where threads disagree about a barrier."""
        run = getattr(self._library, f"emulate_{kernel}")
        if run(params, ctypes.c_uint(grid), ctypes.c_uint(threads), ctypes.c_int(reverse)):
            raise RuntimeError(f"{kernel}: not all threads of a block reached a barrier")


@cache
def build(text: str, kernels: tuple[str, ...]) -> Emulated:
    """Compile a CUDA text with these kernels; the library is kept in a temporary folder."""
    text = re.sub(r"#pragma unroll.*", "", text)
    entries = "".join(
        f"""
extern "C" int emulate_{name}(const void* bytes, unsigned grid, unsigned threads, int reverse) {{
  Params p;
  std::memcpy(&p, bytes, sizeof(p));
  return emulator::run([&] {{ {name}(p); }}, grid, threads, reverse, shared_memory,
                       sizeof(shared_memory));
}}"""
        for name in kernels
    )
    whole = (
        f'#include "{HEADER}"\n#line 1 "text"\n{text}\n'
        f"alignas(1024) Vector shared_memory[{SHARED_BYTES} / sizeof(Vector)];\n{entries}\n"
    )
    folder = Path(tempfile.gettempdir()) / f"cuflash-emulator-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    key = hashlib.sha256((whole + HEADER.read_text() + str(FLAGS)).encode()).hexdigest()[:24]
    library = folder / f"{key}.so"
    if not library.exists():
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            source, made = Path(scratch) / "kernel.cpp", Path(scratch) / "kernel.so"
            source.write_text(whole)
            command = [compiler() or "g++", *FLAGS, "-o", str(made), str(source)]
            done = subprocess.run(command, capture_output=True, text=True)
            if done.returncode:
                raise RuntimeError(f"g++ refuses the kernels:\n{done.stderr}")
            os.replace(made, library)  # atomic: another process may build the same
    return Emulated(ctypes.CDLL(str(library)))


def attention(
    problem: Problem,
    inputs: Mapping[str, np.ndarray],
    *,
    captures: Sequence[np.ndarray] = (),
    arch: int = 90,
    reverse: bool = False,
    edit: Callable[[str], str] = lambda text: text,
    blocks: int = 8,
    grid: Callable[[int], int] = lambda grid: (grid + 1) // 2,
    keep: dict[str, np.ndarray] | None = None,
) -> dict[str, np.ndarray]:
    """Forward and, where `do` is among the inputs, backward by the kernels for `arch`.

    Parameters
    ----------
    inputs : q, k, v (batch, seqlen, heads, dim), any strides; do, dlse for backward, which may also
        bring its own o and lse
    edit : changes the CUDA text, to see what a wrong kernel does
    blocks : that the GPU is said to hold at a time
    grid : changes how many blocks are launched. By default fewer than items: then the grid-stride
        loops are walked too
    keep : takes the workspaces of both passes, by "pass name"

    Returns
    -------
    o, lse and, in backward, dq, dk, dv
    """
    arrays = dict(inputs)
    accumulation = np.dtype(problem.accumulation)

    def make(name: str, shape: tuple[int, ...], dtype: np.dtype) -> None:
        arrays[name] = np.full(shape, np.nan, dtype)

    options = {"arch": arch, "reverse": reverse, "edit": edit, "blocks": blocks, "grid": grid}
    b, h, s, d_v = problem.batch, problem.heads_q, problem.seqlen_q, problem.head_dim_v
    if "o" not in arrays:
        make("o", (b, s, h, d_v), arrays["q"].dtype)
        make("lse", (b, h, s), accumulation)
        _run("forward", problem, arrays, captures, options, keep)
    if "do" in arrays:
        for name in "qkv":
            make(f"d{name}", arrays[name].shape, arrays["q"].dtype)
        scored = [e for e in (problem.score, problem.sink) if e is not None]
        for i, param in enumerate(param for e in scored for param in e.params):
            make(f"dparam{i}", param.shape, param.array.dtype)
        _run("backward", problem, arrays, captures, options, keep)
    names = ("o", "lse", "dq", "dk", "dv", *(n for n in arrays if n.startswith("dparam")))
    return {name: arrays[name] for name in names if name in arrays}


def _run(
    name: str,
    problem: Problem,
    arrays: dict[str, np.ndarray],
    captures: Sequence[np.ndarray],
    options: dict[str, Any],
    keep: dict[str, np.ndarray] | None,
) -> None:
    limit = shared_limit_of(options["arch"])
    config = simt.simt_config(name, problem.dtype, problem.head_dim, problem.head_dim_v, limit)
    text = launch.call_text(problem)
    code = options["edit"](source.text(config, text, problem.deterministic))
    kernels = build(code, schedule.kernels(config, text, problem.deterministic))
    made = []
    for workspace, shape, dtype in launch.workspaces(config, problem, options["blocks"]):
        arrays[workspace] = np.full(shape, -1 if dtype == "int64" else np.nan, dtype)
        made.append(workspace)
    views = {each: _view(array) for each, array in arrays.items()}
    words: list[int] = []
    if text is not None:
        tables = arrays.get("tables")
        pointer = 0 if tables is None else tables.ctypes.data
        gradients = [x.ctypes.data for each, x in arrays.items() if each.startswith("dparam")]
        words = text.pack(problem, [_view(array) for array in captures], pointer, gradients)
    params = launch.pack(problem, views, words)
    for step in schedule.steps(config, problem, text, options["blocks"]):
        grid = options["grid"](step.grid)
        kernels.launch(step.kernel, params, grid, step.threads, options["reverse"])
    for workspace in made:
        array = arrays.pop(workspace)
        if keep is not None:
            keep[f"{name} {workspace}"] = array


def _view(array: np.ndarray) -> View:
    return numpy_view(array, "array", array)
