"""Bytes and FLOPs of standard attention and of tiled attention: arithmetic, no arrays.

Standard attention writes the score matrices to memory: S and P in forward; P, dP and dS in
backward. Tiled attention keeps one tile of them on chip; what it adds to memory is a number or two
a row, and it computes S again in backward. Counts are of matrix products only (2 FLOPs a
multiply-add); a mask enters as the share of pairs that it leaves.

References
----------
Dao et al. 2022, arXiv:2205.14135 (Theorems 1 and 2; its figure 2 measures 9.2 times fewer bytes);
Dao 2023, arXiv:2307.08691 (query tiles outside in forward, key tiles outside in backward).
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

ITEMSIZE = {"float16": 2, "bfloat16": 2, "float32": 4, "float64": 8}

# The tile with which bytes read again by tiled attention are counted (block_q and block_k).
TILE = 128


def accumulation_itemsize(dtype: str) -> int:
    """Return the bytes of one element of lse, delta and sums for inputs of `dtype`."""
    return 8 if dtype == "float64" else 4


def forward_flops(pairs: float, head_dim: int, head_dim_v: int) -> float:
    """FLOPs of S = Q K^T and O = P V over `pairs` (query, key) pairs of all query heads."""
    return 2 * pairs * (head_dim + head_dim_v)


def backward_flops(pairs: float, head_dim: int, head_dim_v: int, way: str = "fused") -> float:
    """FLOPs of the matrix products of one backward pass.

    Parameters
    ----------
    pairs : (query, key) pairs of all query heads
    way : "standard", 4 products: dV, dP, dQ, dK; "fused", 5: S again; "split", 7: S and dP again in
        each of a kernel for dq and a kernel for dk and dv (deterministic without atomics)

    Returns
    -------
    For head_dim = head_dim_v, forward and backward together: fused 14/12 and split 18/12 of
    standard, that is +16.7 % and +50 % (arXiv:2205.14135 counts +12.9 % of all FLOPs).
    """
    products = {"standard": (2, 2), "fused": (3, 2), "split": (4, 3)}
    _check_way(way, products)
    of_qk, of_v = products[way]
    return 2 * pairs * (of_qk * head_dim + of_v * head_dim_v)


def standard_bytes(pairs: int, dtype: str, backward: bool) -> int:
    """Bytes that standard attention holds beyond inputs and outputs, at its peak.

    S and P in forward; P (kept by forward), dP and dS in backward; each one element of the input's
    dtype a pair, masked or not.
    """
    return (3 if backward else 2) * pairs * ITEMSIZE[dtype]


def tiled_bytes(rows: int, head_dim: int, dtype: str, backward: bool, way: str = "split") -> int:
    """Bytes that tiled attention holds beyond q, k, v, o and their gradients: O(N).

    Parameters
    ----------
    rows : batch * heads_q * seqlen_q
    way : "split" or "fused" backward

    Returns
    -------
    One number a row in forward, lse. In backward lse and delta, and for the fused way with 16 bit
    inputs also dq as it is summed (arXiv:2205.14135, Theorem 1).
    """
    _check_way(way, ("fused", "split"))
    wide = accumulation_itemsize(dtype)
    if not backward:
        return rows * wide
    dq_sum = head_dim if way == "fused" and ITEMSIZE[dtype] < wide else 0
    return rows * wide * (2 + dq_sum)


@dataclass(frozen=True)
class Traffic:
    """Bytes between chip and memory for one forward or backward pass.

    standard : every matrix written once and read where it is used
    tiled : tiled attention without a cache, tiles of the other side read again for each tile; on a
        GPU this is what crosses from L2 to the processors
    compulsory : each tensor once (do twice, for delta); what leaves DRAM while L2 holds k and v
    """

    standard: int
    tiled: int
    compulsory: int


def traffic(
    batch: int, heads_q: int, heads_k: int, seqlen_q: int, seqlen_k: int, head_dim: int,
    head_dim_v: int, dtype: str, backward: bool, density: float = 1.0,
) -> Traffic:  # fmt: skip
    """Count the bytes that one pass moves, at three levels.

    Forward, elements a head, N rows, M keys, d = head_dim = head_dim_v:
        standard 2Nd + 2Md + 4NM; tiled 2Nd + N + ceil(N/128) 2Md; compulsory 2Nd + 2Md + N
    Backward:
        standard 4Nd + 4Md + 7NM; tiled 4Md + ceil(M/128) (4Nd + 2N); compulsory 5Nd + 4Md + 2N
    (tiled is the fused way; dq is read and written for each key tile). The terms of the tiles
    shrink with density (arXiv:2205.14135, Proposition 4). No level counts masks or dropout.
    """
    item, wide = ITEMSIZE[dtype], accumulation_itemsize(dtype)
    both = head_dim + head_dim_v
    of_q, of_k, of_pairs = seqlen_q * both, seqlen_k * both, seqlen_q * seqlen_k
    shared_k = of_k * heads_k / max(heads_q, 1)  # a group reads its key head once
    if backward:
        again = math.ceil(seqlen_k / TILE) * density
        standard = (2 * of_q + 2 * of_k + 7 * of_pairs) * item
        row = (both + 2 * head_dim) * item + 2 * wide  # q, do; dq read and written; lse, delta
        tiled = 2 * of_k * item + again * seqlen_q * row
        compulsory = (2 * of_q + seqlen_q * head_dim_v + 2 * shared_k) * item + 2 * seqlen_q * wide
    else:
        again = math.ceil(seqlen_q / TILE) * density
        standard = (of_q + of_k + 4 * of_pairs) * item
        tiled = (of_q + again * of_k) * item + seqlen_q * wide
        compulsory = (of_q + shared_k) * item + seqlen_q * wide
    heads = batch * heads_q
    return Traffic(round(heads * standard), round(heads * tiled), round(heads * compulsory))


@dataclass(frozen=True)
class Memory:
    """What attention of one shape costs, standard and tiled; `str()` is a table.

    Bytes and FLOPs of one forward pass (`*_forward`) and one backward pass (`*_backward`; 0 where
    `backward=False`). Tensors are q, k, v, o and in backward their gradients; lse counts as tiled
    attention's own. `recompute` is the share of matrix FLOPs that it adds on the same pairs.
    """

    title: str
    tensors_forward: int
    tensors_backward: int
    standard_forward: int
    standard_backward: int
    tiled_forward: int
    tiled_backward: int
    standard_flops_forward: float
    standard_flops_backward: float
    flops_forward: float
    flops_backward: float
    recompute: float
    traffic_forward: Traffic
    traffic_backward: Traffic

    @property
    def ratio(self) -> float:
        """Standard attention's extra bytes for each byte that tiled attention adds, at the peak."""
        tiled = max(self.tiled_forward, self.tiled_backward)
        return max(self.standard_forward, self.standard_backward) / max(tiled, 1)

    def __str__(self) -> str:
        forward, back = self.traffic_forward, self.traffic_backward
        rows = [
            ("inputs and outputs", _size, self.tensors_forward, self.tensors_backward),
            ("standard: S, P | P, dP, dS", _size, self.standard_forward, self.standard_backward),
            ("tiled: lse | lse, delta", _size, self.tiled_forward, self.tiled_backward),
            ("standard FLOPs", _count, self.standard_flops_forward, self.standard_flops_backward),
            ("tiled FLOPs", _count, self.flops_forward, self.flops_backward),
            ("standard: bytes moved", _size, forward.standard, back.standard),
            ("tiled: bytes moved, no cache", _size, forward.tiled, back.tiled),
            ("tiled: bytes moved, DRAM", _size, forward.compulsory, back.compulsory),
        ]
        with_backward = self.tensors_backward > 0
        lines = [self.title, f"{'':30}{'forward':>14}" + f"{'backward':>14}" * with_backward]
        for name, show, *cells in rows:
            lines.append(
                f"{name:30}" + "".join(f"{show(x):>14}" for x in cells[: 1 + with_backward])
            )
        lines.append(f"Standard adds {self.ratio:,.0f} times the memory that tiled adds.")
        if with_backward:
            lines.append(f"Tiled computes S again: {self.recompute:+.1%} matrix FLOPs.")
        lines.append("Bytes moved are a model, not a measurement.")
        return "\n".join(lines)


def memory(
    *, seqlen: int, seqlen_k: int | None = None, batch: int = 1, heads: int = 1,
    heads_k: int | None = None, head_dim: int = 64, head_dim_v: int | None = None,
    dtype: str = "float16", density: float = 1.0, backward: bool = True, way: str = "split",
) -> Memory:  # fmt: skip
    """Memory, FLOPs and bytes moved of standard attention beside those of tiled attention.

    Parameters
    ----------
    seqlen, seqlen_k : queries and keys; seqlen_k None means seqlen
    batch, heads, heads_k : heads_k None means heads
    head_dim, head_dim_v : of q and k, and of v; head_dim_v None means head_dim
    dtype : "float16", "bfloat16", "float32" or "float64"
    density : share of the pairs that a mask leaves (tiled attention skips the rest)
    backward : count a backward pass too
    way : of tiled backward, "split" (two kernels, +50 % FLOPs) or "fused" (one, +16.7 %)

    Returns
    -------
    Memory, a frozen record whose str() is a table.

    Raises
    ------
    TypeError: dtype is none of the four. ValueError: a size is negative, density not in 0..1, or
    `way` unknown.

    References
    ----------
    arXiv:2205.14135, arXiv:2307.08691; the formulas are those of the functions of this module.

    Examples
    --------
    >>> report = cuflash.memory(seqlen=8192, heads=32)
    >>> report.standard_forward, report.tiled_forward
    (8589934592, 1048576)
    """
    if dtype not in ITEMSIZE:
        raise TypeError(f"dtype must be one of {', '.join(ITEMSIZE)}, got {dtype!r}")
    if not 0 <= density <= 1:
        raise ValueError(f"density must be in 0..1, got {density!r}")
    _check_way(way, ("fused", "split"))
    seqlen_k = seqlen if seqlen_k is None else seqlen_k
    heads_k = heads if heads_k is None else heads_k
    head_dim_v = head_dim if head_dim_v is None else head_dim_v
    sizes = {"seqlen": seqlen, "seqlen_k": seqlen_k, "batch": batch, "heads": heads}
    sizes |= {"heads_k": heads_k, "head_dim": head_dim, "head_dim_v": head_dim_v}
    for name, size in sizes.items():
        if size < 0:
            raise ValueError(f"{name} must not be negative, got {size}")
    both, rows = head_dim + head_dim_v, batch * heads * seqlen
    pairs = rows * seqlen_k
    seen = pairs * density
    tensors = (rows + batch * heads_k * seqlen_k) * both * ITEMSIZE[dtype]
    shape = (batch, heads, heads_k, seqlen, seqlen_k, head_dim, head_dim_v, dtype)
    title = (
        f"batch {batch}, heads {heads}:{heads_k}, seqlen {seqlen} x {seqlen_k}, "
        f"head_dim {head_dim}:{head_dim_v}, {dtype}" + f", density {density:.3g}" * (density < 1)
    )
    return Memory(
        title=title,
        tensors_forward=tensors,
        tensors_backward=2 * tensors * backward,
        standard_forward=standard_bytes(pairs, dtype, False),
        standard_backward=standard_bytes(pairs, dtype, True) * backward,
        tiled_forward=tiled_bytes(rows, head_dim, dtype, False),
        tiled_backward=tiled_bytes(rows, head_dim, dtype, True, way) * backward,
        standard_flops_forward=forward_flops(pairs, head_dim, head_dim_v),
        standard_flops_backward=backward_flops(pairs, head_dim, head_dim_v, "standard") * backward,
        flops_forward=forward_flops(seen, head_dim, head_dim_v),
        flops_backward=backward_flops(seen, head_dim, head_dim_v, way) * backward,
        recompute=_recompute(head_dim, head_dim_v, way) if backward else 0.0,
        traffic_forward=traffic(*shape, False, density),
        traffic_backward=traffic(*shape, True, density) if backward else Traffic(0, 0, 0),
    )


def _recompute(head_dim: int, head_dim_v: int, way: str) -> float:
    """Return matrix FLOPs of forward and tiled backward over standard, less 1, on equal pairs."""
    forward = forward_flops(1, head_dim, head_dim_v)
    standard = forward + backward_flops(1, head_dim, head_dim_v, "standard")
    tiled = forward + backward_flops(1, head_dim, head_dim_v, way)
    return tiled / standard - 1 if standard else 0.0


def _check_way(way: str, known: Iterable[str]) -> None:
    if way not in known:
        raise ValueError(f"way must be one of {', '.join(known)}, got {way!r}")


def _size(count: float) -> str:
    """Return bytes in the largest binary unit of which there is one."""
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if count < 1024 or unit == "TiB":
            break
        count /= 1024
    return f"{count:,.0f} {unit}" if unit == "B" else f"{count:,.1f} {unit}"


def _count(flops: float) -> str:
    """Return FLOPs in the largest decimal unit of which there is one."""
    for unit in ("", "K", "M", "G", "T", "P"):
        if flops < 1000 or unit == "P":
            break
        flops /= 1000
    return f"{flops:,.1f} {unit}FLOP"
