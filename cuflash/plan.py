"""Which kernel computes a problem: the choice among the families, and its reasons."""

from __future__ import annotations

from dataclasses import dataclass

from cuflash import simt, sm90
from cuflash.config import Config, shared_limit_of
from cuflash.errors import Unsupported
from cuflash.family import FAMILIES
from cuflash.problem import Problem

OLDEST_ARCH = 75


@dataclass(frozen=True)
class Plan:
    """How one pass of a problem is computed on one kind of device.

    reasons : a line for each faster family: why it was not taken
    """

    config: Config
    reasons: tuple[str, ...] = ()


def choose(
    problem: Problem, kernel: str, arch: int, shared_limit: int | None = None,
    family: str | None = None, is_readable: bool = True,
) -> Plan:  # fmt: skip
    """The plan for a GPU of compute capability `arch` (90 is 9.0).

    Parameters
    ----------
    kernel : "forward" or "backward"
    shared_limit : bytes of shared memory that a block may have; None looks the arch up
    family : force this family, or None
    is_readable : whether Hopper's copy engine reads q, k and v (and o, do) in place

    Raises
    ------
    Unsupported : no kernel takes this head dimension, dtype or GPU; the message names the limit
    """
    if family is not None and family not in FAMILIES:
        raise ValueError(f"family must be one of {FAMILIES}, got {family!r}")
    if arch < OLDEST_ARCH:
        raise Unsupported(
            f"GPU kernels need compute capability 7.5 or newer, this GPU has {arch / 10}"
        )
    limit = shared_limit_of(arch) if shared_limit is None else shared_limit
    why_not = sm90.why_not(problem, arch, is_readable)
    if family == "sm90" and why_not is not None:
        raise Unsupported(why_not)
    if why_not is None and family != "simt":
        return Plan(sm90.sm90_config(problem, kernel))
    if why_not is None:
        why_not = "sm90: the simt family is forced"
    config = simt.simt_config(kernel, problem.dtype, problem.head_dim, problem.head_dim_v, limit)
    return Plan(config, (why_not,))


def configs_for(arch: int) -> list[Config]:
    """Every row of the tables that a GPU of this arch is given, for each dtype, at its widest."""
    configs: list[Config] = [*simt.widest_configs(shared_limit_of(arch))]
    return [*configs, *sm90.widest_configs()] if arch == 90 else configs
