"""Masks and scores against FlexAttention and, where it has the case, cuDNN: same arrays, one run.

FlexAttention is compiled, its block mask made before the clock starts (a cost that cuflash has in
every call); tensors are PyTorch's for all. Results are compared before they are timed. On a CPU the
sizes shrink and nothing is compiled: that shows only that both compute the same.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

import cuflash

from .machine import Machine
from .report import Row

LIMIT = 3e-2  # norm of the difference between the two over the norm, bf16
Mods = dict[str, Any]  # mask_mod, score_mod of FlexAttention; is_causal, bias of cuDNN


@dataclass(frozen=True)
class Cell:
    """One pattern: `build(n, tensor)` gives the options of cuflash and the rival's functions."""

    name: str
    seqlen: int
    heads: int
    head_dim: int
    build: Callable[[int, Callable[[Any], Any]], tuple[dict[str, Any], Mods]]
    batch: int = 1


def _causal(n: int, tensor: Any) -> tuple[dict[str, Any], Mods]:
    return {"causal": True}, {"mask_mod": lambda b, h, i, j: j <= i, "is_causal": True}


def _window(n: int, tensor: Any) -> tuple[dict[str, Any], Mods]:
    return {"window": (1024, 0)}, {"mask_mod": lambda b, h, i, j: (j <= i) & (i - j <= 1024)}


def _documents(n: int, tensor: Any) -> tuple[dict[str, Any], Mods]:
    lengths = np.random.default_rng(0).integers(n // 32, n // 8, 64)
    ids = tensor(np.searchsorted(np.cumsum(lengths), np.arange(n), side="right").astype(np.int32))
    ours = {"mask": cuflash.Documents(ids), "causal": True}
    return ours, {"mask_mod": lambda b, h, i, j: (ids[i] == ids[j]) & (j <= i)}


def _prefix(n: int, tensor: Any) -> tuple[dict[str, Any], Mods]:
    ours = {"mask": cuflash.PrefixLM(n // 4)}
    return ours, {"mask_mod": lambda b, h, i, j: (j < n // 4) | (j <= i)}


def _globals(n: int, tensor: Any) -> tuple[dict[str, Any], Mods]:
    flags = np.zeros(n, bool)
    flags[50::100] = True
    order = cuflash.order.first(np.flatnonzero(flags), n)
    at, flag = tensor(order.positions), tensor(flags)
    near = cuflash.SlidingWindow(512, 512)
    ours = {"mask": near | cuflash.GlobalTokens(flag), "positions": at}

    def mask(b: Any, h: Any, i: Any, j: Any) -> Any:
        return ((at[i] - at[j]).abs() <= 512) | flag[at[i]] | flag[at[j]]

    return ours, {"mask_mod": mask}


def _cube(window: int, n: int, tensor: Any) -> tuple[dict[str, Any], Mods]:
    """A window around each voxel of a cube, moved inside at its faces, in tile order."""
    side = round(n ** (1 / 3))
    tile = (4, 4, 8) if side % 8 == 0 else (1, 1, 1)
    order = cuflash.order.tiles((side,) * 3, tile)
    at = tensor(order.positions)
    ours = {"mask": cuflash.Neighborhood((side,) * 3, window), "positions": at}

    def mask(b: Any, h: Any, i: Any, j: Any) -> Any:
        inside = None
        for step in (side * side, side, 1):
            q, k = at[i] // step % side, at[j] // step % side
            first = (q - window // 2).clamp(0, side - window)
            here = (first <= k) & (k < first + window)
            inside = here if inside is None else inside & here
        return inside

    return ours, {"mask_mod": mask}


def _alibi(n: int, tensor: Any) -> tuple[dict[str, Any], Mods]:
    slopes = tensor((2.0 ** -np.arange(1, 17)).astype(np.float32))
    ours = {"score": cuflash.ALiBi(slopes), "causal": True}
    score = lambda x, b, h, i, j: x - slopes[h] * (i - j).abs()  # noqa: E731
    return ours, {"score_mod": score, "mask_mod": lambda b, h, i, j: j <= i}


def _softcap(n: int, tensor: Any) -> tuple[dict[str, Any], Mods]:
    import torch

    ours = {"softcap": 30.0, "causal": True}
    score = lambda x, b, h, i, j: 30 * torch.tanh(x / 30)  # noqa: E731
    return ours, {"score_mod": score, "mask_mod": lambda b, h, i, j: j <= i}


def _pair_bias(n: int, tensor: Any) -> tuple[dict[str, Any], Mods]:
    bias = tensor(np.random.default_rng(1).standard_normal((4, n, n)).astype(np.float32))
    return {"bias": bias}, {"score_mod": lambda x, b, h, i, j: x + bias[h, i, j], "bias": bias}


CELLS = (
    Cell("causal", 16384, 16, 128, _causal),
    Cell("window 1024", 16384, 16, 128, _window),
    Cell("documents, causal", 32768, 16, 128, _documents),
    Cell("prefix", 16384, 16, 128, _prefix),
    Cell("local 512 + 1 % global first", 100_000, 2, 64, _globals),
    Cell("7^3 neighbourhood, tile order", 64**3, 1, 64, partial(_cube, 7)),
    Cell("ALiBi, causal", 16384, 16, 128, _alibi),
    Cell("softcap, causal", 16384, 16, 128, _softcap),
    Cell("pair bias", 2048, 4, 32, _pair_bias),
)


def run(machine: Machine, folder: Path) -> int:
    """Check, time, print, write; the number of cells that went wrong."""
    rows: list[Row] = []
    folder.mkdir(parents=True, exist_ok=True)
    for cell in CELLS:
        rows += measure(machine, cell)
        lines = _write(
            machine, rows, folder
        )  # after each: a run that is cut off leaves what it has
        print("\n".join(lines[-4:] if len(rows) > 2 else lines), flush=True)
    return sum(str(row["difference"]).startswith("wrong") for row in rows)


def _write(machine: Machine, rows: list[Row], folder: Path) -> list[str]:
    header = machine.header()
    page = [f"# Masks and scores against FlexAttention on {header['machine']}", ""]
    page += [f"* {name}: {header[name]}" for name in header if name != "machine"]
    page += [
        "",
        "| pattern | pass | cuflash ms | FlexAttention ms | ratio | cuDNN ms | difference |",
    ]
    page += ["|---|---|---|---|---|---|---|"]
    for row in rows:
        times = [row["ms"], row["flex_ms"], row["ratio"], row["cudnn_ms"]]
        texts = [f"{x:.3f}" if x is not None else "-" for x in times]
        page.append(
            f"| {row['cell']} | {row['pass']} | {' | '.join(texts)} | {row['difference']} |"
        )
    ratios = [row["ratio"] for row in rows if row["ratio"] is not None]
    if ratios:
        mean = math.exp(sum(map(math.log, ratios)) / len(ratios))
        page += ["", f"ratio: FlexAttention's time over cuflash's; geometric mean {mean:.3f}."]
    stem = folder / f"{machine.label}-flex"
    stem.with_suffix(".json").write_text(json.dumps({"header": header, "rows": rows}, indent=1))
    stem.with_suffix(".md").write_text("\n".join(page) + "\n")
    return page


def measure(machine: Machine, cell: Cell) -> list[Row]:
    """Forward and backward of one cell."""
    import torch

    on_gpu = machine.kind == "cuda"
    device, dtype = ("cuda", torch.bfloat16) if on_gpu else ("cpu", torch.float32)
    n = cell.seqlen if on_gpu else 512
    torch.manual_seed(n)
    shape = (cell.batch, n, cell.heads, cell.head_dim if on_gpu else 16)
    q, k, v, do = (torch.randn(shape, device=device, dtype=dtype) for _ in range(4))
    options, mods = cell.build(n, lambda array: torch.tensor(array, device=device))
    o, lse = cuflash.attention(q, k, v, return_lse=True, **options)
    gradients = tuple(cuflash.attention_backward(do, q, k, v, o, lse, **options))
    calls: dict[str, dict[str, Any]] = {
        "cuflash": {
            "forward": lambda: cuflash.attention(q, k, v, **options),
            "backward": lambda: cuflash.attention_backward(do, q, k, v, o, lse, **options),
        }
    }
    rivals = {"flex": partial(_flex, mods=mods, n=n, on_gpu=on_gpu)}
    if on_gpu and ("is_causal" in mods or "bias" in mods):
        rivals["cudnn"] = partial(_cudnn, mods=mods)
    difference: dict[str, str] = {}
    for name, make in rivals.items():
        try:
            leaves = [x.transpose(1, 2).detach().requires_grad_(on_gpu) for x in (q, k, v)]
            attend = make(leaves)
            out, dout = attend(), do.transpose(1, 2)
            back = partial(torch.autograd.grad, out, leaves, dout, retain_graph=True)
            found = [out, *back()] if on_gpu else [out]  # on a CPU it has no backward
        except Exception as reason:
            difference[name] = " ".join(str(reason).split())[:80] or type(reason).__name__
            continue
        far = [_distance(a, b.transpose(1, 2)) for a, b in zip((o, *gradients), found)]
        for part, error in (("forward", far[0]), ("backward", max(far[1:], default=0.0))):
            difference[name + part] = f"{error:.1e}" if error < LIMIT else f"wrong: {error:.1e}"
        calls[name] = {"forward": attend} | ({"backward": back} if on_gpu else {})
    rows = []
    for part in ("forward", "backward"):
        ms = {name: machine.median(call[part], 9) for name, call in calls.items() if part in call}
        flex = ms.get("flex")
        rows.append({
            "cell": cell.name, "pass": part, "ms": ms["cuflash"], "flex_ms": flex,
            "cudnn_ms": ms.get("cudnn"), "ratio": flex and flex / ms["cuflash"],
            "difference": difference.get("flex" + part, difference.get("flex", "")),
        })  # fmt: skip
    machine.release()
    return rows


def _flex(leaves: list[Any], *, mods: Mods, n: int, on_gpu: bool) -> Callable[[], Any]:
    import torch
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    torch._dynamo.reset()
    mask, score = mods.get("mask_mod"), mods.get("score_mod")
    device = leaves[0].device.type
    blocks = mask and create_block_mask(mask, None, None, n, n, device=device, _compile=on_gpu)
    function = torch.compile(flex_attention, dynamic=False) if on_gpu else flex_attention
    return lambda: function(*leaves, score_mod=score, block_mask=blocks)


def _cudnn(leaves: list[Any], *, mods: Mods) -> Callable[[], Any]:
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.nn.functional import scaled_dot_product_attention

    bias = mods["bias"].to(leaves[0].dtype)[None] if "bias" in mods else None

    def attend() -> Any:
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            return scaled_dot_product_attention(
                *leaves, attn_mask=bias, is_causal=mods.get("is_causal", False)
            )

    return attend


def _distance(a: Any, b: Any) -> float:
    a, b = a.detach().double(), b.detach().double()
    return float((a - b).norm() / b.norm())
