"""The one table of what can be written in an expression: a row an operation, four uses a row.

`value`: on NumPy arrays. `bound`: from the intervals of the operands the interval of the result,
itself written as nodes, so that one rule serves NumPy and CUDA. `cuda`: text with {0}, {1}, {2}.
`pull`: from the derivative of a result by this node those by its operands, as nodes (reverse mode).

An interval is (low, high), both included; None on a side means unknown. The interval of a
condition is (certainly, possibly), never None. A bound may be rough but not wrong, NaN included:
comparisons of reals are written so that a NaN makes them say "possibly, not certainly".
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from cuflash.expr.nodes import Node, apply, as_node, where

Interval = tuple[Node | None, Node | None]
FALSE, TRUE = as_node(False), as_node(True)


@dataclass(frozen=True)
class Operation:
    """One row: arity, kind of operands ("number": int or real), kind of the result, four uses."""

    arity: int
    operands: str
    result: str | None
    value: Callable[..., Any]
    cuda: str
    bound: Callable[..., Interval]
    pull: Callable[..., tuple[Node | None, ...]] | None = None


def _low(op: str, *nodes: Node | None) -> Node | None:
    """The operation on nodes that are all known; None when one is not."""
    result: Node | None = None
    for node in nodes:
        if node is None:
            return None
        result = node if result is None else apply(op, result, node)
    return result


def _add(a: Interval, b: Interval) -> Interval:
    return _low("add", a[0], b[0]), _low("add", a[1], b[1])


def _subtract(a: Interval, b: Interval) -> Interval:
    return _low("subtract", a[0], b[1]), _low("subtract", a[1], b[0])


def _corners(op: str) -> Callable[[Interval, Interval], Interval]:
    """The least and the greatest result over the four corners of two intervals."""

    def bound(a: Interval, b: Interval) -> Interval:
        if any(side is None for side in (*a, *b)):
            return None, None
        corners = [apply(op, x, y) for x in a for y in b]
        return _low("minimum", *corners), _low("maximum", *corners)

    return bound


def _by_point(op: str) -> Callable[[Interval, Interval], Interval]:
    """Division: monotone in the dividend, so exact when the divisor is one number."""

    def bound(a: Interval, b: Interval) -> Interval:
        if b[0] is None or b[0] is not b[1] or a[0] is None or a[1] is None:
            return None, None
        ends = apply(op, a[0], b[0]), apply(op, a[1], b[0])
        return _low("minimum", *ends), _low("maximum", *ends)

    return bound


def _remainder(a: Interval, b: Interval) -> Interval:
    if b[0] is None or b[0] is not b[1]:
        return None, None
    divisor = b[0]
    low = apply("minimum", as_node(0), divisor + 1)  # the result has the sign of the divisor
    high = apply("maximum", as_node(0), divisor - 1)
    if a[0] is None or a[1] is None:
        return low, high
    same = (a[0] // divisor) == (a[1] // divisor)
    return where(same, a[0] % divisor, low), where(same, a[1] % divisor, high)


def _negative(a: Interval) -> Interval:
    return _low("subtract", _zero(a[1]), a[1]), _low("subtract", _zero(a[0]), a[0])


def _zero(node: Node | None) -> Node | None:
    return None if node is None else as_node(0.0 if node.kind == "real" else 0)


def _absolute(a: Interval) -> Interval:
    zero = _zero(a[0] if a[0] is not None else a[1])
    if a[0] is None or a[1] is None:
        return zero, None
    low = apply("maximum", apply("maximum", a[0], -a[1]), zero)
    return low, apply("maximum", apply("absolute", a[0]), apply("absolute", a[1]))


def _pairwise(op: str) -> Callable[[Interval, Interval], Interval]:
    def bound(a: Interval, b: Interval) -> Interval:
        # one known side already limits: min(a, b) <= a, max(a, b) >= a
        low, high = _low(op, a[0], b[0]), _low(op, a[1], b[1])
        if op == "minimum" and high is None:
            high = a[1] if a[1] is not None else b[1]
        if op == "maximum" and low is None:
            low = a[0] if a[0] is not None else b[0]
        return low, high

    return bound


def _less(certain: str, impossible: str) -> Callable[[Interval, Interval], Interval]:
    """a < b: certain where a.high < b.low; impossible where a.low >= b.high."""

    def bound(a: Interval, b: Interval) -> Interval:
        sure = FALSE if a[1] is None or b[0] is None else apply(certain, a[1], b[0])
        never = FALSE if a[0] is None or b[1] is None else apply(impossible, a[0], b[1])
        return sure, ~never

    return bound


def _swap(bound: Callable[[Interval, Interval], Interval]) -> Callable[..., Interval]:
    return lambda a, b: bound(b, a)


def _equal(a: Interval, b: Interval) -> Interval:
    apart = FALSE
    if a[1] is not None and b[0] is not None:
        apart = apart | (a[1] < b[0])
    if b[1] is not None and a[0] is not None:
        apart = apart | (b[1] < a[0])
    if any(side is None for side in (*a, *b)):
        return FALSE, ~apart
    sure = apply("equal", a[0], a[1]) & apply("equal", b[0], b[1]) & apply("equal", a[0], b[0])
    return sure, ~apart


def _not_equal(a: Interval, b: Interval) -> Interval:
    sure, possible = _equal(a, b)
    return apply("not", possible), apply("not", sure)


def _where(condition: Interval, a: Interval, b: Interval) -> Interval:
    certain, possible = condition

    def side(x: Node | None, y: Node | None, op: str) -> Node | None:
        if x is None or y is None:
            return None
        both = apply(op, x, y) if x.kind != "bool" else (x & y if op == "minimum" else x | y)
        return where(certain, x, where(possible, both, y))

    return side(a[0], b[0], "minimum"), side(a[1], b[1], "maximum")


def _unknown(*_: Interval) -> Interval:
    return None, None


def _real_of(low: float | None, high: float | None) -> Callable[..., Interval]:
    ends = tuple(None if end is None else as_node(end) for end in (low, high))
    return lambda *_: ends  # type: ignore[return-value]


def _cast(kind: str) -> Callable[[Interval], Interval]:
    def side(node: Node | None) -> Node | None:
        return None if node is None else Node(kind, (node,), "int" if kind == "integer" else "real")

    return lambda a: (side(a[0]), side(a[1]))


def _floor_divide(a: Any, b: Any) -> Any:
    with np.errstate(divide="ignore"):
        return np.floor_divide(a, b)


def _remainder_value(a: Any, b: Any) -> Any:
    with np.errstate(divide="ignore"):
        return np.remainder(a, b)


def _choose(by: str) -> Callable[..., tuple[Node, Node]]:
    """Of minimum and maximum: all of the derivative goes to the operand that was taken."""

    def pull(d: Node, node: Node, a: Node, b: Node) -> tuple[Node, Node]:
        first = apply(by, a, b)
        return where(first, d, 0.0), where(first, 0.0, d)

    return pull


_NUMBER, _REAL = "number", "real"

OPERATIONS: dict[str, Operation] = {
    "add": Operation(2, _NUMBER, None, np.add, "({0} + {1})", _add,
        lambda d, y, a, b: (d, d)),
    "subtract": Operation(2, _NUMBER, None, np.subtract, "({0} - {1})", _subtract,
        lambda d, y, a, b: (d, -d)),
    "multiply": Operation(2, _NUMBER, None, np.multiply, "({0} * {1})", _corners("multiply"),
        lambda d, y, a, b: (d * b, d * a)),
    "divide": Operation(2, _REAL, "real", np.divide, "({0} / {1})", _by_point("divide"),
        lambda d, y, a, b: (d / b, -(d * y / b))),
    "floor_divide": Operation(
        2, _NUMBER, None, _floor_divide, "floor_divide({0}, {1})", _by_point("floor_divide")
    ),
    "remainder": Operation(2, _NUMBER, None, _remainder_value, "remainder({0}, {1})", _remainder),
    "negative": Operation(1, _NUMBER, None, np.negative, "(-{0})", _negative,
        lambda d, y, a: (-d,)),
    "absolute": Operation(1, _NUMBER, None, np.absolute, "absolute({0})", _absolute,
        lambda d, y, a: (where(a > 0.0, d, where(a < 0.0, -d, 0.0)),)),
    "minimum": Operation(
        2, _NUMBER, None, np.minimum, "minimum({0}, {1})", _pairwise("minimum"),
        _choose("less_equal"),
    ),
    "maximum": Operation(
        2, _NUMBER, None, np.maximum, "maximum({0}, {1})", _pairwise("maximum"),
        _choose("greater_equal"),
    ),
    "where": Operation(3, "where", None, np.where, "({0} ? {1} : {2})", _where,
        lambda d, y, c, a, b: (None, where(c, d, 0.0), where(c, 0.0, d))),
    "less": Operation(
        2, _NUMBER, "bool", np.less, "({0} < {1})", _less("less", "greater_equal")
    ),
    "less_equal": Operation(
        2, _NUMBER, "bool", np.less_equal, "({0} <= {1})", _less("less_equal", "greater")
    ),
    "greater": Operation(
        2, _NUMBER, "bool", np.greater, "({0} > {1})", _swap(_less("less", "greater_equal"))
    ),
    "greater_equal": Operation(
        2, _NUMBER, "bool", np.greater_equal, "({0} >= {1})", _swap(_less("less_equal", "greater"))
    ),
    "equal": Operation(2, _NUMBER, "bool", np.equal, "({0} == {1})", _equal),
    "not_equal": Operation(2, _NUMBER, "bool", np.not_equal, "({0} != {1})", _not_equal),
    "and": Operation(
        2, "bool", "bool", np.logical_and, "({0} && {1})",
        lambda a, b: (apply("and", a[0], b[0]), apply("and", a[1], b[1])),
    ),
    "or": Operation(
        2, "bool", "bool", np.logical_or, "({0} || {1})",
        lambda a, b: (apply("or", a[0], b[0]), apply("or", a[1], b[1])),
    ),
    "not": Operation(
        1, "bool", "bool", np.logical_not, "(!{0})",
        lambda a: (apply("not", a[1]), apply("not", a[0])),
    ),
    "integer": Operation(
        1, "bool", "int", lambda a: np.asarray(a).astype(np.int64), "index_t({0})", _cast("integer")
    ),
    "real": Operation(1, "int", "real", None, "real_t({0})", _cast("real")),  # type: ignore[arg-type]
    "exp": Operation(1, _REAL, "real", np.exp, "exp({0})", _real_of(0.0, None),
        lambda d, y, a: (d * y,)),
    "log": Operation(1, _REAL, "real", np.log, "log({0})", _unknown,
        lambda d, y, a: (d / a,)),
    "tanh": Operation(1, _REAL, "real", np.tanh, "tanh({0})", _real_of(-1.0, 1.0),
        lambda d, y, a: (d * (1.0 - y * y),)),
    "sin": Operation(1, _REAL, "real", np.sin, "sin({0})", _real_of(-1.0, 1.0),
        lambda d, y, a: (d * apply("cos", a),)),
    "cos": Operation(1, _REAL, "real", np.cos, "cos({0})", _real_of(-1.0, 1.0),
        lambda d, y, a: (-(d * apply("sin", a)),)),
    "sqrt": Operation(1, _REAL, "real", np.sqrt, "sqrt({0})", _unknown,
        lambda d, y, a: (0.5 * d / y,)),
}  # fmt: skip
