"""What `explain` tells: the kernel a call would run, its memory and work, and why no faster one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

import numpy as np

from cuflash import cost, cpu
from cuflash.arrays import Device, View
from cuflash.call import Pass
from cuflash.expr.bounds import TileMask
from cuflash.problem import Problem


@dataclass(frozen=True)
class Explanation:
    """One call as it would run; str() is the report.

    kernel : back end and kernel family
    tile : (block_q, block_k)
    tiles : (computed, of these without the mask, all); None where an array that the mask reads is
        on the device or traced, so that counting would mean a copy
    output_bytes, workspace_bytes : what a call allocates by the caller's library; nothing else
    flops : of the matrix products, on the pairs of computed tiles (of all pairs if not counted)
    moved_bytes : a model: each input read and each output written once
    copies : inputs that are copied first, and why
    reasons : why no faster kernel
    """

    title: str
    kernel: str
    tile: tuple[int, int]
    tiles: tuple[int, int, int] | None
    output_bytes: int
    workspace_bytes: int
    flops: float
    moved_bytes: int
    copies: tuple[str, ...]
    reasons: tuple[str, ...]

    def __str__(self) -> str:
        rows = [("kernel", f"{self.kernel}, tiles of {self.tile[0]} queries x {self.tile[1]} keys")]
        if self.tiles is None:
            rows.append(("tiles", "not counted: the mask reads arrays on the device"))
        else:
            computed, whole, total = self.tiles
            share = computed / max(total, 1)
            rows.append(("tiles", f"{computed:,} of {total:,} ({share:.1%}), {whole:,} unmasked"))
        rows += [
            ("outputs", f"{self.output_bytes:,} bytes"),
            ("workspace", f"{self.workspace_bytes:,} bytes"),
            ("work", f"{self.flops:.3g} FLOP in matrix products"),
            ("moved", f"{self.moved_bytes:,} bytes at least (a model)"),
            ("copies", "; ".join(self.copies) or "none"),
        ]
        rows += [("why", reason) for reason in self.reasons]
        return "\n".join([self.title, *(f"  {name:<10} {text}" for name, text in rows)])


def report(step: Pass, views: Mapping[str, View]) -> Explanation:
    """The explanation of one pass on the caller's arrays."""
    problem, device, backward = step.problem, views["q"].device, step.is_backward
    kernel, tile, reasons = _kernel(step, device)
    tiles = _count_tiles(problem, tile)
    share = 1.0 if tiles is None else tiles[0] / max(tiles[2], 1)
    pairs = problem.batch * problem.heads_q * problem.seqlen_q * problem.seqlen_k * share
    dims = problem.head_dim, problem.head_dim_v
    way = "fused" if device.kind == "cpu" else "split"
    flops = cost.backward_flops(pairs, *dims, way) if backward else cost.forward_flops(pairs, *dims)
    output_bytes = sum(_bytes(shape, dtype) for _, shape, dtype in step.outputs)
    inputs = sum(_bytes(view.shape, view.dtype) for view in views.values())
    name = "attention_backward" if backward else "attention"
    return Explanation(
        title=f"cuflash.{name} on {device}: {_title(problem)}",
        kernel=kernel,
        tile=tile,
        tiles=tiles,
        output_bytes=output_bytes,
        workspace_bytes=sum(_bytes(shape, dtype) for shape, dtype in step.workspaces(device)),
        flops=flops,
        moved_bytes=inputs + output_bytes,
        copies=(),
        reasons=reasons,
    )


def _title(problem: Problem) -> str:
    text = (
        f"batch {problem.batch}, heads {problem.heads_q}:{problem.heads_k}, seqlen "
        f"{problem.seqlen_q} x {problem.seqlen_k}, head_dim {problem.head_dim}:"
        f"{problem.head_dim_v}, {problem.dtype}"
    )
    named = zip(("mask", "score", "sink"), problem.expressions, strict=True)
    return ", ".join([text, *(name for name, expression in named if expression is not None)])


def _kernel(step: Pass, device: Device) -> tuple[str, tuple[int, int], tuple[str, ...]]:
    if device.kind != "cuda":
        reason = "the arrays are in host memory: a GPU runs arrays that are on it"
        return "cpu (tiled NumPy, BLAS products)", cpu.blocks(step.problem), (reason,)
    return step.describe(device)


def _count_tiles(problem: Problem, tile: tuple[int, int]) -> tuple[int, int, int] | None:
    """Tiles computed, of these unmasked, and all, over batch and heads."""
    tiles_q, tiles_k = -(-problem.seqlen_q // tile[0]), -(-problem.seqlen_k // tile[1])
    heads = problem.batch * problem.heads_q
    total = heads * tiles_q * tiles_k
    if problem.mask is None or not total:
        return total, total, total
    captures = [captured.array for captured in problem.mask.arrays]
    if not all(isinstance(array, np.ndarray) for array in captures):
        return None
    mask = TileMask(problem.mask, captures, problem, *tile)
    items = range(problem.batch if mask.depends_on_batch else 1)
    of_head = range(problem.heads_q if mask.depends_on_head else 1)
    states = np.zeros(3, np.int64)
    for b in items:
        for h in of_head:
            for tile_q in range(tiles_q):
                states += np.bincount(mask.states(b, h, tile_q), minlength=3)
    states *= heads // (len(items) * len(of_head))
    return int(states[1] + states[2]), int(states[2]), total


def _bytes(shape: tuple[int, ...], dtype: str) -> int:
    return prod(shape) * {"float64": 8, "int64": 8, "float32": 4}.get(dtype, 2)
