"""One CUDA text from a Config and expressions: prelude plus flattened `kernels_cu`. Needs no GPU.

The text includes nothing, so CuPy's disk cache, which hashes the text, is sound when a header
changes. `#line` marks keep compiler messages pointing at the true file and line.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from cuflash.expr.bounds import BOX_LIMIT
from cuflash.expr.cuda import TABLE_BLOCK
from cuflash.gpu import wgmma
from cuflash.sm90 import Sm90Backward, Sm90Config

if TYPE_CHECKING:
    from cuflash.config import Config
    from cuflash.expr.text import CallText

_INCLUDE = re.compile(r'#include "(.+)"')
_TYPES = {"float16": "float16", "bfloat16": "bfloat16", "float32": "float", "float64": "double"}
_CONSTANTS = (  # of expressions, where the host counts with them too
    '#line 1 "constants"\n'
    f"constexpr int TABLE_BLOCK = {TABLE_BLOCK};\nconstexpr long long BOX_LIMIT = {BOX_LIMIT};\n"
)
OPTIONS = ("--std=c++17",)  # of the compiler, everywhere


def options(config: Config) -> tuple[str, ...]:
    """Options of the compiler for a Config; of two -arch the first counts."""
    return (*OPTIONS, "-arch=sm_90a") if config.family == "sm90" else OPTIONS


@cache
def kernel_dir() -> Path:
    """The folder of the CUDA source: inside an installed package, beside it in a checkout."""
    package = Path(__file__).resolve().parent.parent
    for folder in (package / "kernels_cu", package.parent / "kernels_cu"):
        if folder.is_dir():
            return folder
    raise FileNotFoundError(f"cuflash: no kernels_cu in {package} or beside it; reinstall cuflash")


def flatten(name: str, seen: set[str]) -> str:
    """The text of a file under `kernels_cu` with its includes in place, each file once."""
    if name in seen:
        return ""
    seen.add(name)
    parts = [f'#line 1 "{name}"\n']
    for number, line in enumerate(_read(name).splitlines(keepends=True), start=1):
        include = _INCLUDE.match(line)
        if include:
            parts.append(flatten(_join(name, include[1]), seen))
            parts.append(f'#line {number + 1} "{name}"\n')
        else:
            parts.append("\n" if line.startswith("#pragma once") else line)
    return "".join(parts)


PARTS = ("MAIN", "DK_DV", "GREATEST", "TABLES", "ORDER", "COMBINE")


def text(
    config: Config, call: CallText | None = None, deterministic: bool = False,
    parts_in: Sequence[str] = PARTS,
) -> str:  # fmt: skip
    """The translation unit of one kernel file, specialised for a Config and expressions.

    parts_in : which kernels it holds; parts are compiled side by side (`schedule.parts`)
    """
    seen: set[str] = set()
    has_params = call is not None and bool(call.params) and config.kernel == "backward"
    is_fused = isinstance(config, Sm90Backward) and bool(config.fused)
    has_dsink = call is not None and call.has_dsink and config.kernel == "backward"
    switches = {
        "HAS_MASK": call is not None and call.has_mask,
        "HAS_SCORE": call is not None and call.has_score,
        "HAS_ORDER": call is not None and call.has_order,
        "HAS_SINK": call is not None and call.has_sink,
        "HAS_PARAMS": has_params,
        "HAS_DSINK": has_dsink,
        "IS_DETERMINISTIC": has_params and deterministic,
        "IS_BACKWARD": config.kernel == "backward",
        "HAS_TENSOR_MAPS": config.family == "sm90",
        "IS_FUSED": is_fused,
        **{f"PART_{part}": part in parts_in for part in PARTS},
    }
    # ptxas serialises the wgmma instructions of a kernel that calls a function.
    with_wgmma = {"DK_DV"} if is_fused else {"DK_DV", "MAIN", "GREATEST"}
    is_plain = config.family != "sm90" or with_wgmma.isdisjoint(parts_in)
    cold = "__noinline__" if is_plain else "__forceinline__"
    parts = [
        *(f"#define {name} {int(on)}\n" for name, on in switches.items()),
        f"#define COLD {cold}\n",
        flatten("types.cuh", seen),
        _config(config, 0 if call is None else len(call.words)),
        flatten("params.cuh", seen),
        flatten("math.cuh", seen),
    ]
    if call is not None:
        parts += [_CONSTANTS, flatten("expression.cuh", seen)]
        parts += ['#line 1 "expressions"\n', call.code]
        if has_params:
            parts += [flatten("gradients.cuh", seen), '#line 1 "stores"\n', call.store_code]
    if isinstance(config, Sm90Config):
        parts += [flatten("ptx_sm90.cuh", seen), '#line 1 "wgmma"\n', wgmma.text(config)]
    parts.append(flatten(f"{config.family}/{config.kernel}.cu", seen))
    return "".join(parts)


def _config(config: Config, words: int) -> str:
    """`struct Config`: every field of the Python one, in upper case."""
    constants = {**config.constants(), "words": words}
    head = ['#line 1 "config"', "struct Config {", f"  using dtype = {_TYPES[config.dtype]};"]
    lines = [f"  static constexpr int {name.upper()} = {n};" for name, n in constants.items()]
    return "\n".join([*head, *lines, "};", ""])


@cache
def _read(name: str) -> str:
    return (kernel_dir() / name).read_text(encoding="utf-8")


def _join(including: str, included: str) -> str:
    """Path of an included file relative to `kernels_cu`."""
    parts = including.split("/")[:-1]
    for part in included.split("/"):
        if part == "..":
            parts.pop()
        else:
            parts.append(part)
    return "/".join(parts)
