"""Every row of the plan's table compiled by NVRTC for every architecture; needs no GPU.

Threads compile side by side: NVRTC works in parallel. Run with `-rP` to see what ptxas reports.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import nvrtc
import pytest
from cases import Case
from test_kernels_cpu import problem_of

from cuflash import plan, simt, sm90
from cuflash.config import Config, shared_limit_of
from cuflash.errors import Unsupported
from cuflash.gpu import launch, schedule, source

pytestmark = pytest.mark.skipif(
    nvrtc.library() is None, reason="the package nvidia-cuda-nvrtc is not installed"
)

ARCHS = (75, 80, 86, 89, 90, 100, 120)
# Bytes stored and loaded: a few rows' states may be spilled around the products of a tile, where
# they cost nothing (64 x 128 multiply-adds a thread row stand against a dozen loads).
SPILL_LIMIT = 256


def compile_all(
    texts: Sequence[tuple[str, int, str]],
) -> dict[tuple[str, int], dict[str, nvrtc.Usage]]:
    """(name, arch, text) each -> registers, stack and spills of its kernels; prints them."""
    with ThreadPoolExecutor(2) as pool:
        used = pool.map(
            lambda each: nvrtc.compile_text(each[2], each[1], options_of(each[2])), texts
        )
        results = {(name, arch): usage for (name, arch, _), usage in zip(texts, used)}
    for (name, arch), kernels in results.items():
        for kernel, usage in kernels.items():
            print(f"sm_{arch:<4}{name:<58}{kernel:<10}{usage}")
    return results


def options_of(text: str) -> tuple[str, ...]:
    """Options of the compiler; a text with wgmma is for sm_90a."""
    return (*source.OPTIONS, "-arch=sm_90a") if "wgmma" in text else source.OPTIONS


def named(config: Config) -> str:
    return (
        f"{config.kernel} {config.family} {config.dtype} d {config.head_dim} "
        f"tile {config.block_q}x{config.block_k} shared {config.shared_bytes} {config.kernels}"
    )


@pytest.mark.parametrize("arch", ARCHS)
def test_every_row_compiles(arch: int) -> None:
    """Each row at its widest; the dtypes of the same sums take turns from arch to arch."""
    turn = ARCHS.index(arch)
    by_row: dict[tuple, list[Config]] = {}
    for config in plan.configs_for(arch):
        row = (named(replace(config, dtype="")), config.dtype == "float64")
        by_row.setdefault(row, []).append(config)
    configs = [row[(turn + at) % len(row)] for at, row in enumerate(by_row.values())]
    results = compile_all([(named(config), arch, source.text(config)) for config in configs])
    for config, kernels in zip(configs, results.values(), strict=True):
        assert set(kernels) == set(config.kernels)
        assert config.shared_bytes <= shared_limit_of(arch)


@pytest.mark.parametrize("head_dim", [64, 128])
def test_tuned_tiles_do_not_spill(head_dim: int) -> None:
    texts = []
    for kernel in ("forward", "backward"):
        for dtype in ("float32", "bfloat16"):
            limit = shared_limit_of(90)
            config = simt.simt_config(kernel, dtype, head_dim, head_dim, limit)
            texts.append((named(config), 90, source.text(config)))
    for kernels in compile_all(texts).values():
        assert all(usage.spills <= SPILL_LIMIT for usage in kernels.values()), kernels


@pytest.mark.parametrize("arch", [75, 90])
@pytest.mark.parametrize("mask", ["causal", "documents-causal", "array"])
def test_with_a_mask(arch: int, mask: str) -> None:
    case = Case(mask=mask)
    problem = problem_of(case, case.inputs())
    text = launch.call_text(problem)
    assert text is not None
    configs = [
        simt.simt_config(kernel, "float16", 64, 64, shared_limit_of(arch))
        for kernel in ("forward", "backward")
    ]
    results = compile_all([(named(each), arch, source.text(each, text)) for each in configs])
    for kernels in results.values():
        assert ("tabulate" in kernels) == bool(text.tables)


@pytest.mark.parametrize("arch", (75, 90, 120))
def test_with_everything(arch: int) -> None:
    """All features at once: an uneven mask, softcap, bias, slopes, a number by q - k, a sink."""
    case = Case(mask="local-global", score="chain-sink")
    problem = replace(problem_of(case, case.inputs()), deterministic=arch >= 90)
    text = launch.call_text(problem)
    assert text is not None and text.has_order and text.has_dsink and len(text.params) == 3
    configs = [
        simt.simt_config(kernel, "float16", 64, 64, shared_limit_of(arch))
        for kernel in ("forward", "backward")
    ]
    texts = [
        (named(each), arch, source.text(each, text, problem.deterministic)) for each in configs
    ]
    for config, kernels in zip(configs, compile_all(texts).values(), strict=True):
        assert set(kernels) == set(schedule.kernels(config, text, problem.deterministic))


@pytest.mark.parametrize("head_dim", [64, 128, 192, 256])
@pytest.mark.parametrize("mask", ["none", "causal", "window"])
def test_tensor_core_tiles_do_not_spill(mask: str, head_dim: int) -> None:
    """Of a warp that computes nothing; the one that loads keeps a few numbers of an owned tile."""
    texts = []
    for seqlen_k in (300, 10_000):
        sizes = {"seqlen_q": 2, "seqlen_k": seqlen_k, "batch": 1, "heads_q": 1, "heads_k": 1}
        dims = {"head_dim": head_dim, "head_dim_v": head_dim}
        case = Case(mask=mask, dtype="bfloat16", **dims, **sizes)
        problem = problem_of(case, case.inputs())
        config = sm90.sm90_config(problem)
        text = source.text(config, launch.call_text(problem), False, ("MAIN",))
        texts.append((f"{seqlen_k}", 90, text))
    for kernels in compile_all(texts).values():
        assert kernels["forward"].spills <= 200 and kernels["forward"].registers <= 168


@pytest.mark.parametrize("head_dim", [64, 128, 192, 256])
@pytest.mark.parametrize("mask", ["none", "causal"])
def test_tensor_core_gradients_do_not_spill(mask: str, head_dim: int) -> None:
    """Beside a few numbers of the warp that loads, as in forward."""
    texts = []
    for is_deterministic in (False, True):
        dims = {"head_dim": head_dim, "head_dim_v": head_dim, "seqlen_k": 300}
        case = Case(mask=mask, dtype="bfloat16", **dims)
        problem = replace(problem_of(case, case.inputs()), deterministic=is_deterministic)
        config = sm90.sm90_config(problem, "backward")
        for part in ("MAIN", "DK_DV"):
            text = source.text(config, launch.call_text(problem), is_deterministic, (part,))
            texts.append((f"{part} {is_deterministic}", 90, text))
    for kernels in compile_all(texts).values():
        for name in {"dk_dv", "dq"} & set(kernels):
            assert kernels[name].spills <= 120 and kernels[name].registers <= 168, kernels


@pytest.mark.parametrize("score", ["bias", "chain-sink"])
@pytest.mark.parametrize("head_dim", [64, 256])
@pytest.mark.parametrize("kernel", ["forward", "backward"])
def test_tensor_cores_with_scores(kernel: str, score: str, head_dim: int) -> None:
    dims = {"head_dim": head_dim, "head_dim_v": head_dim}
    case = Case(mask="local-global", score=score, dtype="float16", **dims)
    problem = problem_of(case, case.inputs())
    for is_deterministic in (False, True)[: 2 if kernel == "backward" else 1]:
        problem = replace(problem, deterministic=is_deterministic)
        text, config = launch.call_text(problem), sm90.sm90_config(problem, kernel)
        parts = schedule.parts(config, text, is_deterministic)
        texts = [(part, 90, source.text(config, text, is_deterministic, (part,))) for part in parts]
        for (part, _), kernels in compile_all(texts).items():
            assert set(kernels) == set(parts[part])


def test_a_wrong_text_names_its_file_and_line() -> None:
    config = simt.simt_config("forward", "float32", 8, 8, shared_limit_of(90))
    text = source.text(config).replace("probe = first_probe(p);", "probe = nought;")
    with pytest.raises(nvrtc.CompileError, match=r"simt/forward\.cu\(\d+\): error.*nought"):
        nvrtc.compile_text(text, 90, source.OPTIONS)


def test_what_has_no_kernel_says_why() -> None:
    with pytest.raises(Unsupported, match=r"head_dim 513 .* up to 512"):
        simt.simt_config("forward", "float16", 513, 64, 1 << 20)
    with pytest.raises(Unsupported, match=r"bytes of shared memory a block, this GPU has 16384"):
        simt.simt_config("forward", "float64", 64, 64, 16384)
    problem = problem_of(Case(), Case().inputs())
    with pytest.raises(Unsupported, match=r"sm90: for float16 and bfloat16, q is float32"):
        plan.choose(problem, "forward", 90, family="sm90")
    short = Case(dtype="float16", head_dim=20)
    problem = problem_of(short, short.inputs())
    for arch, is_readable, why in ((86, True, r"8\.6"), (90, True, "multiples of 8, got 20")):
        assert re.search(
            why, plan.choose(problem, "forward", arch, None, None, is_readable).reasons[0]
        )
    problem = replace(problem, head_dim=24, head_dim_v=24)
    assert "in place" in plan.choose(problem, "forward", 90, None, None, False).reasons[0]
    assert plan.choose(problem, "forward", 90).config.family == "sm90"
    assert plan.choose(problem, "forward", 90, family="simt").config.family == "simt"
    case = Case()
    with pytest.raises(Unsupported, match=r"7\.5 or newer, this GPU has 7\.0"):
        plan.choose(problem_of(case, case.inputs()), "forward", 70)
