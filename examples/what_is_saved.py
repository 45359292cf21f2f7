"""What tiled attention saves, and what it does not: the usual claims, measured on this machine.

Attention compares every token with every other: n tokens make an n x n matrix of scores S, and its
softmax P weighs the values. Standard attention writes both to memory, and in backward dP and dS.
Tiled attention (FlashAttention's way) never has them. It takes a band of queries and walks over the
keys tile by tile: a tile of S lives for a moment in fast memory, its part of the output is added,
and three things are kept for each row: the largest score so far, the sum of exponentials, the
weighted values. Where a larger score comes along, the old sums are scaled down, so the result is
exact. One number a row is written, lse, the log of the sum; with it backward computes the tiles of
S again from q and k. That is the bargain: more arithmetic for far less memory, and for less time
wherever memory was what attention waited for.

    python examples/what_is_saved.py            # on a GPU if there is one
    python examples/what_is_saved.py --small    # on the CPU

One forward and one backward pass on random q, k, v at each length. What is marked * was not run:
bytes are then those of `cuflash.memory`, times grow with n squared from the longest run.
"""

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import nn
import numpy as np
from saved_report import claims, draw_curves, draw_tiling, lengths, table
from tqdm import tqdm

import cuflash
from cuflash.demo_sweep import peak_bytes, synchronize

SMALL = {"tiled": 32768, "standard": 8192, "heads": 1, "dtype": "float32"}  # longest runs
FULL = {"tiled": 131072, "standard": 32768, "heads": 8, "dtype": "float16"}
HEAD_DIM = 64
LENGTHS = [1024 * 2**i for i in range(8)]  # 1k to 128k
GENOME, REACH, EVERY = 100_000, 2048, 500  # the sparse case: a window, every 500th token global


# 1. The two ways; q, k, v, do are (batch, heads, n, d) --------------------------------------------


def standard(q: Any, k: Any, v: Any, do: Any | None = None) -> tuple[Any, ...]:
    """o by the definition, and dq, dk, dv where do is given; each line is a pass over memory."""
    xp = nn.library(q)
    scale = q.dtype.type(q.shape[3] ** -0.5)
    s = (q * scale) @ k.swapaxes(2, 3)  # (n, n) a head
    p = s - s.max(axis=3, keepdims=True)  # (n, n): S and P are there at once
    del s
    xp.exp(p, out=p)
    p /= p.sum(axis=3, keepdims=True, dtype=np.float32)
    o = p @ v
    if do is None:
        return (o,)
    dv = p.swapaxes(2, 3) @ do
    dp = do @ v.swapaxes(2, 3)  # (n, n)
    ds = dp - (do * o).sum(axis=3, keepdims=True)  # (n, n): P, dP and dS are there at once
    del dp
    ds *= p
    return o, (ds @ k) * scale, (ds.swapaxes(2, 3) @ q) * scale, dv


def tiled(q: Any, k: Any, v: Any, do: Any | None = None) -> tuple[Any, ...]:
    """The same by cuflash."""
    if do is None:
        return (cuflash.attention(q, k, v, layout="bhsd"),)
    o, pullback = cuflash.attention_vjp(q, k, v, layout="bhsd")
    return o, *pullback(do)


# 2. Measuring -----------------------------------------------------------------------------------


@dataclass
class Run:
    """One way at one length: seconds of forward and of both passes, peak bytes beyond the inputs.

    extra : bytes beyond inputs and results (o, dq, dk, dv); `predicted` is cuflash.memory's word
    measured : False where seconds are scaled and bytes predicted
    """

    forward: float
    both: float
    bytes: float
    extra: float
    predicted: float
    measured: bool


def measure(xp: Any, function: Any, *arrays: Any, **options: Any) -> tuple[float, int]:
    """Seconds of a call, the best of a few if it is short, and the most bytes beyond its inputs."""
    start = time.perf_counter()
    peak = peak_bytes(xp, lambda: function(*arrays, **options))  # a GPU compiles here, too
    times = [time.perf_counter() - start] if xp is np else []
    while not times or sum(times) < 0.5:
        synchronize(xp)
        start = time.perf_counter()
        function(*arrays, **options)
        synchronize(xp)
        times.append(time.perf_counter() - start)
    return min(times), peak


def sweep(xp: Any, size: dict[str, Any], seed: int) -> list[dict[str, Any]]:
    """Both ways at every length: {"tokens": n, "standard": Run, "tiled": Run}."""
    rows: list[dict[str, Any]] = []
    heads, dtype = size["heads"], size["dtype"]
    for n in tqdm(LENGTHS, desc="1k to 128k tokens", unit="length"):
        rng, shape = np.random.default_rng((seed, n)), (1, heads, n, HEAD_DIM)
        model = cuflash.memory(seqlen=n, heads=heads, head_dim=HEAD_DIM, dtype=dtype)
        results = model.tensors_forward  # o, dq, dk, dv take what q, k, v, o take
        extras = {
            standard: max(model.standard_forward, model.standard_backward),
            tiled: max(model.tiled_forward, model.tiled_backward),
        }
        arrays = []
        if n <= max(size["tiled"], size["standard"]):
            arrays = [xp.asarray(rng.standard_normal(shape, np.float32), dtype) for _ in range(4)]
        rows.append({"tokens": n})
        for way, extra in extras.items():
            if n <= size[way.__name__]:
                forward, _ = measure(xp, way, *arrays[:3])
                both, peak = measure(xp, way, *arrays)
                run = Run(forward, both, peak, peak - results, extra, True)
            else:
                last = rows[-2][way.__name__]  # half as long
                run = Run(4 * last.forward, 4 * last.both, results + extra, extra, extra, False)
            rows[-1][way.__name__] = run
    return rows


def sparse(xp: Any, dtype: str, dense: float | None) -> dict[str, float]:
    """100,000 tokens forward, window and global tokens, against `dense` seconds of all pairs."""
    rng, shape = np.random.default_rng(0), (1, GENOME, 1, HEAD_DIM)
    q, k, v = (xp.asarray(rng.standard_normal(shape, np.float32), dtype) for _ in range(3))
    flags = np.arange(GENOME) % EVERY == 0
    mask = cuflash.SlidingWindow(REACH, REACH) | cuflash.GlobalTokens(flags)
    order = cuflash.order.first(np.flatnonzero(flags), GENOME)  # global tokens stored in front
    found = {"pairs": 1 / mask.density(GENOME, GENOME)}
    for name, positions in (("native", None), ("first", order.positions)):
        computed, _, total = cuflash.explain(q, k, v, mask=mask, positions=positions).tiles
        found[name] = total / computed
    seconds, _ = measure(xp, cuflash.attention, q, k, v, mask=mask, positions=order.positions)
    if dense is None:
        dense, _ = measure(xp, cuflash.attention, q, k, v)
    return found | {"measured": dense / seconds, "seconds": seconds}


# 3. All of it -------------------------------------------------------------------------------------


def run(xp: Any, size: dict[str, Any], out: Path, seed: int = 0) -> dict[str, Any]:
    """Measure, print and write; return the rows, the sparse case, the FLOPs added, the claims."""
    heads, dtype = size["heads"], size["dtype"]
    rows = sweep(xp, size, seed)
    dense = None
    if xp is np:  # a minute is saved: forward without a mask is scaled, not run
        last = [row for row in rows if row["tiled"].measured][-1]
        dense = last["tiled"].forward * (GENOME / last["tokens"]) ** 2
    genome = sparse(xp, dtype, dense)
    x = xp.zeros((1, 1024, 1, HEAD_DIM), dtype)
    plans = [cuflash.explain(x, x, x, backward=backward) for backward in (False, True)]
    model = cuflash.memory(seqlen=1024, head_dim=HEAD_DIM)
    usual = model.standard_flops_forward + model.standard_flops_backward
    work = sum(plan.flops for plan in plans) / usual - 1
    genome |= {"tokens": GENOME, "scaled_from": last["tokens"] if xp is np else GENOME}
    answers = claims(rows, genome, work)
    page = table(["claim", "measured here", "by formula", "so it is"], answers)
    page += f"\n\nBatch 1, heads {heads}, head_dim {HEAD_DIM}, {dtype}, on "
    page += f"{'one CPU core' if xp is np else 'a GPU'}; forward and backward, memory beyond the "
    page += "inputs. * was not run: seconds grow with N², bytes are those of cuflash.memory.\n\n"
    page += lengths(rows) + "\n"
    print("\n" + page)
    out.mkdir(parents=True, exist_ok=True)
    (out / "what-is-saved.md").write_text(page)
    draw_curves(rows, HEAD_DIM, out / "what-is-saved.png")
    draw_tiling(out / "tiling.png")
    return {"rows": rows, "genome": genome, "work": work, "claims": answers}


if __name__ == "__main__":
    nn.start(__doc__, run, SMALL, FULL)
