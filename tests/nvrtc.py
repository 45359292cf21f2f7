"""NVRTC of the PyPI package through ctypes: compile a text and read what ptxas says about it."""

from __future__ import annotations

import ctypes
import importlib.util
import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path

_KERNEL = re.compile(
    r"Compiling entry function '(?P<name>\w+)'.*?"
    r"(?P<stack>\d+) bytes stack frame, (?P<stores>\d+) bytes spill stores, "
    r"(?P<loads>\d+) bytes spill loads.*?Used (?P<registers>\d+) registers",
    re.DOTALL,
)


@dataclass(frozen=True)
class Usage:
    """What one kernel takes of a thread: registers, bytes of stack and of spills."""

    registers: int
    stack: int
    spills: int


class CompileError(Exception):
    """The text does not compile; the message is the compiler's log."""


@cache
def library() -> ctypes.CDLL | None:
    """Libnvrtc of the installed nvidia-cuda-nvrtc, or None."""
    spec = importlib.util.find_spec("nvidia")
    for root in list(spec.submodule_search_locations or []) if spec else []:
        for path in sorted(Path(root).glob("**/libnvrtc.so*")):
            for builtins in path.parent.glob("libnvrtc-builtins.so*"):
                ctypes.CDLL(str(builtins), mode=ctypes.RTLD_GLOBAL)
            found = ctypes.CDLL(str(path))
            found.nvrtcGetErrorString.restype = ctypes.c_char_p
            return found
    return None


def compile_text(text: str, arch: int, options: tuple[str, ...] = ()) -> dict[str, Usage]:
    """Compile for sm_<arch>; the usage of each kernel by its name."""
    nvrtc = library()
    if nvrtc is None:
        raise RuntimeError("nvidia-cuda-nvrtc is not installed")
    program = ctypes.c_void_p()
    _check(
        nvrtc.nvrtcCreateProgram(ctypes.byref(program), text.encode(), b"cuflash", 0, None, None)
    )
    try:
        # ftz and the default space are what CuPy adds
        all_options = [*options, f"-arch=sm_{arch}", "-ftz=true", "--no-cache",
                       "--device-as-default-execution-space", "--ptxas-options=-v"]  # fmt: skip
        array = (ctypes.c_char_p * len(all_options))(*(o.encode() for o in all_options))
        status = nvrtc.nvrtcCompileProgram(program, len(all_options), array)
        size = ctypes.c_size_t()
        _check(nvrtc.nvrtcGetProgramLogSize(program, ctypes.byref(size)))
        log = ctypes.create_string_buffer(size.value)
        _check(nvrtc.nvrtcGetProgramLog(program, log))
        message = log.value.decode()
        if status:
            raise CompileError(message)
        return {found["name"]: _usage(found) for found in _KERNEL.finditer(message)}
    finally:
        nvrtc.nvrtcDestroyProgram(ctypes.byref(program))


def _usage(found: re.Match[str]) -> Usage:
    registers, stack, stores, loads = map(int, found.group("registers", "stack", "stores", "loads"))
    return Usage(registers, stack, stores + loads)


def _check(status: int) -> None:
    if status:
        nvrtc = library()
        raise RuntimeError(nvrtc.nvrtcGetErrorString(status).decode() if nvrtc else str(status))
