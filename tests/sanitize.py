"""Every kernel on small shapes, one call after the other, for compute-sanitizer.

    python tests/sanitize.py --threads 16                       # compiles, then the tools do not
    compute-sanitizer --tool memcheck python tests/sanitize.py  # then racecheck, synccheck

`--only TEXT` runs the calls whose name holds TEXT; `--library numpy` runs them on the CPU, where
they show only that they are well formed. A name is printed before its call, and the GPU waited for
after it, so that what a tool says stands below what it is about. Arrays come from the driver one by
one: in a pool a write beyond an array's end would land in memory that is allocated too.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
from cases import Case
from test_attention import module_of, run

import cuflash

DIMS = {
    "sm90": ((64, 64), (128, 128), (40, 40), (192, 128), (256, 256)),
    "simt": ((64, 64), (40, 40)),
}
DTYPES = {"sm90": ("bfloat16", "float16"), "simt": ("float32", "float16", "float64")}
FEATURES = (
    ("none", "none"), ("causal", "none"), ("documents", "none"), ("by-head", "softcap"),
    ("none", "bias"), ("window", "table"), ("local-global", "chain-sink"),
)  # fmt: skip


def calls() -> Iterator[tuple[str, str, Case, bool]]:
    """Name, family, case, whether bits are to repeat: dtypes and that take turns."""
    for family, several in DIMS.items():
        for at, (dims, (mask, score)) in enumerate(
            (dims, feature) for dims in several for feature in FEATURES
        ):
            sizes = {"head_dim": dims[0], "head_dim_v": dims[1], "seqlen_q": 200, "seqlen_k": 333}
            dtype = DTYPES[family][at % len(DTYPES[family])]
            case = Case(mask=mask, score=score, dtype=dtype, **sizes)
            is_deterministic = at // 2 % 2 == 1
            name = f"{family} {case.id}{' deterministic' * is_deterministic}"
            yield name, family, case, is_deterministic


def call(name: str, family: str, case: Case, is_deterministic: bool, library: str) -> None:
    """Both passes, of plain numbers and of some that the careful path is for."""
    print(name, flush=True)
    for is_finite in (True, False):
        inputs = case.inputs()
        if not is_finite:
            inputs["k"][0, 7], inputs["v"][0, 100] = np.inf, np.nan
        with cuflash.using(family=family), np.errstate(all="ignore"):
            run(case, inputs, library, deterministic=is_deterministic)
        _wait(library)


def split(family: str, library: str) -> None:
    """A key that all queries see, a query that sees all keys: several blocks share their tiles."""
    print(family, "split", flush=True)
    xp, length = module_of(library), 9000
    flags = xp.zeros(length, bool)
    flags[7] = True
    mask = cuflash.SlidingWindow(10, 10) | cuflash.GlobalTokens(flags)
    rng = np.random.default_rng(0)
    q = xp.asarray(rng.standard_normal((1, length, 1, 64), np.float32)).astype("float16")
    with cuflash.using(family=family):
        o, lse = cuflash.attention(q, q, q, mask=mask, return_lse=True)
        cuflash.attention_backward(q, q, q, q, o, lse, mask=mask)
    _wait(library)


def _wait(library: str) -> None:
    if library == "cupy":
        module_of(library).cuda.runtime.deviceSynchronize()


def main() -> None:
    """Run them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="")
    parser.add_argument("--library", default="cupy", choices=("cupy", "numpy"))
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    if options.library == "cupy":
        module_of("cupy").cuda.set_allocator(None)
    jobs = [each for each in calls() if options.only in each[0]]
    with ThreadPoolExecutor(options.threads) as pool:
        list(pool.map(lambda job: call(*job, options.library), jobs))
        list(pool.map(lambda family: split(family, options.library), DIMS))
    print(f"ran {len(jobs)} calls and their splits")


if __name__ == "__main__":
    main()
