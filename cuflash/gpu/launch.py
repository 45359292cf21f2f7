"""One launch: the parameter block, the grid, the workspaces, the caller's stream and device."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

from cuflash.arrays import View
from cuflash.problem import Problem

# The fields of struct Params in kernels_cu/params.cuh, in order, each of 8 bytes.
TENSORS = ("q", "k", "v", "o")
GRADIENTS = ("do", "dq", "dk", "dv")
_NO_TENSOR = (0,) * 5
_NO_ROWS = (0,) * 4


def pack(problem: Problem, views: Mapping[str, View], words: Sequence[int] = ()) -> bytes:
    """The parameter block: (batch, seqlen, heads, dim) tensors, (batch, heads, seqlen) rows."""
    values: list[Any] = []
    for name in TENSORS:
        values += _tensor(views.get(name))
    values += _rows(views.get("lse"))
    for name in GRADIENTS:
        values += _tensor(views.get(name))
    values += _rows(views.get("dlse"))
    values += _rows(views.get("delta"))
    values += (
        problem.batch, problem.heads_q, problem.heads_k, problem.seqlen_q, problem.seqlen_k,
        problem.q_offset, problem.scale,
    )  # fmt: skip
    values += words or (0,)
    return _layout(len(words) or 1).pack(*values)


def _tensor(view: View | None) -> tuple[int, ...]:
    return _NO_TENSOR if view is None else (view.pointer, *view.strides)


def _rows(view: View | None) -> tuple[int, ...]:
    return _NO_ROWS if view is None else (view.pointer, *view.strides)


@cache
def _layout(words: int) -> struct.Struct:
    count = 5 * (len(TENSORS) + len(GRADIENTS)) + 4 * 3 + 6
    return struct.Struct(f"<{count}qd{words}q")
