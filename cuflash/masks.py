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
from cuflash.expr.nodes import Node, trace


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
        self.combined: dict[Any, Expression] = {}  # with causal and window, kept by problem.py

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
