"""Scores, sinks and gradients of parameters by the simt kernels, run on a CPU by the emulator."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from cases import MASKS, Case
from scores import SCORES, Scored
from test_kernels_cpu import Named, cast, emulator
from tolerance import Judge

from cuflash.problem import make

pytestmark = pytest.mark.skipif(
    emulator.compiler() is None, reason="g++ is not installed: the emulator needs it"
)

SMALL = Case(seqlen_q=70, seqlen_k=91, batch=2, heads_q=4, heads_k=2)


def run(case: Case, *, deterministic: bool = False, **options) -> dict[str, np.ndarray]:
    """Both passes by the kernels; gradients of parameters by name."""
    arrays = cast(case, case.inputs())
    params = Scored(case).params(np.asarray)
    call = MASKS[case.mask].options(case, np.asarray) | SCORES[case.score].options(params)
    named = (Named(arrays[name], case.dtype) for name in "qkv")
    problem = make(*named, **call, deterministic=deterministic)[0]
    captures = [captured.array for captured in problem.captured]
    results = emulator.attention(problem, arrays, captures=captures, **options)
    order = [param for e in (problem.score, problem.sink) if e is not None for param in e.params]
    for i, param in enumerate(order):
        name = next(name for name, each in params.items() if each is param)
        results[name] = results.pop(f"dparam{i}")
    return results


def check(case: Case, **options) -> dict[str, np.ndarray]:
    """Run and judge everything; NaN never passes."""
    results = run(case, **options)
    judge = Judge.of(case, case.inputs())
    names = ("o", "lse", "dq", "dk", "dv")
    judge.check(**{name: results[name] for name in names})
    judge.check_params(**{name: x for name, x in results.items() if name not in names})
    return results


@pytest.mark.parametrize("score", ["softcap", "bias-heads", "table", "number", "functions", "sink"])
def test_scores(score: str) -> None:
    check(replace(SMALL, score=score))


@pytest.mark.parametrize("dtype", ["bfloat16", "float64"])
def test_everything_at_once(dtype: str) -> None:
    check(replace(SMALL, dtype=dtype, score="chain-sink", mask="array-empty-rows", seqlen_q=40))


def test_tiles_in_segments_count_each_pair_once(monkeypatch: pytest.MonkeyPatch) -> None:
    case = replace(SMALL, score="chain-sink", mask="local-global", seqlen_q=260, seqlen_k=300)
    check(replace(case, batch=1, heads_q=2, heads_k=1), blocks=16)


def test_deterministic_gradients_are_the_same_bits_in_any_order() -> None:
    case = replace(SMALL, score="chain-sink", mask="causal", dtype="float16")
    first = check(case, deterministic=True)
    again = run(case, deterministic=True, reverse=True, grid=lambda grid: 1)
    for name, array in first.items():
        np.testing.assert_array_equal(array, again[name], err_msg=name)
