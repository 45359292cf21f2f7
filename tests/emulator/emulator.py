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

import numpy as np

from cuflash import plan
from cuflash.arrays import View, take
from cuflash.gpu import launch, source
from cuflash.problem import Problem

HEADER = Path(__file__).with_name("cuda.hpp")
FLAGS = ("-std=c++17", "-O1", "-march=native", "-ffp-contract=off", "-fPIC", "-shared", "-w")
SHARED_BYTES = 1 << 18
_KERNEL = re.compile(r'extern "C" __global__ void\s+(?:__launch_bounds__\(.*\)\s*)?(\w+)\(')


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
def build(text: str) -> Emulated:
    """Compile a CUDA text; the library is kept in the temporary folder under its hash."""
    text = re.sub(r"#pragma unroll.*", "", text)
    entries = "".join(
        f"""
extern "C" int emulate_{name}(const void* bytes, unsigned grid, unsigned threads, int reverse) {{
  Params p;
  std::memcpy(&p, bytes, sizeof(p));
  return emulator::run([&] {{ {name}(p); }}, grid, threads, reverse, shared_memory,
                       sizeof(shared_memory));
}}"""
        for name in _KERNEL.findall(text)
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
) -> dict[str, np.ndarray]:
    """Forward and, where `do` is among the inputs, backward by the kernels for `arch`.

    Parameters
    ----------
    inputs : q, k, v (batch, seqlen, heads, dim), any strides; do, dlse for backward, which may also
        bring its own o and lse
    edit : changes the CUDA text, to see what a wrong kernel does

    Returns
    -------
    o, lse and, in backward, dq, dk, dv
    """
    arrays = dict(inputs)
    accumulation = np.dtype(problem.accumulation)

    def make(name: str, shape: tuple[int, ...], dtype: np.dtype) -> None:
        arrays[name] = np.full(shape, np.nan, dtype)

    b, h, s, d_v = problem.batch, problem.heads_q, problem.seqlen_q, problem.head_dim_v
    if "o" not in arrays:
        make("o", (b, s, h, d_v), arrays["q"].dtype)
        make("lse", (b, h, s), accumulation)
        _run("forward", problem, arrays, captures, arch, reverse, edit)
    if "do" in arrays:
        for name in "qkv":
            make(f"d{name}", arrays[name].shape, arrays["q"].dtype)
        _run("backward", problem, arrays, captures, arch, reverse, edit)
    return {name: arrays[name] for name in ("o", "lse", "dq", "dk", "dv") if name in arrays}


def _run(
    name: str,
    problem: Problem,
    arrays: dict[str, np.ndarray],
    captures: Sequence[np.ndarray],
    arch: int,
    reverse: bool,
    edit: Callable[[str], str],
) -> None:
    config = plan.simt_config(
        name, problem.dtype, problem.head_dim, problem.head_dim_v, plan.shared_limit_of(arch)
    )
    text = launch.call_text(problem)
    kernels = build(edit(source.text(config, text)))
    for workspace, shape, dtype in launch.workspaces(problem, name == "backward"):
        arrays[workspace] = np.full(shape, -1 if dtype == "int64" else np.nan, dtype)
    views = {each: _view(array) for each, array in arrays.items()}
    words: list[int] = []
    if text is not None:
        tables = arrays.get("tables")
        pointer = 0 if tables is None else tables.ctypes.data
        words = text.pack(problem, [_view(array) for array in captures], pointer)
        if text.tables:
            kernels.launch("tabulate", launch.pack(problem, views, words), 2, 128, reverse)
    params = launch.pack(problem, views, words)
    for kernel, grid in launch.grids(config, problem).items():
        # fewer blocks than items: the grid-stride loop is walked too
        kernels.launch(kernel, params, (grid + 1) // 2, config.threads, reverse)


def _view(array: np.ndarray) -> View:
    return take({"array": array})[1]["array"]
