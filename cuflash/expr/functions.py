"""The functions that a mask or a score may call beside Python's operators."""

from __future__ import annotations

from typing import Any

from cuflash.expr.nodes import Node, apply


def minimum(a: Any, b: Any) -> Node:
    """The smaller of two expressions."""
    return apply("minimum", a, b)


def maximum(a: Any, b: Any) -> Node:
    """The greater of two expressions."""
    return apply("maximum", a, b)


def exp(a: Any) -> Node:
    """e to the power of an expression."""
    return apply("exp", a)


def log(a: Any) -> Node:
    """Natural logarithm of an expression."""
    return apply("log", a)


def tanh(a: Any) -> Node:
    """Hyperbolic tangent of an expression."""
    return apply("tanh", a)


def sin(a: Any) -> Node:
    """Sine of an expression, in radians."""
    return apply("sin", a)


def cos(a: Any) -> Node:
    """Cosine of an expression, in radians."""
    return apply("cos", a)


def sqrt(a: Any) -> Node:
    """Square root of an expression."""
    return apply("sqrt", a)
