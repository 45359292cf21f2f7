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

import numpy as np

from cuflash.expr.expression import Expression
from cuflash.expr.nodes import Captured, Node, captured, trace


class Mask:
    """A mask by an expression: `Mask(lambda b, h, q, k: ...)`, True where a query attends to a key.

    Parameters
    ----------
    function : called once with symbols for the batch item, the query head, and the logical indices
        of query and key. It may use operators, comparisons, & | ~, abs, //, %, `cuflash.where`,
        `cuflash.minimum`, `cuflash.maximum`, and index arrays of any library: `ids[q] == ids[k]`.
        Numbers are taken as they are then. Arrays on the device of a call are read in every call;
        a NumPy array in a call on a GPU is copied there once: later changes in place are not seen

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

    def to_array(
        self, seqlen_q: int, seqlen_k: int | None = None, batch: int = 1, heads: int = 1,
        positions: Any = None,
    ) -> np.ndarray:  # fmt: skip
        """The mask as bool (batch, heads, seqlen_q, seqlen_k); seqlen_k None means seqlen_q."""
        from cuflash import picture

        return picture.to_array(self, seqlen_q, seqlen_k, batch, heads, positions)

    def density(
        self, seqlen_q: int, seqlen_k: int | None = None, batch: int = 1, heads: int = 1,
        positions: Any = None, tile: int | None = None,
    ) -> float:  # fmt: skip
        """The share of pairs that are attended; with `tile`, the share of tiles that are computed.

        Nothing of the size seqlen_q x seqlen_k is made. The second over the first is the work that
        tiles of this size waste.
        """
        from cuflash import picture

        return picture.density(self, seqlen_q, seqlen_k, batch, heads, positions, tile)

    def plot(
        self, seqlen_q: int, seqlen_k: int | None = None, *, batch: int = 0, head: int = 0,
        positions: Any = None, tile: int = 64, ax: Any = None,
    ) -> Any:  # fmt: skip
        """Draw skipped, partly and wholly attended tiles of one head (needs matplotlib).

        Returns the matplotlib axes, `ax` if given.
        """
        from cuflash import picture

        return picture.plot(self, seqlen_q, seqlen_k, batch, head, positions, tile, ax)

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
        positive("size", size)
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
        positive("step", step)
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
        size_q, size_k = per_axis("block_size", block_size, 2)

        def allows(b: Node, h: Node, q: Node, k: Node) -> Node:
            leading = (b, h)[4 - len(table.shape) :]
            index = [0 if n == 1 else at for n, at in zip(table.shape, leading)]
            return table[(*index, q // size_q, k // size_k)]

        super().__init__(allows)


def positive(name: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise TypeError(f"{name} must be an integer, got {value!r}")
    if value < 1:
        raise ValueError(f"{name} must be at least 1, got {value}")
    return int(value)


def per_axis(name: str, value: Any, count: int | None) -> tuple[int, ...]:
    """One positive integer an axis; a single one stands for all."""
    sizes = tuple(value) if isinstance(value, (tuple, list)) else (value,) * (count or 1)
    if not sizes or (count is not None and len(sizes) != count):
        raise ValueError(f"{name} must be an integer or {count} of them, got {value!r}")
    return tuple(positive(name, size) for size in sizes)


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
