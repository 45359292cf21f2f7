"""One launch: the parameter block, the grid, the workspaces, the caller's stream and device."""

from __future__ import annotations

import ctypes
import itertools
import random
import struct
import threading
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

from cuflash import family
from cuflash.arrays import View
from cuflash.arrays.cupy import on_device
from cuflash.config import Config
from cuflash.errors import Unsupported
from cuflash.expr.text import CallText, emit
from cuflash.gpu import module, schedule, source, tensor_map
from cuflash.plan import choose
from cuflash.problem import Problem
from cuflash.sm90 import Sm90Config

# The fields of struct Params in kernels_cu/params.cuh, in order; a test compares the two.
FIELDS = (
    *("q", "k", "v", "o", "lse", "do", "dq", "dk", "dv", "dlse", "delta", "lse2"),
    *("order_q", "order_k", "partials", "slots", "sums", "maxima", "turns", "dq_sums"),
    *("batch", "heads_q", "heads_k", "seqlen_q", "seqlen_k", "q_offset"),
    *("group", "launch", "scale", "words"),
)
ROWS = ("lse", "dlse", "delta", "lse2")  # (batch, heads_q, seqlen_q); others have four axes

_VIEWS = FIELDS.index("order_q")  # as many views lead them
_ABSENT = {name: (0,) * (4 if name in ROWS else 5) for name in FIELDS[:_VIEWS]}
_numbers = itertools.count(random.SystemRandom().getrandbits(61) | 1)  # of launches (turns.cuh)
_MAX_PARAMS = 4096  # bytes that a kernel may be passed
_MAX_WORDS = _MAX_PARAMS - 4 * tensor_map.BYTES - 64


class Launch:
    """One pass of one problem on one device, ready to run on any arrays.

    Attributes
    ----------
    workspaces : name, shape and dtype of what the caller has to allocate beside the outputs; always
        written before it is read
    """

    def __init__(
        self, problem: Problem, device: int, backward: bool, is_readable: bool = True
    ) -> None:
        self._problem, self._device = problem, device
        self._kernel = "backward" if backward else "forward"
        limits = module.device_limits(device)
        self._plan = choose(problem, self._kernel, *limits, family.forced(), is_readable)
        self._blocks = module.multiprocessors(device) * self._plan.config.blocks_per_sm
        self._text = call_text(problem)
        self._launches: list[tuple[Any, ...]] | None = None  # function, grid, block, shared bytes
        self.workspaces = workspaces(self._plan.config, problem, self._blocks)

    def __call__(self, views: Mapping[str, View], captured: Sequence[View], stream: int) -> None:
        """Launch the kernels.

        Parameters
        ----------
        views : by name; q, k, v, o, do, dq, dk, dv (batch, seqlen, heads, dim), lse and dlse
            (batch, heads, seqlen), and the workspaces, all on the device
        captured : the arrays of `problem.captured`, on the device
        stream : raw pointer of the stream to launch on
        """
        self.launch(self.params(views, captured), stream)

    def params(self, views: Mapping[str, View], captured: Sequence[View]) -> bytes:
        """The argument of the kernels."""
        words: Sequence[int] = ()
        if self._text is not None:
            tables = views.get("tables")
            pointer = 0 if tables is None else tables.pointer
            words = self._text.pack(self._problem, captured, pointer, _gradients(views))
        return self.maps(views) + pack(self._problem, views, words)

    def maps(self, views: Mapping[str, View]) -> bytes:
        """What stands at the head of the sm90 family's argument: tensor maps of q, k, v[, do]."""
        config = self._plan.config
        if not isinstance(config, Sm90Config):
            return b""
        boxes = config.boxes.items()
        return b"".join(tensor_map.encode(views[name], n) for name, n in boxes if name in views)

    def launch(self, params: bytes | bytearray, stream: int) -> None:
        """Launch the kernels with this argument."""
        with on_device(self._device):
            if self._launches is None:
                _refuse_capture(stream)
                self._launches = self._load()
            block = _block()
            block.bytes[: len(params)] = params
            on = _Stream(stream)
            for function, grid, threads, shared_bytes in self._launches:
                function(grid, threads, block.args, shared_bytes, on)

    def prepare(self) -> None:
        """Compile and load the kernels, so that a call does not wait for it."""
        with on_device(self._device):
            if self._launches is None:
                self._launches = self._load()

    def describe(self) -> tuple[str, tuple[int, int], tuple[str, ...]]:
        """The kernel family, its tile as (block_q, block_k), and why no faster family."""
        config = self._plan.config
        arch = module.device_limits(self._device)[0]
        name = f"{config.family} (compute capability {arch / 10})"
        return name, (config.block_q, config.block_k), self._plan.reasons

    def _load(self) -> list[tuple[Any, ...]]:
        config, text = self._plan.config, self._text
        if text is not None and _layout(len(text.words)).size > _MAX_WORDS:
            raise Unsupported(
                f"mask and score have {len(text.words)} operands (arrays, strides, numbers); the "
                f"parameters of a kernel are limited to {_MAX_PARAMS} bytes: put numbers into one "
                "captured array"
            )
        deterministic = self._problem.deterministic
        units = [
            (source.text(config, text, deterministic, (part,)), names)
            for part, names in schedule.parts(config, text, deterministic).items()
        ]
        options = source.options(config)
        functions = module.load_all(units, options, config.shared_bytes, self._device)
        return [
            (functions[step.kernel], (step.grid,), (step.threads,), step.shared_bytes)
            for step in schedule.steps(config, self._problem, text, self._blocks)
        ]


def workspaces(
    config: Config, problem: Problem, blocks: int
) -> list[tuple[str, tuple[int, ...], str]]:
    """Name, shape and dtype of what a pass needs beside its outputs.

    blocks : that the GPU holds at a time
    """
    text = call_text(problem)
    specs = schedule.workspaces(config, problem, text, blocks)
    if config.kernel == "backward":
        rows = problem.batch, problem.heads_q, schedule.rows_of_head(config, problem)
        specs.append(("delta", rows, problem.accumulation))
        if isinstance(config, Sm90Config):
            specs.append(("lse2", rows, "float32"))
            if "round_dq" in config.kernels:
                specs.append(("dq_sums", (*rows, config.padded[0]), "float32"))
    if text is not None and text.tables:
        specs.append(("tables", (max(1, text.table_elements(problem)),), "int64"))
    return specs


def pack(problem: Problem, views: Mapping[str, View], words: Sequence[int] = ()) -> bytes:
    """The parameter block: pointer and strides (in elements) of each view, sizes, words."""
    values: list[Any] = []
    for name, absent in _ABSENT.items():
        view = views.get(name)
        values += absent if view is None else (view.pointer, *view.strides)
    for name in FIELDS[_VIEWS : FIELDS.index("batch")]:
        view = views.get("partials" if name == "slots" else name)
        values.append(0 if view is None else view.shape[0] if name == "slots" else view.pointer)
    values += (
        problem.batch, problem.heads_q, problem.heads_k, problem.seqlen_q, problem.seqlen_k,
        problem.q_offset, schedule.heads_at_a_time(problem), next_number(), problem.scale,
    )  # fmt: skip
    values += words or (0,)
    return _layout(len(words) or 1).pack(*values)


def offset_of(name: str) -> int:
    """Bytes of the parameter block, without maps, before the address of a view or a field."""
    offset = 0
    for field in FIELDS:
        if field == name:
            return 8 * offset
        offset += len(_ABSENT.get(field, "."))
    raise KeyError(name)


def next_number() -> int:
    """A number that no other launch has."""
    return next(_numbers)


def _gradients(views: Mapping[str, View]) -> list[int]:
    """Addresses of the gradients of Params, in their order."""
    found: list[int] = []
    while (view := views.get(f"dparam{len(found)}")) is not None:
        found.append(view.pointer)
    return found


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


_texts: dict[tuple[Any, ...], CallText] = {}


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
        mask, score, sink = problem.expressions
        _texts[key] = emit(mask, score, sink, problem.index_bits)
    return _texts[key]


@cache
def _block() -> _Block:
    return _Block()


@cache
def _layout(words: int) -> struct.Struct:
    numbers = sum(map(len, _ABSENT.values())) + 16
    return struct.Struct(f"<{numbers}qd{words}q")
