"""The simt kernels on a CPU: their flattened text, compiled by g++ with `cuda.hpp` for CUDA."""

from __future__ import annotations

import ctypes
import hashlib
import os
import re
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path

HEADER = Path(__file__).with_name("cuda.hpp")
FLAGS = ("-std=c++17", "-O2", "-march=native", "-ffp-contract=off", "-fPIC", "-shared", "-w")
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
            subprocess.run(
                [compiler() or "g++", *FLAGS, "-o", str(made), str(source)],
                check=True,
                capture_output=True,
                text=True,
            )
            os.replace(made, library)  # atomic: another process may build the same
    return Emulated(ctypes.CDLL(str(library)))
