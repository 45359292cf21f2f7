"""One attention pass over 512^3 voxels, forward and backward: every voxel a token.

Each of the 512 slices is cut into 64 x 64 blocks; a voxel attends to the 4096 of its block. Blocks
have nothing to do with one another, so they are the items of one batch of 32,768, and no mask is
needed. q, k, v have 32 channels, made from a voxel's intensity and its differences to neighbours by
random weights: this measures time and memory, it does not learn. The volume is Colin27 at 2 mm,
upsampled to 512^3: no more detail than before, only more tokens.
"""

import time
from pathlib import Path
from typing import Any

import numpy as np
from brain_volume import load
from tqdm import tqdm
from what_is_saved import standard

import cuflash
from cuflash.demo_sweep import peak_bytes, synchronize

CHANNELS = 32


def stretch(xp: Any, x: Any, axis: int, n: int) -> Any:
    """The array with n points along an axis, linear between the old ones."""
    at = xp.linspace(0, x.shape[axis] - 1, n, dtype=np.float32)
    low = xp.minimum(at.astype(np.int32), x.shape[axis] - 2)
    shape = [1] * x.ndim
    shape[axis] = n
    share = (at - low).astype(x.dtype).reshape(shape)
    return xp.take(x, low, axis=axis) * (1 - share) + xp.take(x, low + 1, axis=axis) * share


def blocks(image: Any, block: int) -> Any:
    """(blocks, block^2, ...) of a slice (n, n, ...)."""
    m = image.shape[0] // block
    parts = image.reshape(m, block, m, block, -1).swapaxes(1, 2)
    return parts.reshape(m * m, block * block, -1)


def project(xp: Any, n: int, block: int) -> list[Any]:
    """q, k, v of (blocks of all slices, block^2, 1, CHANNELS), float16, slice by slice."""
    image, _ = load(xp, "colin")
    volume = image.astype(np.float32) / 160
    for axis in (1, 2):
        volume = stretch(xp, volume, axis, n)
    rng = np.random.default_rng(0)
    weights = [xp.asarray(rng.standard_normal((4, CHANNELS)), np.float32) for _ in range(3)]
    per_slice = (n // block) ** 2
    shape = (n * per_slice, block**2, 1, CHANNELS)
    results = [xp.empty(shape, np.float16) for _ in weights]
    for i in tqdm(range(n), desc="q, k, v by slices", unit="slice", mininterval=0.5):
        at = i * (len(volume) - 1) / (n - 1)
        low = min(int(at), len(volume) - 2)
        x = volume[low] * (low + 1 - at) + volume[low + 1] * (at - low)
        near = [x - xp.roll(x, 1, axis=0), x - xp.roll(x, 1, axis=1), volume[low + 1] - volume[low]]
        tokens = blocks(xp.stack([x, *near], axis=2), block)
        for weight, result in zip(weights, results):
            result[i * per_slice : (i + 1) * per_slice, :, 0] = tokens @ weight
    return results


def clock(xp: Any, call: Any) -> tuple[float, int, Any]:
    """Seconds of one call, the most bytes it held beyond its inputs, and its result."""
    kept: list[Any] = []
    synchronize(xp)
    start = time.perf_counter()
    peak = peak_bytes(xp, lambda: kept.append(call()))
    synchronize(xp)
    return time.perf_counter() - start, peak, kept[0]


def run(xp: Any, out: Path, n: int = 512, block: int = 64, sample: int = 16) -> dict[str, float]:
    """Measure the pass, and standard attention on `sample` of its blocks, scaled to all."""
    q, k, v = project(xp, n, block)
    cuflash.warmup(q, k, v, backward=True)
    forward, held, (o, lse) = clock(xp, lambda: cuflash.attention(q, k, v, return_lse=True))
    inputs = 3 * q.nbytes
    do = o  # the gradient of sum(o^2) / 2
    backward, more, grads = clock(xp, lambda: cuflash.attention_backward(do, q, k, v, o, lse))
    peak = inputs + max(held, o.nbytes + lse.nbytes + more)

    some = [x[:: max(len(q) // sample, 1)][:sample].swapaxes(1, 2) for x in (q, k, v, do)]
    standard(*some)  # a first call loads its kernels
    part, _, usual = clock(xp, lambda: standard(*some))
    step, errors = max(len(q) // sample, 1), {}
    for name, mine, right in zip(("o", "dq", "dk", "dv"), (o, *grads), usual):
        a, b = mine[::step][:sample].swapaxes(1, 2).astype(np.float64), right.astype(np.float64)
        errors[name] = float(xp.sqrt(((a - b) ** 2).sum() / (b**2).sum()))
    model = cuflash.memory(
        seqlen=block**2, batch=len(q), head_dim=CHANNELS, dtype="float16", way="split"
    )
    pairs = len(q) * block**4
    scaled = part * len(q) / len(some[0])
    lines = [
        ("tokens, pairs", f"{n**3:,}, {pairs:.3g}"),
        ("forward, backward", f"{forward:.2f} s, {backward:.2f} s"),
        ("peak memory, q, k, v, o, dq, dk, dv included", f"{peak / 1e9:,.1f} GB"),
        ("standard attention at once (not run)", f"{model.standard_backward / 1e9:,.0f} GB more"),
        (f"standard attention, {len(some[0])} blocks at a time (scaled)", f"{scaled:.2f} s"),
        ("difference to it, relative", ", ".join(f"{k} {x:.1e}" for k, x in errors.items())),
    ]
    page = "\n".join(["| 512^3 pass, upsampled | |".replace("512", str(n)), "| --- | --- |"])
    page += "".join(f"\n| {name} | {value} |" for name, value in lines)
    print(f"\n{page}\n")
    out.mkdir(parents=True, exist_ok=True)
    (out / "brain-512.md").write_text(page + "\n")
    return {"forward": forward, "backward": backward, "peak": peak, **errors}
