"""Which kernel family the caller forces, for tests and benches: `using` and CUFLASH_FAMILY."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

FAMILIES = ("sm90", "simt")

_forced: ContextVar[str | None] = ContextVar("cuflash_family", default=None)


@contextmanager
def using(*, family: str) -> Iterator[None]:
    """Run the calls inside with one kernel family, or raise `Unsupported` where it has no kernel.

    Parameters
    ----------
    family : "sm90", tensor cores of Hopper (float16 and bfloat16), or "simt", the kernels
        that run on any GPU. The environment variable CUFLASH_FAMILY does the same for a whole
        process. Calls on the CPU are not affected

    Raises
    ------
    ValueError: no such family.

    Examples
    --------
    >>> with cuflash.using(family="simt"):
    ...     o = cuflash.attention(q, k, v)
    """
    token = _forced.set(_check(family, "family"))
    try:
        yield
    finally:
        _forced.reset(token)


def forced() -> str | None:
    """The family that is forced here, or None."""
    family = _forced.get()
    if family is None and "CUFLASH_FAMILY" in os.environ:
        family = _check(os.environ["CUFLASH_FAMILY"], "CUFLASH_FAMILY")
    return family


def _check(family: str, argument: str) -> str:
    if family not in FAMILIES:
        raise ValueError(f"{argument} must be one of {', '.join(FAMILIES)}, got {family!r}")
    return family
