"""One launch: the parameter block, the grid, the workspaces, the caller's stream and device."""

from __future__ import annotations

import ctypes
import struct
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from cuflash import family
from cuflash.arrays import Device, View
from cuflash.errors import Unsupported
from cuflash.expr.text import CallText, emit
from cuflash.gpu import module, source
from cuflash.plan import Config, choose
from cuflash.problem import Problem

# The fields of struct Params in kernels_cu/params.cuh, in order; a test compares the two.
FIELDS = (
    *("q", "k", "v", "o", "lse", "do", "dq", "dk", "dv", "dlse", "delta"),
    *("batch", "heads_q", "heads_k", "seqlen_q", "seqlen_k", "q_offset", "scale", "words"),
)
ROWS = ("lse", "dlse", "delta")  # (batch, heads_q, seqlen_q); the other views have four axes
KERNELS = {"forward": ("forward",), "backward": ("delta", "dk_dv", "dq")}

_ABSENT = {name: (0,) * (4 if name in ROWS else 5) for name in FIELDS[:11]}
_MAX_GRID = 2**31 - 1  # blocks of a one-dimensional grid; kernels loop over what is left
_MAX_PARAMS = 4096  # bytes that a kernel may be passed
_TABULATE_THREADS = 128


def forward(
    problem: Problem, views: Mapping[str, View], captures: Sequence[View], stream: int
) -> None:
    """Launch forward: q, k, v -> o and, where it is among the views, lse.

    Parameters
    ----------
    views : by name; q, k, v, o (batch, seqlen, heads, dim), lse (batch, heads, seqlen), and what
        `workspaces` asks for, all on one device
    captures : the arrays that the mask captured, on the same device
    stream : raw pointer of the stream to launch on
    """
    _run("forward", problem, views, captures, stream)


def backward(
    problem: Problem, views: Mapping[str, View], captures: Sequence[View], stream: int
) -> None:
    """Launch backward: do, q, k, v, o, lse and perhaps dlse -> dq, dk, dv; as `forward`."""
    _run("backward", problem, views, captures, stream)


def workspaces(problem: Problem, backward: bool) -> list[tuple[str, tuple[int, ...], str]]:
    """Name, shape and dtype of what the caller has to allocate; written before it is read."""
    specs: list[tuple[str, tuple[int, ...], str]] = []
    if backward:
        rows = problem.batch, problem.heads_q, problem.seqlen_q
        specs.append(("delta", rows, problem.accumulation))
    text = call_text(problem)
    if text is not None and text.tables:
        specs.append(("tables", (max(1, text.table_elements(problem)),), "int64"))
    return specs


def prepare(problem: Problem, device: int, backward: bool) -> None:
    """Compile and load the kernels of a pass, so that a call does not wait for it."""
    _kernels("backward" if backward else "forward", problem, device)


def config_for(problem: Problem, device: int, backward: bool) -> Config:
    """The Config that a pass of this problem runs with on a device."""
    arch, shared_limit = module.device_limits(device)
    plan = choose(problem, arch, shared_limit, family.forced())
    return plan.backward if backward else plan.forward


def describe(
    problem: Problem, device: Device, backward: bool
) -> tuple[str, tuple[int, int], tuple[str, ...]]:
    """For `explain`: the kernel's name, its tile as (block_q, block_k), why no faster family."""
    arch, shared_limit = module.device_limits(device.index)
    plan = choose(problem, arch, shared_limit, family.forced())
    config = config_for(problem, device.index, backward)
    name = f"{config.family} on {device}, compute capability {arch / 10}"
    return name, (config.block_q, config.block_k), plan.reasons


def pack(problem: Problem, views: Mapping[str, View], words: Sequence[int] = ()) -> bytes:
    """The parameter block: pointer and strides (in elements) of each view, sizes, words."""
    values: list[Any] = []
    for name, absent in _ABSENT.items():
        view = views.get(name)
        values += absent if view is None else (view.pointer, *view.strides)
    values += (
        problem.batch, problem.heads_q, problem.heads_k, problem.seqlen_q, problem.seqlen_k,
        problem.q_offset, problem.scale,
    )  # fmt: skip
    values += words or (0,)
    return _layout(len(words) or 1).pack(*values)


def grids(config: Config, problem: Problem) -> dict[str, int]:
    """Blocks of each kernel of a Config; 0 where there is nothing to do."""
    tiles_q, tiles_k = (  # of the tokens that a block owns
        -(-seqlen // config.block_q) for seqlen in (problem.seqlen_q, problem.seqlen_k)
    )
    heads_q, heads_k = problem.batch * problem.heads_q, problem.batch * problem.heads_k
    rows = -(-heads_q * problem.seqlen_q // (config.threads // 32))
    blocks = {"delta": rows, "dk_dv": heads_k * tiles_k}
    blocks["forward"] = blocks["dq"] = heads_q * tiles_q
    return {name: min(blocks[name], _MAX_GRID) for name in KERNELS[config.kernel]}


@dataclass(frozen=True)
class _Kernels:
    config: Config
    text: CallText | None
    functions: dict[str, Any]  # CuPy functions by name


class _Stream:
    """What a CuPy function reads of a stream."""

    __slots__ = ("ptr",)

    def __init__(self, ptr: int) -> None:
        self.ptr = ptr


class _Block(threading.local):
    """A parameter block of each thread, at an address that stays."""

    def __init__(self) -> None:
        from cupy.cuda.function import CPointer

        self.buffer = (ctypes.c_char * _MAX_PARAMS)()
        self.bytes = memoryview(self.buffer).cast("B")
        self.args = (CPointer(ctypes.addressof(self.buffer)),)


_cache: dict[tuple[Any, ...], _Kernels] = {}
_texts: dict[tuple[Any, ...], CallText] = {}


def _run(
    name: str, problem: Problem, views: Mapping[str, View], captures: Sequence[View], stream: int
) -> None:
    from cuflash.arrays.cupy import on_device

    device = views["q"].device.index
    with on_device(device):
        kernels = _kernels(name, problem, device, stream)
        words: Sequence[int] = ()
        tables = views.get("tables")
        if kernels.text is not None:
            pointer = 0 if tables is None else tables.pointer
            words = kernels.text.pack(problem, captures, pointer)
        params = pack(problem, views, words)
        block = _block()
        block.bytes[: len(params)] = params
        on = _Stream(stream)
        config = kernels.config
        if tables is not None:
            elements = tables.shape[0] // 2
            grid = max(1, min(-(-elements // _TABULATE_THREADS), 1024))
            kernels.functions["tabulate"]((grid,), (_TABULATE_THREADS,), block.args, 0, on)
        for kernel, grid in grids(config, problem).items():
            if grid > 0:
                shared = 0 if kernel == "delta" else config.shared_bytes
                kernels.functions[kernel]((grid,), (config.threads,), block.args, shared, on)


def _kernels(name: str, problem: Problem, device: int, stream: int | None = None) -> _Kernels:
    """Loaded kernels of a pass, kept by what they depend on."""
    key = (
        name, device, problem.dtype, problem.head_dim, problem.head_dim_v,
        problem.expression_key, family.forced(),
    )  # fmt: skip
    kernels = _cache.get(key)
    if kernels is None:
        _refuse_capture(stream)
        kernels = _cache[key] = _load(name, problem, device)
    return kernels


def _load(name: str, problem: Problem, device: int) -> _Kernels:
    from cuflash.arrays.cupy import on_device

    config = config_for(problem, device, name == "backward")
    text = call_text(problem)
    names = list(KERNELS[name])
    if text is not None and text.tables:
        names.append("tabulate")
    if text is not None and len(pack(problem, {}, (0,) * len(text.words))) > _MAX_PARAMS:
        raise Unsupported(
            f"mask and score have {len(text.words)} operands (arrays, strides, numbers); the "
            f"parameters of a kernel are limited to {_MAX_PARAMS} bytes: put numbers into one "
            "captured array"
        )
    with on_device(device):
        functions = module.load(source.text(config, text), names, config.shared_bytes, device)
    return _Kernels(config, text, functions)


def _refuse_capture(stream: int | None) -> None:
    from cuflash.arrays.cupy import is_capturing

    if stream is not None and is_capturing(stream):
        raise RuntimeError(
            "the stream is capturing a CUDA graph and the kernels of this call are not compiled "
            "yet: call cuflash.warmup, or the call itself, once before the capture"
        )


def call_text(problem: Problem) -> CallText | None:
    """The CUDA text of the problem's expressions, None without any; kept by structure."""
    key = problem.expression_key
    if key is None:
        return None
    if key not in _texts:
        if len(_texts) >= 256:
            _texts.clear()
        _texts[key] = emit(*problem.expressions, problem.index_bits)
    return _texts[key]


@cache
def _block() -> _Block:
    return _Block()


@cache
def _layout(words: int) -> struct.Struct:
    numbers = sum(map(len, _ABSENT.values())) + 6
    return struct.Struct(f"<{numbers}qd{words}q")
