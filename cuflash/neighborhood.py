"""The N-dimensional neighbourhood: a mask of tokens that are the points of a grid."""

from __future__ import annotations

from typing import Any

from cuflash.expr.functions import maximum, minimum
from cuflash.expr.nodes import Node
from cuflash.masks import Mask, per_axis


class Neighborhood(Mask):
    """On every axis of a grid the key's coordinate lies in a window about the query's.

    Tokens are the grid's points in C order (the last axis runs fastest). With `edge="shift"` a
    window that would leave the grid is moved inside, so every query sees the same number of keys:
    NATTEN's rule (Hassani et al. 2023, arXiv:2204.07143). With "clip" it is cut at the border.

    Parameters
    ----------
    shape : int or tuple, points of the grid along each axis
    window : int or tuple, keys along each axis; the query's own is the one at window // 2
    dilation : int or tuple, distance between the keys of a window
    causal : bool or tuple, on that axis only keys up to the query's own coordinate: the window ends
        at the query and is never moved
    edge : "shift" or "clip"
    """

    def __init__(
        self,
        shape: int | tuple[int, ...],
        window: int | tuple[int, ...],
        dilation: int | tuple[int, ...] = 1,
        causal: bool | tuple[bool, ...] = False,
        edge: str = "shift",
    ) -> None:
        if edge not in ("shift", "clip"):
            raise ValueError(f"edge must be 'shift' or 'clip', got {edge!r}")
        shape = per_axis("shape", shape, None)
        windows = per_axis("window", window, len(shape))
        steps = per_axis("dilation", dilation, len(shape))
        flags = causal if isinstance(causal, tuple) else (causal,) * len(shape)
        if len(flags) != len(shape) or not all(isinstance(flag, bool) for flag in flags):
            raise ValueError(
                f"causal must be a bool or one for each of {len(shape)} axes, got {causal!r}"
            )

        def allows(b: Node, h: Node, q: Node, k: Node) -> Node:
            result: Any = True
            stride = 1
            for axis in reversed(range(len(shape))):
                at_q, at_k = (_coordinate(index, stride, shape, axis) for index in (q, k))
                sizes = shape[axis], windows[axis], steps[axis]
                near = _in_window(at_q, at_k, *sizes, flags[axis], edge == "shift")
                result = near & result
                stride *= shape[axis]
            return result

        super().__init__(allows)


def _coordinate(index: Node, stride: int, shape: tuple[int, ...], axis: int) -> Node:
    if stride > 1:
        index = index // stride
    return index % shape[axis] if axis > 0 else index


def _in_window(
    q: Node, k: Node, size: int, window: int, step: int, causal: bool, shift: bool
) -> Node:
    """Whether k is in q's window along one axis; with a step, among the points of q's residue."""
    same: Any = True
    last: Any = size - 1
    if step > 1:
        same = q % step == k % step
        last = (size - 1 - q % step) // step  # the last point of the query's residue
        q, k = q // step, k // step
    if causal:
        return (q - window < k) & (k <= q) & same
    first = q - window // 2
    if shift:
        first = maximum(minimum(first, last - (window - 1)), 0)
    return (first <= k) & (k < first + window) & same
