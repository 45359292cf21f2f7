"""Scores: what is done to x = scale <q, k> before the softmax, each as one expression.

A score is a function of x and of (b, h, q, k), logical indices as in `masks.py`. Scores chain with
`>>`: `a >> b` applies a, then b. In a call `softcap=` comes first, then `bias=`, then `score=`.
Arrays in a score that are wrapped in `Param` get a gradient, by symbolic differentiation.
"""

from __future__ import annotations

import numbers
from collections.abc import Callable
from functools import cached_property
from typing import Any

from cuflash.expr.expression import Expression, substitute
from cuflash.expr.functions import maximum, minimum, tanh
from cuflash.expr.nodes import Captured, Node, Param, captured, cast, is_array, trace, variable


class Score:
    """A score by an expression: `Score(lambda x, b, h, q, k: ...)` returns the new score.

    Parameters
    ----------
    function : called once with symbols; it may use what a mask's function may, and float arrays.
        -inf leaves a pair out, as a mask would (without skipping its tile)

    Raises
    ------
    TypeError: the function does what an expression cannot, or returns no number.

    Examples
    --------
    >>> phase = cuflash.Param(np.zeros(3, np.float32))
    >>> codon = cuflash.Score(lambda x, b, h, q, k: x + phase[(q - k) % 3])
    >>> o = cuflash.attention(q, k, v, score=codon)
    """

    def __init__(self, function: Callable[[Node, Node, Node, Node, Node], Any]) -> None:
        if not callable(function):
            raise TypeError(f"Score takes a function of (x, b, h, q, k), got {function!r}")
        self._function = function
        self.combined: Expression | None = None  # as the whole score of a call, kept by combine.py
        self.prepared: dict[Any, Any] = {}  # calls that use it, kept by call.py

    @cached_property
    def node(self) -> Node:
        """The score of the variable x as the root of an expression."""
        node = trace(self._function, ("x", "b", "h", "q", "k"), "score")
        if node.kind == "bool":
            raise TypeError("score must return a number, got a condition: a mask goes to mask=")
        return cast(node, "real")

    def __rshift__(self, other: Score) -> Score:
        if not isinstance(other, Score):
            raise TypeError(f">> chains scores with scores, got {type(other).__name__}")
        return _Chain((*_parts(self), *_parts(other)))


class _Chain(Score):
    """Scores one after the other."""

    def __init__(self, parts: tuple[Score, ...]) -> None:
        super().__init__(lambda x, b, h, q, k: x)
        self.parts = parts

    @cached_property
    def node(self) -> Node:
        node = variable("x")
        for part in self.parts:
            node = substitute(part.node, {"x": node})
        return node


def _parts(score: Score) -> tuple[Score, ...]:
    return score.parts if isinstance(score, _Chain) else (score,)


class Softcap(Score):
    """Caps a score smoothly: cap tanh(x / cap) (Gemma 2, arXiv:2408.00118).

    Parameters
    ----------
    cap : float, greater than 0
    """

    def __init__(self, cap: float) -> None:
        if isinstance(cap, bool) or not isinstance(cap, numbers.Real):
            raise TypeError(f"softcap must be a number, got {cap!r}")
        if not 0 < cap < float("inf"):
            raise ValueError(f"softcap must be greater than 0 and finite, got {cap!r}")
        cap = float(cap)
        super().__init__(lambda x, b, h, q, k: cap * tanh(x / cap))


class ALiBi(Score):
    """A penalty that grows with distance: x - slopes[h] |q - k| (arXiv:2108.12409).

    Parameters
    ----------
    slopes : float array (heads,) or (batch, heads), or a Param
    """

    def __init__(self, slopes: Any) -> None:
        values = _real("slopes", slopes, (1, 2))

        def score(x: Node, b: Node, h: Node, q: Node, k: Node) -> Node:
            slope = values[h] if len(values.shape) == 1 else values[b, h]
            return x - slope * abs(q - k)

        super().__init__(score)


class Bias(Score):
    """Adds an array: x + bias, broadcast to (batch, heads_q, seqlen_q, seqlen_k), storage order.

    Parameters
    ----------
    bias : float array of up to 4 axes, any dtype and strides, or a Param
    """

    def __init__(self, bias: Any) -> None:
        values = _real("bias", bias, (1, 2, 3, 4))
        names = ("b", "h", "row", "column")[4 - len(values.shape) :]
        index = tuple(
            0 if n == 1 else variable(name) for n, name in zip(values.shape, names, strict=True)
        )
        super().__init__(lambda x, b, h, q, k: x + values[index])
        self.array = values


class RelativeBias(Score):
    """Adds a learned bias by relative position, clipped to the table at its ends.

    Parameters
    ----------
    table : float array (heads, length) or a Param: x + table[h, q - k + length // 2]; for tokens on
        a grid (heads, n_1, ..., n_d): the difference of coordinates along each axis, centred at
        n_i // 2. heads may be 1 for one table for all
    shape : tuple, points of the grid along each axis, in C order; None for a sequence
    """

    def __init__(self, table: Any, shape: tuple[int, ...] | None = None) -> None:
        grid = (None,) if shape is None else tuple(int(n) for n in shape)
        values = _real("table", table, (1 + len(grid),))

        def score(x: Node, b: Node, h: Node, q: Node, k: Node) -> Node:
            index: list[Any] = []
            stride = 1
            for axis in reversed(range(len(grid))):
                size, length = grid[axis], values.shape[1 + axis]
                at = [index // stride if stride > 1 else index for index in (q, k)]
                if axis > 0:
                    at = [coordinate % size for coordinate in at]
                offset = at[0] - at[1] + length // 2
                index.insert(0, minimum(maximum(offset, 0), length - 1))
                stride *= size or 1
            return x + values[(0 if values.shape[0] == 1 else h, *index)]

        super().__init__(score)


def _real(name: str, array: Any, axes: tuple[int, ...]) -> Captured:
    if not isinstance(array, Captured) and not is_array(array):
        raise TypeError(f"{name} must be a float array or a cuflash.Param, got {array!r}")
    values = array if isinstance(array, Param) else captured(array)
    if values.kind != "real":
        hint = ": a bool array that masks goes to mask=" if values.kind == "bool" else ""
        raise TypeError(f"{name} must be a float array, got {values.dtype}{hint}")
    if len(values.shape) not in axes:
        count = " or ".join(str(n) for n in axes)
        raise ValueError(f"{name} must have {count} axes, got shape {values.shape}")
    return values
