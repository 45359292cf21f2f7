"""What the examples share: layers with their gradients by hand, Adam, and the frame of a script.

A layer is a function of the weights, a dict, and of x. As `cuflash.attention_vjp` does, it returns
its result and a pullback: `pullback(dy, g)` returns dx and writes the gradients of the layer's
weights into the dict g, under the names they have in w. So backward is the chain rule spelled out:
call the pullbacks in reverse. Arrays are NumPy's or CuPy's; x is (..., width).

    y, pull_y = nn.linear(w, "first", x)
    z, pull_z = nn.mlp(w, "second", y)
    loss, dz = nn.cross_entropy(z, truth)
    dx = pull_y(pull_z(dz, g), g)
"""

import argparse
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from threadpoolctl import threadpool_limits
from tqdm import tqdm

import cuflash

Weights = dict[str, Any]
Layer = tuple[Any, Callable[..., Any]]  # a result and its pullback


# 1. Layers ----------------------------------------------------------------------------------------


def library(x: Any) -> Any:
    """NumPy or CuPy, whichever made x."""
    return np if isinstance(x, np.ndarray) else __import__("cupy")


def normal(xp: Any, rng: np.random.Generator, rows: int, columns: int) -> Any:
    """A random weight that keeps the size of what it multiplies."""
    return xp.asarray(rng.standard_normal((rows, columns)) / rows**0.5, np.float32)


def linear(w: Weights, name: str, x: Any) -> Layer:
    """x w[name], plus w[name + "_bias"] if there is one."""
    weight, bias = w[name], f"{name}_bias"

    def pullback(dy: Any, g: Weights) -> Any:
        rows = dy.reshape(-1, dy.shape[-1])
        g[name] = x.reshape(-1, x.shape[-1]).T @ rows
        g |= {bias: rows.sum(axis=0)} if bias in w else {}
        return dy @ weight.T

    return x @ weight + w.get(bias, 0), pullback


def embedding(w: Weights, name: str, index: Any) -> Layer:
    """Row index of w[name] for each token; there is no gradient by an index."""

    def pullback(dy: Any, g: Weights) -> None:
        g[name] = library(dy).zeros_like(w[name])
        library(dy).add.at(g[name], index.reshape(-1), dy.reshape(-1, dy.shape[-1]))

    return w[name][index], pullback


def rmsnorm(x: Any) -> Layer:
    """Rows of mean square 1."""
    scale = 1 / library(x).sqrt((x * x).mean(axis=-1, keepdims=True) + 1e-5)
    y = x * scale
    return y, lambda dy: scale * (dy - y * (dy * y).mean(axis=-1, keepdims=True))


def layernorm(x: Any) -> Layer:
    """Rows of mean 0 and variance 1."""
    y, pullback = rmsnorm(x - x.mean(axis=-1, keepdims=True))
    return y, lambda dy: (dx := pullback(dy)) - dx.mean(axis=-1, keepdims=True)


def gelu(x: Any) -> Layer:
    """x times the chance that a normal number is below x, by tanh (arXiv:1606.08415)."""
    c, square = math.sqrt(2 / math.pi), x * x
    t = library(x).tanh(c * x * (1 + 0.044715 * square))
    slope = 0.5 * (1 + t) + 0.5 * c * x * (1 - t * t) * (1 + 3 * 0.044715 * square)
    return 0.5 * x * (1 + t), lambda dy: dy * slope


def attention(
    w: Weights, name: str, x: Any, *, heads: int, params: dict[str, Any] | None = None,
    dtype: Any = None, **options: Any,
) -> Layer:  # fmt: skip
    """Self-attention of x (batch, n, width); weights w[name + "_qkv"] and w[name + "_mix"].

    params : each `cuflash.Param` of the score, by the name of its weight
    dtype : of q, k, v, o, such as float16; None is that of x; options : mask, score, positions, ...
    """
    xp, dtype = library(x), dtype or x.dtype
    qkv, pull_qkv = linear(w, f"{name}_qkv", x)
    qkv = qkv.reshape(*x.shape[:2], 3, heads, -1).astype(dtype, copy=False)
    o, pull_o = cuflash.attention_vjp(*(qkv[:, :, i] for i in range(3)), **options)
    y, pull_mix = linear(w, f"{name}_mix", o.reshape(*x.shape[:2], -1).astype(x.dtype, copy=False))

    def pullback(dy: Any, g: Weights) -> Any:
        do = pull_mix(dy, g).reshape(o.shape)
        # The loss is a mean, so gradients of long sequences are too small for float16 as they are.
        size = abs(do).max() + 1e-30 if dtype != x.dtype else x.dtype.type(1)
        grads = pull_o((do / size).astype(dtype, copy=False))
        for key, param in (params or {}).items():
            g[key] = grads.dparams[param] * size
        dqkv = xp.stack(list(grads), axis=2).astype(x.dtype, copy=False) * size
        return pull_qkv(dqkv.reshape(*x.shape[:2], -1), g)

    return y, pullback


def mlp(w: Weights, name: str, x: Any) -> Layer:
    """Two products, w[name + "_up"] and w[name + "_down"], with a gelu between them."""
    x, pull_up = linear(w, f"{name}_up", x)
    x, pull_gelu = gelu(x)
    x, pull_down = linear(w, f"{name}_down", x)
    return x, lambda dy, g: pull_up(pull_gelu(pull_down(dy, g)), g)


def residual(layer: Callable[..., Layer], w: Weights, name: str, x: Any, **options: Any) -> Layer:
    """x plus a layer (`mlp`, `attention`) of the normalised x."""
    normalised, pull_norm = rmsnorm(x)
    y, pullback = layer(w, name, normalised, **options)
    return x + y, lambda dy, g: dy + pull_norm(pullback(dy, g))


def cross_entropy(scores: Any, truth: Any, weight: Any = None) -> tuple[Any, Any]:
    """Mean of -log softmax(scores)[truth] (weighted) and its gradient; scores (..., classes)."""
    xp = library(scores)
    p = xp.exp(scores - scores.max(axis=-1, keepdims=True)).reshape(-1, scores.shape[-1])
    p /= p.sum(axis=-1, keepdims=True)
    share = xp.ones(len(p), p.dtype) if weight is None else weight.reshape(-1)
    share = (share / share.sum()).astype(p.dtype)
    at = xp.arange(len(p)), truth.reshape(-1)
    loss = -(share * xp.log(p[at] + 1e-9)).sum()
    p[at] -= 1
    return loss, (p * share[:, None]).reshape(scores.shape)


class Adam:
    """Adam with a short warm-up, a cosine decay and gradients of norm at most 1; in place."""

    def __init__(self, weights: Weights, steps: int, rate: float) -> None:
        self.weights, self.steps, self.rate, self.count = weights, steps, rate, 0
        self.moments = {name: (0 * weight, 0 * weight) for name, weight in weights.items()}

    def step(self, gradients: Weights) -> None:
        self.count += 1
        decay = 0.5 + 0.5 * math.cos(math.pi * self.count / self.steps)
        rate = self.rate * min(1.0, self.count / 10) * decay
        xp = library(next(iter(gradients.values())))
        clip = xp.minimum(1, 1 / xp.sqrt(sum((each * each).sum() for each in gradients.values())))
        for name, gradient in gradients.items():
            gradient, (mean, square) = gradient * clip, self.moments[name]
            mean += 0.1 * (gradient - mean)
            square += 0.02 * (gradient * gradient - square)
            size = xp.sqrt(square / (1 - 0.98**self.count)) + 1e-8
            self.weights[name] -= rate * (mean / (1 - 0.9**self.count)) / size


# 2. The frame of a script -------------------------------------------------------------------------


def training(steps: int, label: str) -> Iterator[Callable[[Any], None]]:
    """A progress bar over the steps: each gives a function that is told the loss."""
    with tqdm(total=steps, desc=label, unit="step", mininterval=0.5) as bar:
        for _ in range(steps):
            yield lambda loss: bar.set_postfix_str(f"loss {float(loss):.3f}", refresh=False)
            bar.update()


def table(head: list[str], lines: list[list[str]]) -> str:
    """A table in Markdown."""
    return "\n".join(f"| {' | '.join(cells)} |" for cells in [head, ["---"] * len(head), *lines])


def find_gpu() -> Any:
    """CuPy where it has a GPU, else NumPy."""
    try:
        import cupy
    except ImportError:
        return np
    return cupy if cupy.is_available() else np


def start(description: str, run: Callable[..., Any], small: dict, full: dict) -> None:
    """Read the command line, then run(xp, size, out, seed): full size where there is a GPU."""
    parser = argparse.ArgumentParser(description=description.split("\n")[0])
    parser.add_argument("--small", action="store_true", help="on the CPU, also with a GPU")
    parser.add_argument("--full", action="store_true", help="without a GPU, too (slow)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("results"), help="folder of the results")
    options = parser.parse_args()
    xp = np if options.small else find_gpu()
    with threadpool_limits(limits=1):  # a second BLAS thread waits long where others are at work
        run(xp, full if options.full or xp is not np else small, options.out, options.seed)
