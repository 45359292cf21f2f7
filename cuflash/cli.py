"""The ``cuflash`` command: ``demo``, ``info``, ``memory``, ``explain`` and ``warmup``.

Each command calls the public function of the same name; nothing is imported before it is needed,
so ``cuflash --help`` is quick.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status.

    Parameters
    ----------
    arguments : the words after ``cuflash``; None means those of the command line
    """
    options = _parser().parse_args(arguments)
    try:
        return options.run(options)
    except (ImportError, NotImplementedError, TypeError, ValueError) as error:
        print(f"cuflash {options.command}: {error}", file=sys.stderr)
        return 1


def _parser() -> argparse.ArgumentParser:
    """The five commands and their options."""
    parser = argparse.ArgumentParser(
        prog="cuflash",
        description="Exact attention, forward and backward, in linear memory.",
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="command")

    demo = commands.add_parser(
        "demo", help="train a small attention layer by hand on a real text, check it, plot it"
    )
    demo.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    demo.add_argument("--tokens", type=int, help="bytes of text a training step sees")
    demo.add_argument("--steps", type=int, help="training steps")
    demo.add_argument("--seed", type=int, default=0)
    demo.add_argument("--longest", type=int, help="longest sequence of the time and memory sweep")
    demo.add_argument("--plot", default="cuflash-demo.png", help="where the picture goes")
    demo.set_defaults(run=_demo)

    info = commands.add_parser("info", help="what is on this machine: devices, libraries, caches")
    info.set_defaults(run=_info)

    memory = commands.add_parser(
        "memory", help="the arithmetic of standard attention against tiled attention"
    )
    memory.add_argument("--seqlen", type=int, default=8192)
    memory.add_argument("--seqlen-k", type=int, help="default: seqlen")
    memory.add_argument("--batch", type=int, default=1)
    memory.add_argument("--heads", type=int, default=32)
    memory.add_argument("--heads-k", type=int, help="default: heads")
    memory.add_argument("--head-dim", type=int, default=128)
    memory.add_argument("--head-dim-v", type=int, help="default: head-dim")
    memory.add_argument("--dtype", default="float16")
    memory.add_argument("--density", type=float, default=1.0, help="share of pairs a mask leaves")
    memory.set_defaults(run=_memory)

    for name, run, text in (
        ("explain", _explain, "which kernel a call would run, with what memory, and why"),
        ("warmup", _warmup, "compile and load the kernels of a call ahead of it"),
    ):
        command = commands.add_parser(name, help=text)
        _add_problem(command)
        command.set_defaults(run=run)
    return parser


def _add_problem(command: argparse.ArgumentParser) -> None:
    """The options that describe one attention call."""
    command.add_argument("--batch", type=int, default=1)
    command.add_argument("--seqlen-q", type=int, default=8192)
    command.add_argument("--seqlen-k", type=int, help="default: seqlen-q")
    command.add_argument("--heads-q", type=int, default=32)
    command.add_argument("--heads-k", type=int, help="default: heads-q")
    command.add_argument("--head-dim", type=int, default=128)
    command.add_argument("--head-dim-v", type=int, help="default: head-dim")
    command.add_argument("--dtype", default="float16", help="float16, bfloat16, float32, float64")
    command.add_argument("--causal", action="store_true")
    command.add_argument(
        "--window", type=int, nargs=2, metavar=("LEFT", "RIGHT"), help="keys around the diagonal"
    )
    command.add_argument("--backward", action="store_true", help="the backward pass")
    command.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")


def _demo(options: argparse.Namespace) -> int:
    from . import demo

    result = demo.run(
        array_module(options.device),
        tokens=options.tokens,
        steps=options.steps,
        seed=options.seed,
        longest=options.longest,
        plot=options.plot,
    )
    return 0 if result.good else 1


def _info(options: argparse.Namespace) -> int:
    import cuflash

    print(cuflash.info())
    return 0


def _memory(options: argparse.Namespace) -> int:
    import cuflash

    names = "seqlen seqlen_k batch heads heads_k head_dim head_dim_v dtype density".split()
    print(cuflash.memory(**{name: getattr(options, name) for name in names}))
    return 0


def _explain(options: argparse.Namespace) -> int:
    import cuflash

    arrays, masks = _problem(options)
    print(cuflash.explain(*arrays, **masks, backward=options.backward))
    return 0


def _warmup(options: argparse.Namespace) -> int:
    import cuflash

    arrays, masks = _problem(options)
    cuflash.warmup(*arrays, **masks, backward=options.backward)
    return 0


def _problem(options: argparse.Namespace) -> tuple[list[Any], dict[str, Any]]:
    """Arrays q, k, v of the asked shapes (their values do not matter) and the mask options."""
    xp = array_module(options.device)
    heads_k = options.heads_q if options.heads_k is None else options.heads_k
    seqlen_k = options.seqlen_q if options.seqlen_k is None else options.seqlen_k
    head_dim_v = options.head_dim if options.head_dim_v is None else options.head_dim_v
    dtype = dtype_of(options.dtype)
    q = xp.empty((options.batch, options.seqlen_q, options.heads_q, options.head_dim), dtype)
    k = xp.empty((options.batch, seqlen_k, heads_k, options.head_dim), dtype)
    v = xp.empty((options.batch, seqlen_k, heads_k, head_dim_v), dtype)
    window = None if options.window is None else tuple(options.window)
    return [q, k, v], {"causal": options.causal, "window": window}


def dtype_of(name: str) -> np.dtype:
    """The NumPy dtype called ``name``; bfloat16 comes from ml_dtypes."""
    if name == "bfloat16":
        import ml_dtypes

        return np.dtype(ml_dtypes.bfloat16)
    if name not in ("float16", "float32", "float64"):
        raise ValueError(f"dtype must be float16, bfloat16, float32 or float64, got {name}")
    return np.dtype(name)


def array_module(device: str) -> Any:
    """NumPy or CuPy: ``cuda`` asks for CuPy and a GPU, ``auto`` takes them where they are."""
    if device == "cpu":
        return np
    try:
        from .arrays.cupy import load_cupy

        cupy = load_cupy()
    except ImportError as error:
        if device == "auto":
            return np
        raise ImportError(
            "device cuda needs CuPy: pip install 'cuflash[cuda13]' (or cuda12)"
        ) from error
    if cupy.is_available():
        return cupy
    if device == "auto":
        return np
    raise ValueError("device cuda: CuPy sees no GPU on this machine")
