"""Every row of the plan's table compiled by NVRTC for every architecture; needs no GPU.

Threads compile side by side: NVRTC works in parallel. Run with `-rP` to see what ptxas reports.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import nvrtc
import pytest
from cases import Case
from test_kernels_cpu import problem_of

from cuflash import plan, simt
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
        used = pool.map(lambda each: nvrtc.compile_text(each[2], each[1], source.OPTIONS), texts)
        results = {(name, arch): usage for (name, arch, _), usage in zip(texts, used)}
    for (name, arch), kernels in results.items():
        for kernel, usage in kernels.items():
            print(f"sm_{arch:<4}{name:<58}{kernel:<10}{usage}")
    return results


def named(config: Config) -> str:
    return (
        f"{config.kernel} {config.dtype} d {config.head_dim} tile {config.block_q}x{config.block_k}"
        f" shared {config.shared_bytes}"
    )


@pytest.mark.parametrize("arch", ARCHS)
def test_every_row_compiles(arch: int) -> None:
    """Each row at its widest; the dtypes of the same sums take turns from arch to arch."""
    turn = ARCHS.index(arch)
    by_row: dict[tuple, list[Config]] = {}
    for config in plan.configs_for(arch):
        row = (config.kernel, config.dtype == "float64", config.head_dim)
        by_row.setdefault(row, []).append(config)
    configs = [row[(turn + at) % len(row)] for at, row in enumerate(by_row.values())]
    results = compile_all([(named(config), arch, source.text(config)) for config in configs])
    for (name, _), kernels in results.items():
        assert set(kernels) == set(schedule.KERNELS[name.split()[0]])
    for config in configs:
        assert config.shared_bytes <= shared_limit_of(arch)


@pytest.mark.parametrize("head_dim", [64, 128])
def test_tuned_tiles_do_not_spill(head_dim: int) -> None:
    texts = []
    for kernel in schedule.KERNELS:
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
        for kernel in schedule.KERNELS
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
        for kernel in schedule.KERNELS
    ]
    texts = [
        (named(each), arch, source.text(each, text, problem.deterministic)) for each in configs
    ]
    for config, kernels in zip(configs, compile_all(texts).values(), strict=True):
        assert set(kernels) == set(schedule.kernels(config, text, problem.deterministic))


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
    case = Case()
    with pytest.raises(Unsupported, match=r"7\.5 or newer, this GPU has 7\.0"):
        plan.choose(problem_of(case, case.inputs()), "forward", 70)
