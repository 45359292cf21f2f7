"""Masks: which keys a query attends to, each as one expression of (b, h, q, k).

q and k are logical indices: with the default alignment the last query sees the last key, so query
row r has q = r + seqlen_k - seqlen_q, and q may be negative when there are more queries than keys.
Masks combine with `&`, `|` and `~`. What a mask allows is derived from its expression alone: the
tiles that are skipped, the values in the others, and the CUDA text.
"""

from __future__ import annotations

import numbers
from collections.abc import Callable
from functools import cached_property
from typing import Any

from cuflash.expr.expression import Expression
from cuflash.expr.functions import maximum, minimum
from cuflash.expr.nodes import Captured, Node, captured, trace


class Mask:
    """A mask by an expression: `Mask(lambda b, h, q, k: ...)`, True where a query attends to a key.

    Parameters
    ----------
    function : called once with symbols for the batch item, the query head, and the logical indices
        of query and key. It may use operators, comparisons, & | ~, abs, //, %, `cuflash.where`,
        `cuflash.minimum`, `cuflash.maximum`, and index arrays of any library: `ids[q] == ids[k]`.

    Raises
    ------
    TypeError: the function does what an expression cannot (`if`, `and`), or returns no condition.
    ValueError: an index can leave its array (raised by the call that uses the mask).

    Examples
    --------
    >>> band = cuflash.Mask(lambda b, h, q, k: abs(q - k) <= 128)
    >>> o = cuflash.attention(q, k, v, mask=band & cuflash.Causal())
    """

    def __init__(self, function: Callable[[Node, Node, Node, Node], Any]) -> None:
        if not callable(function):
            raise TypeError(f"Mask takes a function of (b, h, q, k), got {function!r}")
        self._function = function
        self.combined: dict[Any, Expression] = {}  # with causal and window, kept by combine.py
        self.prepared: dict[Any, Any] = {}  # calls that use it, kept by call.py

    @cached_property
    def node(self) -> Node:
        """The mask as the root of an expression."""
        node = trace(self._function, ("b", "h", "q", "k"), "mask")
        if node.kind != "bool":
            raise TypeError(f"mask must return a condition (a comparison), got kind {node.kind}")
        return node

    def __and__(self, other: Mask) -> Mask:
        return _Combined(_operand(self) & _operand(other))

    def __or__(self, other: Mask) -> Mask:
        return _Combined(_operand(self) | _operand(other))

    def __invert__(self) -> Mask:
        return _Combined(~self.node)

    def __bool__(self) -> bool:
        raise TypeError("a mask has no truth value: combine masks with & | ~, not and / or / not")


class _Combined(Mask):
    def __init__(self, node: Node) -> None:
        super().__init__(lambda b, h, q, k: node)


def _operand(mask: Any) -> Node:
    if not isinstance(mask, Mask):
        raise TypeError(f"& and | combine masks with masks, got {type(mask).__name__}")
    return mask.node


class Causal(Mask):
    """A query attends to the keys up to its own index: k <= q."""

    def __init__(self) -> None:
        super().__init__(lambda b, h, q, k: k <= q)


class SlidingWindow(Mask):
    """A query attends to the keys from q - left to q + right, both included.

    Parameters
    ----------
    left, right : int, number of keys before and after the query's own; None is unlimited
    """

    def __init__(self, left: int | None, right: int | None) -> None:
        for name, side in (("left", left), ("right", right)):
            if side is not None and not isinstance(side, numbers.Integral):
                raise TypeError(f"{name} must be an integer or None, got {side!r}")
            if side is not None and side < 0:
                raise ValueError(f"{name} must not be negative (None is unlimited), got {side}")
        self.left, self.right = left, right

        def allows(b: Node, h: Node, q: Node, k: Node) -> Node | bool:
            after = True if left is None else q - left <= k
            before = True if right is None else k <= q + right
            return after & before

        super().__init__(allows)


class PrefixLM(Mask):
    """A query attends to a prefix, and causally to what follows it: k < n or k <= q.

    Parameters
    ----------
    n : int, length of the prefix; or an integer array (batch,), one length an item
    """

    def __init__(self, n: Any) -> None:
        length = _counts("n", n)
        super().__init__(lambda b, h, q, k: (k < length(b)) | (k <= q))


class Documents(Mask):
    """A query attends to the keys of its own document: ids[q] == ids[k].

    Parameters
    ----------
    ids : integer array (seqlen,) or (batch, seqlen), the document of each logical position, in any
        order
    """

    def __init__(self, ids: Any) -> None:
        of = _per_position("ids", ids, ("int",))
        super().__init__(lambda b, h, q, k: of(b, q) == of(b, k))


class BlockLocal(Mask):
    """A query attends to the keys of its own block: q // size == k // size.

    Parameters
    ----------
    size : int, tokens of a block
    """

    def __init__(self, size: int) -> None:
        _positive("size", size)
        super().__init__(lambda b, h, q, k: q // size == k // size)


class GlobalTokens(Mask):
    """Flagged tokens attend to all and are seen by all: flags[q] or flags[k].

    Parameters
    ----------
    flags : bool array (seqlen,) or (batch, seqlen) over logical positions
    """

    def __init__(self, flags: Any) -> None:
        of = _per_position("flags", flags, ("bool",))
        super().__init__(lambda b, h, q, k: of(b, q) | of(b, k))


class Dilated(Mask):
    """A query attends to every step-th key, its own among them: (q - k) % step == 0.

    Parameters
    ----------
    step : int, at least 1
    """

    def __init__(self, step: int) -> None:
        _positive("step", step)
        super().__init__(lambda b, h, q, k: (q - k) % step == 0)


class Intervals(Mask):
    """A query attends to an interval of keys of its own: start[q] <= k < end[q].

    Parameters
    ----------
    start, end : integer arrays (seqlen,) or (batch, seqlen) over logical positions of queries
    """

    def __init__(self, start: Any, end: Any) -> None:
        first = _per_position("start", start, ("int",))
        last = _per_position("end", end, ("int",))
        super().__init__(lambda b, h, q, k: (first(b, q) <= k) & (k < last(b, q)))


class BlockSparse(Mask):
    """A query attends to the keys of the blocks that a table marks.

    Parameters
    ----------
    blocks : bool array (..., blocks of queries, blocks of keys), with up to two leading axes:
        (heads,) or (batch, heads), of size 1 where they do not matter. A row may be empty
    block_size : int, or a pair (size_q, size_k): tokens of a block
    """

    def __init__(self, blocks: Any, block_size: int | tuple[int, int]) -> None:
        table = captured(blocks)
        if table.kind != "bool" or not 2 <= len(table.shape) <= 4:
            raise TypeError(
                "blocks must be a bool array of 2 to 4 axes, (batch, heads, blocks of queries, "
                f"blocks of keys) without the leading ones or with, got {table.dtype} of shape "
                f"{table.shape}"
            )
        size_q, size_k = _axes("block_size", block_size, 2)

        def allows(b: Node, h: Node, q: Node, k: Node) -> Node:
            leading = (b, h)[4 - len(table.shape) :]
            index = [0 if n == 1 else at for n, at in zip(table.shape, leading)]
            return table[(*index, q // size_q, k // size_k)]

        super().__init__(allows)


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
        shape = _axes("shape", shape, None)
        windows = _axes("window", window, len(shape))
        steps = _axes("dilation", dilation, len(shape))
        flags = causal if isinstance(causal, tuple) else (causal,) * len(shape)
        if len(flags) != len(shape) or not all(isinstance(flag, bool) for flag in flags):
            raise ValueError(
                f"causal must be a bool or one for each of {len(shape)} axes, got {causal!r}"
            )

        def allows(b: Node, h: Node, q: Node, k: Node) -> Node:
            result: Any = True
            stride = 1
            axes = list(zip(shape, windows, steps, flags, strict=True))
            for axis in reversed(range(len(axes))):
                at = [_coordinate(index, stride, shape, axis) for index in (q, k)]
                result = _in_window(*at, *axes[axis], edge == "shift") & result
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


def _positive(name: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise TypeError(f"{name} must be an integer, got {value!r}")
    if value < 1:
        raise ValueError(f"{name} must be at least 1, got {value}")
    return int(value)


def _axes(name: str, value: Any, count: int | None) -> tuple[int, ...]:
    """One positive integer an axis; a single one stands for all."""
    sizes = tuple(value) if isinstance(value, (tuple, list)) else (value,) * (count or 1)
    if not sizes or (count is not None and len(sizes) != count):
        raise ValueError(f"{name} must be an integer or {count} of them, got {value!r}")
    return tuple(_positive(name, size) for size in sizes)


def _per_position(name: str, array: Any, kinds: tuple[str, ...]) -> Callable[[Node, Node], Node]:
    """Reader of an array (seqlen,) or (batch, seqlen) at a batch item and a logical position."""
    values = captured(array)
    if values.kind not in kinds or len(values.shape) not in (1, 2):
        raise TypeError(
            f"{name} must be an array of kind {' or '.join(kinds)} of shape (seqlen,) or "
            f"(batch, seqlen), got {values.dtype} of shape {values.shape}"
        )
    return lambda b, at: values[at] if len(values.shape) == 1 else values[b, at]


def _counts(name: str, value: Any) -> Callable[[Node], Any]:
    if isinstance(value, numbers.Integral) and not isinstance(value, bool):
        if value < 0:
            raise ValueError(f"{name} must not be negative, got {value}")
        return lambda b: int(value)
    values: Captured = captured(value)
    if values.kind != "int" or len(values.shape) != 1:
        raise TypeError(
            f"{name} must be an integer or an integer array (batch,), got {values.dtype} of shape "
            f"{values.shape}"
        )
    return lambda b: values[b]
