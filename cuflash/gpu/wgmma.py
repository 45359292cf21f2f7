"""The wgmma instructions that a Config of the sm90 family needs, as CUDA functions.

An instruction names every register of its result, so there is one function a width; overloads on
the size of the result tell them apart. PTX ISA, 9.7.15.5 (wgmma.mma_async).
"""

from __future__ import annotations

from cuflash.sm90 import Sm90Config

_TYPES = {"float16": "f16", "bfloat16": "bf16"}


def text(config: Sm90Config) -> str:
    """The functions of a Config: scores of a tile, sums of its results."""
    width, width_v = config.widths
    if config.kernel == "forward":
        return ss(config.block_k, config.dtype) + rs(width_v, config.dtype)
    passing = {tile[kernel == "dq"] for kernel, tile in config.tiles.items()}
    functions = [ss(width, config.dtype) for width in sorted(passing)]
    functions += [rs(width, config.dtype) for width in sorted({width, width_v})]
    return "".join([*functions, ss_columns(config.dtype)])


def ss(width: int, dtype: str) -> str:
    """`wgmma_ss(d, a, b, accumulate)`: d[64][width] = a b (+ d); a [64][16] and b [16][width] in
    shared memory, both with the 16 along the rows of their tiles.
    """  # fmt: skip
    n = width // 2
    return _function(
        f"wgmma_ss(float (&d)[{n}], unsigned long long a, unsigned long long b, int accumulate)",
        f"m64n{width}k16.f32.{_TYPES[dtype]}.{_TYPES[dtype]}", n, f"%{n}", ['"l"(a)'], "0, 0",
    )  # fmt: skip


def ss_columns(dtype: str) -> str:
    """`wgmma_ss_columns(d, a, b, accumulate)`: d[64][64] = a^T b (+ d); a and b [16][64] in shared
    memory, with the 64 along the rows of their tiles.
    """  # fmt: skip
    return _function(
        "wgmma_ss_columns(float (&d)[32], unsigned long long a, unsigned long long b,"
        " int accumulate)",
        f"m64n64k16.f32.{_TYPES[dtype]}.{_TYPES[dtype]}", 32, "%32", ['"l"(a)'], "1, 1",
    )  # fmt: skip


def rs(width: int, dtype: str) -> str:
    """`wgmma_rs(d, a, b, accumulate)`: a in registers, b [16][width] with the width along the rows
    of its tile.
    """  # fmt: skip
    n = width // 2
    registers = ", ".join(f"%{n + i}" for i in range(4))
    return _function(
        f"wgmma_rs(float (&d)[{n}], const unsigned* a, unsigned long long b, int accumulate)",
        f"m64n{width}k16.f32.{_TYPES[dtype]}.{_TYPES[dtype]}", n, f"{{{registers}}}",
        [f'"r"(a[{i}])' for i in range(4)], "1",
    )  # fmt: skip


def _function(
    signature: str, shape: str, n: int, a: str, operands: list[str], transposed: str
) -> str:
    """The function; operands follow the n numbers of the result: a, b, then whether to add."""
    result = ", ".join(f"%{i}" for i in range(n))
    at = n + len(operands)
    outputs = ", ".join(f'"+f"(d[{i}])' for i in range(n))
    inputs = ", ".join([*operands, '"l"(b)', '"r"(accumulate)'])
    return (
        f"__device__ __forceinline__ void {signature} {{\n"
        f'  asm volatile("{{ .reg .pred add; setp.ne.b32 add, %{at + 1}, 0;'
        f" wgmma.mma_async.sync.aligned.{shape}"
        f' {{{result}}}, {a}, %{at}, add, 1, 1, {transposed}; }}"\n'
        f"               : {outputs} : {inputs});\n}}\n"
    )
