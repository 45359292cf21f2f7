"""A small attention layer trained by hand on a real text; read it from top to bottom.

The text is the longest help topic of Python itself, the tokens are its bytes, and the net guesses
the next byte. Without attention it knows the last four bytes. With attention it also looks back
over thousands: a query made of the letters just read meets keys made of the letters read before
each earlier byte, and the value there is the byte that followed. So attention learns to find where
the same letters stood before and to read off what came next, and the loss shows what that is worth.

No framework: every gradient is written out, that of attention comes from ``cuflash.attention_vjp``,
and one ``xp``, which is NumPy or CuPy, runs all of it on a CPU or on a GPU.
"""

from __future__ import annotations

import importlib
import importlib.util
import math
from dataclasses import dataclass
from typing import Any

import numpy as np

import cuflash

from . import demo_sweep

__all__ = ["Result", "run"]

CONTEXT = 4  # bytes that a position knows without attention
EMBEDDING = 16  # numbers an embedded byte
HEAD_DIM = 64
HIDDEN = 128
BITS = 1 / math.log(2)  # nats to bits


# 1. The text ------------------------------------------------------------------------------------


def read_text() -> tuple[str, np.ndarray]:
    """Name and bytes of Python's longest help topic: real English, on every machine."""
    module = importlib.import_module("pydoc_data.topics")
    topics: dict[str, str] = module.topics
    name = max(topics, key=lambda topic: len(topics[topic]))
    return name, np.frombuffer(topics[name].encode(), dtype=np.uint8).astype(np.int64)


# 2. The net and its gradients -------------------------------------------------------------------


def start_weights(xp: Any, seed: int) -> dict[str, Any]:
    """Random weights; query and key start equal, so that equal letters attract from step one."""
    rng = np.random.default_rng(seed)

    def normal(rows: int, columns: int, size: float) -> Any:
        return xp.asarray(rng.standard_normal((rows, columns)) * size, dtype=np.float32)

    width = CONTEXT * EMBEDDING
    query = normal(width, HEAD_DIM, 1.7 / math.sqrt(width))
    return {
        "embedding": normal(256, EMBEDDING, 1.0),
        "query": query,
        "key": query.copy(),
        "value": normal(EMBEDDING, HEAD_DIM, 1 / math.sqrt(EMBEDDING)),
        "mix": normal(HEAD_DIM, HIDDEN, 1 / math.sqrt(HEAD_DIM)),
        "skip": normal(width, HIDDEN, 1 / math.sqrt(width)),
        "hidden_bias": xp.zeros(HIDDEN, np.float32),
        "out": normal(HIDDEN, 256, 1 / math.sqrt(HIDDEN)),
        "out_bias": xp.zeros(256, np.float32),
    }


@dataclass
class Tape:
    """What the forward pass keeps for the backward pass."""

    hot: Any  # (n + CONTEXT, 256) one-hot bytes
    now: Any  # (n, CONTEXT * EMBEDDING) the bytes up to each position
    before: Any  # the same one position earlier
    byte: Any  # (n, EMBEDDING) the byte at each position
    hidden: Any  # (n, HIDDEN) after the relu
    error: Any  # (n, 256) d loss / d logits
    attention: tuple[Any, ...] | None  # q, k, v, o and the pullback


def forward(
    xp: Any, weights: dict[str, Any], text: Any, attend: bool, reach: int | None = None
) -> tuple[float, Tape]:
    """Mean loss, in nats, of guessing the last n of n + CONTEXT + 1 bytes, each from those before.

    Parameters
    ----------
    text : (n + CONTEXT + 1,) bytes
    attend : whether the attention layer takes part
    reach : how many positions back attention may look; None is all of them
    """
    w = weights
    n = len(text) - CONTEXT - 1
    hot = (text[:-1, None] == xp.arange(256)).astype(np.float32)
    x = hot @ w["embedding"]
    windows = [x[CONTEXT - 1 - i : CONTEXT + n - i] for i in range(CONTEXT)]  # newest byte first
    context = xp.concatenate(windows, axis=1)
    now, before, byte = context[1:], context[:-1], x[CONTEXT:]

    before_relu = now @ w["skip"] + w["hidden_bias"]
    attention = None
    if attend:
        q, k, v = now @ w["query"], before @ w["key"], byte @ w["value"]  # (n, HEAD_DIM): one head
        window = None if reach is None else (reach, 0)
        o, pullback = cuflash.attention_vjp(q, k, v, causal=True, window=window)
        before_relu += o @ w["mix"]
        attention = (q, k, v, o, pullback)
    hidden = xp.maximum(before_relu, 0)

    logits = hidden @ w["out"] + w["out_bias"]
    logits -= logits.max(axis=1, keepdims=True)
    probability = xp.exp(logits)
    total = probability.sum(axis=1, keepdims=True)
    rows, target = xp.arange(n), text[CONTEXT + 1 :]
    loss = float((xp.log(total[:, 0]) - logits[rows, target]).mean())
    error = probability / total
    error[rows, target] -= 1
    error /= n
    return loss, Tape(hot, now, before, byte, hidden, error, attention)


def backward(xp: Any, weights: dict[str, Any], tape: Tape) -> dict[str, Any]:
    """The gradient of the loss by every weight: the chain rule, from the last line to the first."""
    w, n = weights, len(tape.now)
    dhidden = (tape.error @ w["out"].T) * (tape.hidden > 0)
    gradients = {
        "out": tape.hidden.T @ tape.error,
        "out_bias": tape.error.sum(axis=0),
        "skip": tape.now.T @ dhidden,
        "hidden_bias": dhidden.sum(axis=0),
    }
    dcontext = xp.zeros((n + 1, CONTEXT * EMBEDDING), np.float32)
    dcontext[1:] += dhidden @ w["skip"].T
    dx = xp.zeros((n + CONTEXT, EMBEDDING), np.float32)
    if tape.attention is not None:
        _, _, _, o, pullback = tape.attention
        dq, dk, dv = pullback(dhidden @ w["mix"].T)  # the only line that attention needs
        gradients["mix"] = o.T @ dhidden
        gradients["query"] = tape.now.T @ dq
        gradients["key"] = tape.before.T @ dk
        gradients["value"] = tape.byte.T @ dv
        dcontext[1:] += dq @ w["query"].T
        dcontext[:-1] += dk @ w["key"].T
        dx[CONTEXT:] += dv @ w["value"].T
    for i in range(CONTEXT):
        columns = slice(i * EMBEDDING, (i + 1) * EMBEDDING)
        dx[CONTEXT - 1 - i : CONTEXT + n - i] += dcontext[:, columns]
    gradients["embedding"] = tape.hot.T @ dx
    return gradients


# 3. Training ------------------------------------------------------------------------------------


class Adam:
    """Adam with a short warm-up and a cosine decay, as far as this demo needs it."""

    def __init__(self, xp: Any, weights: dict[str, Any], steps: int, rate: float = 0.02):
        self.xp, self.weights, self.steps, self.rate, self.count = xp, weights, steps, rate, 0
        self.mean = {name: xp.zeros_like(weight) for name, weight in weights.items()}
        self.square = {name: xp.zeros_like(weight) for name, weight in weights.items()}

    def step(self, gradients: dict[str, Any]) -> None:
        self.count += 1
        decay = 0.5 + 0.5 * math.cos(math.pi * self.count / self.steps)
        rate = self.rate * min(1.0, self.count / 5) * decay
        for name, gradient in gradients.items():
            mean, square = self.mean[name], self.square[name]
            mean += 0.1 * (gradient - mean)
            square += 0.01 * (gradient * gradient - square)
            size = self.xp.sqrt(square / (1 - 0.99**self.count)) + 1e-8
            self.weights[name] -= rate * (mean / (1 - 0.9**self.count)) / size


def train(
    xp: Any, text: Any, tokens: int, steps: int, seed: int, attend: bool
) -> tuple[dict[str, Any], list[float]]:
    """Train on random stretches of the text; the same seed gives the same start and stretches."""
    from tqdm import tqdm

    weights = start_weights(xp, seed)
    adam = Adam(xp, weights, steps)
    rng = np.random.default_rng(seed + 1)
    losses = []
    label = "with attention   " if attend else "without attention"
    with tqdm(total=steps, desc=label, unit="step", mininterval=0.5) as bar:
        for _ in range(steps):
            start = int(rng.integers(0, len(text) - tokens - CONTEXT))
            loss, tape = forward(xp, weights, text[start : start + tokens + CONTEXT + 1], attend)
            adam.step(backward(xp, weights, tape))
            losses.append(loss * BITS)
            bar.set_postfix_str(f"{losses[-1]:.2f} bits/byte", refresh=False)
            bar.update()
    return weights, losses


# 4. One step against the definition in float64 --------------------------------------------------


def check_step(xp: Any, weights: dict[str, Any], text: Any) -> dict[str, float]:
    """Relative error of o, dq, dk, dv in a step of the trained net against float64."""
    _, tape = forward(xp, weights, text, attend=True)
    if tape.attention is None:
        raise RuntimeError("the attention layer did not take part in the step")
    q, k, v, o, pullback = tape.attention
    do = ((tape.error @ weights["out"].T) * (tape.hidden > 0)) @ weights["mix"].T
    ours = (o, *pullback(do))
    exact = demo_sweep.standard_attention(
        xp, *(array.astype(np.float64) for array in (q, k, v, do))
    )
    norm = xp.linalg.norm
    return {
        name: float(norm(mine - right) / norm(right))
        for name, mine, right in zip(("o", "dq", "dk", "dv"), ours, exact)
    }


# 5. All of it -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Result:
    """What the demo found: losses in bits a byte on text that was not trained on."""

    loss_without: float
    loss_with: float
    errors: dict[str, float]
    rows: list[demo_sweep.Row]

    @property
    def good(self) -> bool:
        """Attention helped, and its step agrees with the definition to float32's accuracy."""
        return self.loss_with < self.loss_without and max(self.errors.values()) < 1e-4


def run(
    xp: Any = np,
    tokens: int | None = None,
    steps: int | None = None,
    seed: int = 0,
    longest: int | None = None,
    plot: str = "cuflash-demo.png",
) -> Result:
    """Train, check, measure, print and plot.

    Parameters
    ----------
    xp : numpy or cupy, where everything runs
    tokens : bytes a training step sees; None is 4096 on a CPU, 8192 on a GPU
    steps : training steps; None is 120 on a CPU, 300 on a GPU
    seed : of the start weights and of the stretches of text
    longest : longest sequence of the sweep; None is 16384 on a CPU, 131072 on a GPU
    plot : path of the picture
    """
    for name in ("matplotlib", "threadpoolctl", "tqdm"):
        if importlib.util.find_spec(name) is None:
            raise ImportError(f"the demo needs {name}: pip install 'cuflash[demo]'")
    from threadpoolctl import threadpool_limits

    on_cpu = xp is np
    tokens = (4096 if on_cpu else 8192) if tokens is None else tokens
    steps = (120 if on_cpu else 300) if steps is None else steps
    longest = (16384 if on_cpu else 131072) if longest is None else longest
    name, data = read_text()
    held = tokens + CONTEXT + 1
    if len(data) < 2 * held + 1:
        raise ValueError(
            f"tokens must be at most {(len(data) - 1) // 2 - CONTEXT - 1}, got {tokens}"
        )
    text, unseen = xp.asarray(data[:-held]), xp.asarray(data[-held:])
    where = "the CPU, one thread" if on_cpu else "the GPU"
    print(
        f"Text: Python's help on {name}, {len(data)} bytes; the last {held} are never trained on.\n"
        f"Net: the last {CONTEXT} bytes, and causal attention over {tokens} positions, "
        f"one head of {HEAD_DIM}.\n"
        f"Training: {steps} steps, seed {seed}, on {where}."
    )
    curves, losses = {}, {}
    with threadpool_limits(limits=1):  # products this small leave a second BLAS thread waiting
        for attend in (False, True):
            weights, curves[attend] = train(xp, text, tokens, steps, seed, attend)
            losses[attend] = forward(xp, weights, unseen, attend)[0] * BITS
        rows = demo_sweep.sweep(xp, longest, HEAD_DIM)
    print("\nUnseen text, bits a byte (lower is better; 8 is knowing nothing)")
    print(f"  without attention                       {losses[False]:.3f}")
    print(f"  with attention                          {losses[True]:.3f}")
    for reach in (64, 512):
        short = forward(xp, weights, unseen, True, reach)[0] * BITS
        print(f"  the same, looking back {reach:4d} bytes only  {short:.3f}")

    errors = check_step(xp, weights, unseen[: min(held, 2048 + CONTEXT + 1)])
    print("\nOne attention step of the trained net against the float64 definition, relative error")
    print("  " + "  ".join(f"{part} {error:.1e}" for part, error in errors.items()))

    demo_sweep.report(rows)
    path = demo_sweep.draw(rows, curves[False], curves[True], plot)
    print(f"\nPicture: {path}")
    return Result(losses[False], losses[True], errors, rows)
