"""What of the sm90 family needs no GPU: intervals of masks, readable arrays, printed text."""

from __future__ import annotations

import re
from itertools import product
from typing import Any

import numpy as np
import pytest
from cases import MASKS, Case
from test_kernels_cpu import problem_of

import cuflash
from cuflash import sm90
from cuflash.arrays import View
from cuflash.arrays.base import CPU
from cuflash.expr.expression import Expression
from cuflash.expr.interval import row_interval
from cuflash.gpu import tensor_map, wgmma

INTERVALS = {"causal", "top-left", "window", "window-left", "prefix", "intervals", "nothing"}


def ends_of(problem: Any, b: int, row: int) -> tuple[int, int] | None:
    """The interval of a query, by evaluating the printed ends in Python."""
    mask = problem.mask
    found = row_interval(mask.root)
    if found is None:
        return None
    ends, read = found
    env = {"b": b, "h": 0, "q": row + problem.q_offset, "row": row}
    parts = [Expression(node) for node in read]
    loaded = [[mask.arrays[mask.slot(each)].array for each in part.arrays] for part in parts]
    values = [int(part.evaluate(env, arrays)) for part, arrays in zip(parts, loaded)]
    first = -(1 << 62) if ends.first is None else python(ends.first.format(*values))
    return first, 1 << 62 if ends.end is None else python(ends.end.format(*values))


def python(text: str) -> int:
    """The value of CUDA text made of integers, maximum, minimum and conditions."""
    text = text.replace("(long long)", "").replace("1ll", "1")
    text = re.sub(r"\((\w+) \? (\(.*?\)) : (\(.*?\))\)", r"(\2 if \1 else \3)", text)
    return int(eval(text, {"maximum": max, "minimum": min}))


@pytest.mark.parametrize("mask", [mask for mask in MASKS if mask != "none"])
def test_intervals_are_the_attended_keys(mask: str) -> None:
    case = Case(mask=mask, seqlen_q=70, seqlen_k=80)
    problem = problem_of(case, case.inputs())
    allowed = np.broadcast_to(case.allowed(), case.pairs)
    found = row_interval(problem.mask.root)
    assert (found is not None) == (mask in INTERVALS)
    if found is None:
        return
    keys = np.arange(case.seqlen_k)
    for b, row in product(range(case.batch), range(case.seqlen_q)):
        first, end = ends_of(problem, b, row)
        np.testing.assert_array_equal((keys >= first) & (keys < end), allowed[b, 0, row])


def test_which_masks_are_intervals() -> None:
    for allows, is_interval in (
        (lambda b, h, q, k: (k <= q) & (q % 2 == 0), True),
        (lambda b, h, q, k: ~(k > q), True),
        (lambda b, h, q, k: ~((k > q) | (k < q - 3)), True),
        (lambda b, h, q, k: (k <= q) | (k >= q + 9), False),  # a gap
        (lambda b, h, q, k: k % 2 == 0, False),
        (lambda b, h, q, k: 2 * k <= q, False),  # not a bare key
        (lambda b, h, q, k: k + 0 <= q, False),
        (lambda b, h, q, k: (q < 5) | (k <= q), True),
    ):
        q = np.zeros((1, 30, 1, 8), np.float16)
        call = cuflash.call.Call(q, q, q, _options(cuflash.Mask(allows)))
        problem = call.problem
        assert (row_interval(problem.mask.root) is not None) == is_interval
        if is_interval:
            want = cuflash.Mask(allows).to_array(30, 30)
            keys = np.arange(30)
            for row in range(30):
                first, end = ends_of(problem, 0, row)
                np.testing.assert_array_equal((keys >= first) & (keys < end), want[0, 0, row])


def _options(mask: Any) -> dict[str, Any]:
    names = ("window", "bias", "score", "softcap", "sink", "scale", "positions", "deterministic")
    return {"causal": False, "layout": "bshd", **dict.fromkeys(names), "mask": mask}


def view(shape: tuple[int, ...], strides: tuple[int, ...], pointer: int = 1 << 20) -> View:
    return View(pointer, shape, strides, "float16", CPU, None, None)


def test_which_arrays_the_copy_engine_reads() -> None:
    shape = (2, 100, 4, 64)
    for strides, pointer, is_readable in (
        ((25600, 256, 64, 1), 1 << 20, True),
        ((25600, 64, 6400, 1), 1 << 20, True),  # heads outside
        ((25600, 512, 64, 1), 1 << 20, True),  # every second token
        ((25600, 256, 64, 1), (1 << 20) + 2, False),  # misaligned
        ((25600, 256, 64, 2), 1 << 20, False),  # numbers apart
        ((25600, -256, 64, 1), 1 << 20, False),  # reversed
        ((25600, 256, 0, 1), 1 << 20, False),  # broadcast
        ((25600, 260, 65, 1), 1 << 20, False),  # rows of 130 bytes
    ):
        assert tensor_map.is_readable(view(shape, strides, pointer)) == is_readable, strides
    assert tensor_map.is_readable(view((1, 100, 1, 64), (0, 64, 0, 1)))  # a step never taken


def test_registers_of_a_block_are_what_it_is_launched_with() -> None:
    """Else `setmaxnreg` waits for registers that nobody gives back."""
    for config in sm90.widest_configs():
        total = config.registers_load + config.warpgroups * config.registers_compute
        launched = 65536 // config.threads // 8 * 8 * (config.warpgroups + 1)
        assert total <= launched
        assert config.registers_load % 8 == config.registers_compute % 8 == 0
        assert config.shared_bytes <= 232448
        assert config.block_q % 64 == 0 and config.block_k % 16 == 0
        if isinstance(config, sm90.Sm90Forward):
            assert not config.pingpong or config.warpgroups == 2


def test_printed_instructions_name_every_register() -> None:
    text = wgmma.ss(16, "bfloat16") + wgmma.rs(32, "float16")
    assert "m64n16k16.f32.bf16.bf16 {%0, %1, %2, %3, %4, %5, %6, %7}, %8, %9, add" in text
    assert "setp.ne.b32 add, %10, 0" in text
    assert "m64n32k16.f32.f16.f16" in text and "{%16, %17, %18, %19}, %20, add, 1, 1, 1" in text
