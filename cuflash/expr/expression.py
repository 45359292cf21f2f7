"""An expression as the rest of cuflash sees it: its structure, its operands, its values on NumPy.

The structure (operations, which operand stands where, dtypes of captured arrays) chooses a kernel
and is hashed; captured arrays and Python numbers are operands, so another array or another window
size runs the same kernel.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np

from cuflash.expr.nodes import Captured, Node, Param
from cuflash.expr.operations import OPERATIONS

_BAND = {
    *("variable", "number", "add", "subtract", "and"),
    *("less", "less_equal", "greater", "greater_equal"),
}

Ranges = tuple[tuple[str, int, int], ...]
"""Of each variable the name, the least and the greatest value."""


class Expression:
    """A traced expression. Equal to another of the same structure, whatever its operands hold."""

    def __init__(self, root: Node) -> None:
        self.root = root
        self.nodes = ordered([root])
        self.arrays: list[Captured] = []
        self.numbers: list[Node] = []
        place = {id(node): i for i, node in enumerate(self.nodes)}
        slots: dict[int, int] = {}
        key: list[Any] = []
        for node in self.nodes:
            payload: Any = node.value
            if node.op == "number" and node.kind != "bool":
                self.numbers.append(node)
                payload = None
            elif node.op == "load":
                captured: Captured = node.value
                slot = slots.setdefault(_identity(captured), len(self.arrays))
                if slot == len(self.arrays):
                    self.arrays.append(captured)
                payload = (slot, captured.dtype, isinstance(captured, Param))
            key.append((node.op, node.kind, tuple(place[id(a)] for a in node.args), payload))
        self.key = tuple(key)
        self._slots = slots
        self._hash = hash(self.key)

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Expression) and self.key == other.key

    def __repr__(self) -> str:
        return f"Expression({text(self.root)})"

    def slot(self, captured: Captured) -> int:
        """Which of `arrays` a load reads."""
        return self._slots[_identity(captured)]

    @cached_property
    def params(self) -> tuple[Param, ...]:
        """The captured arrays that get a gradient, in the order of `arrays`."""
        return tuple(array for array in self.arrays if isinstance(array, Param))

    def detached(self) -> Expression:
        """An equal expression that knows shapes and dtypes of its arrays but holds none."""
        by_slot = [array.detached() for array in self.arrays]
        done: dict[int, Node] = {}
        for node in self.nodes:
            value = by_slot[self.slot(node.value)] if node.op == "load" else node.value
            args = tuple(done[id(arg)] for arg in node.args)
            done[id(node)] = Node(node.op, args, node.kind, value)
        return Expression(done[id(self.root)])

    @cached_property
    def variables(self) -> frozenset[str]:
        """Names of the variables that the expression reads."""
        return frozenset(node.value for node in self.nodes if node.op == "variable")

    @cached_property
    def is_band(self) -> bool:
        """Whether it says of a mask that the keys of a query form an interval that moves with it.

        Such as causal, a window, or both: the number of keys is the same or grows with the query,
        so that the last query first is the longest first. False where the structure does not tell.
        """
        if not all(node.op in _BAND for node in self.nodes) or self.variables & {"b", "h"}:
            return False
        if not self.variables >= {"q", "k"} and not self.variables >= {"row", "column"}:
            return False
        # Right of the diagonal, the interval has ended; on it, it has not at any height. Only one
        # that shrinks with the query, or never ends, does otherwise.
        far = 1 << 60
        right = {"q": 0, "row": 0, "k": far, "column": far}
        along = dict.fromkeys(right, far)
        return bool(self.evaluate(along, ())) and not bool(self.evaluate(right, ()))

    @cached_property
    def operands(self) -> tuple[Any, ...]:
        """What `survey` depends on beside the structure: numbers, shapes and ranges of arrays."""
        arrays = tuple((array.shape, array.range) for array in self.arrays)
        return tuple(n.value for n in self.numbers), arrays

    def leaves(self, arrays: Sequence[np.ndarray]) -> dict[int, np.ndarray]:
        """The NumPy array of each `Captured`, by its id (several may stand for one array)."""
        loads = (node.value for node in self.nodes if node.op == "load")
        return {id(captured): arrays[self.slot(captured)] for captured in loads}

    def evaluate(
        self, env: Mapping[str, Any], arrays: Sequence[np.ndarray], integer: Any = np.int64
    ) -> np.ndarray:
        """Values on NumPy: `env` gives each variable an integer or an array; all broadcast."""
        return evaluate(self.nodes, env, self.leaves(arrays), integer=integer)[-1]

    def survey(self, ranges: Ranges) -> int:
        """Bits (32 or 64) that the integers of the expression need.

        Raises
        ------
        ValueError: an index can leave its captured array.
        """
        key = (self.key, self.operands, ranges)
        if key not in _SURVEYED:
            if len(_SURVEYED) >= 4096:
                _SURVEYED.clear()
            _SURVEYED[key] = _survey(self, ranges)
        return _SURVEYED[key]


def _identity(captured: Captured) -> int:
    """What makes two captured arrays one: the array, but a Param is only itself."""
    return id(captured) if isinstance(captured, Param) else id(captured.array)


def ordered(roots: Sequence[Node]) -> list[Node]:
    """Every node below the roots once, operands before their users, each root after its own."""
    done: dict[int, Node] = {}
    stack: list[tuple[Node, bool]] = [(root, False) for root in reversed(roots)]
    while stack:
        node, ready = stack.pop()
        if id(node) in done:
            continue
        if ready:
            done[id(node)] = node
            continue
        stack.append((node, True))
        stack.extend((arg, False) for arg in reversed(node.args))
    return list(done.values())


def substitute(root: Node, by: Mapping[str, Node]) -> Node:
    """The expression with nodes in the place of variables; shared parts stay shared."""
    done: dict[int, Node] = {}
    for node in ordered([root]):
        if node.op == "variable" and node.value in by:
            done[id(node)] = by[node.value]
            continue
        args = tuple(done[id(arg)] for arg in node.args)
        same = all(a is b for a, b in zip(args, node.args, strict=True))
        done[id(node)] = node if same else Node(node.op, args, node.kind, node.value)
    return done[id(root)]


def evaluate(
    nodes: Sequence[Node], env: Mapping[str, Any], arrays: Mapping[int, np.ndarray],
    real: Any = np.float64, integer: Any = np.int64,
) -> list[Any]:  # fmt: skip
    """Values of `ordered` nodes; `arrays` by the id of their `Captured`, which are read as values
    of dtype `real` or `integer`."""
    values: dict[int, Any] = {}
    for node in nodes:
        args = [values[id(arg)] for arg in node.args]
        if node.op == "variable":
            value = env[node.value]
        elif node.op == "number":
            value = node.value
        elif node.op == "load":
            value = _gather(arrays[id(node.value)], args, node.kind, real, integer)
        elif node.op == "box":
            value = node.value.on_numpy(args, arrays)
        elif node.op == "real":
            value = np.asarray(args[0], real)
        else:
            with np.errstate(all="ignore"):
                value = OPERATIONS[node.op].value(*args)
        values[id(node)] = value
    return [values[id(node)] for node in nodes]


def _gather(
    array: np.ndarray, index: Sequence[Any], kind: str, real: Any, integer: Any
) -> np.ndarray:
    if array.ndim > 1 and array.flags.c_contiguous:
        value = np.take(array, flat_index(index, array.shape))
    else:
        value = np.asarray(array[tuple(index)])
    return value if kind == "bool" else value.astype(integer if kind == "int" else real, copy=False)


def flat_index(index: Sequence[Any], shape: tuple[int, ...]) -> np.ndarray:
    """Where an element lies in C order; leading indices, such as a head, broadcast last."""
    flat, stride = np.asarray(index[-1], np.intp), shape[-1]
    for at, size in zip(index[-2::-1], shape[-2::-1], strict=True):
        flat = np.asarray(at, np.intp) * stride + flat
        stride *= size
    return flat


def text(node: Node) -> str:
    """The expression as a person would write it, for messages."""
    if node.op in ("variable", "number"):
        return str(node.value)
    args = ", ".join(text(arg) for arg in node.args)
    return f"array{list(node.value.shape)}[{args}]" if node.op == "load" else f"{node.op}({args})"


_SURVEYED: dict[Any, int] = {}  # by structure and operands' values and shapes; holds no array


def _survey(expression: Expression, ranges: Ranges) -> int:
    """By interval arithmetic over the whole call."""
    from cuflash.expr.bounds import Bounds

    bounds = Bounds(expression, points=False, tables=False)
    env = {}
    for name, low, high in ranges:
        env.update({f"{name}_low": low, f"{name}_high": high})
    known = [node for pair in bounds.intervals.values() for node in pair if node is not None]
    order = ordered(known)
    values = {id(n): v for n, v in zip(order, evaluate(order, env, {}), strict=True)}

    def numbers(node: Node) -> tuple[float, float]:
        low, high = bounds.intervals[id(node)]
        return (
            -np.inf if low is None else float(values[id(low)]),
            np.inf if high is None else float(values[id(high)]),
        )

    bits = 32
    for node in expression.nodes:
        if node.kind == "int":
            ends = numbers(node)
            if ends[0] < -(2**31) or ends[1] >= 2**31:
                bits = 64
        if node.op == "load":
            _check_index(node, [numbers(arg) for arg in node.args])
    return bits


def _check_index(load: Node, intervals: Sequence[tuple[float, float]]) -> None:
    for axis, (size, (low, high)) in enumerate(zip(load.value.shape, intervals, strict=True)):
        if low < 0 or high >= size:
            known = np.isfinite([low, high]).all()
            shown = f"[{low:.0f}, {high:.0f}]" if known else "an unknown range"
            raise ValueError(
                f"index {text(load.args[axis])} of a captured array of shape {load.value.shape} "
                f"can leave axis {axis}: it spans {shown}, the axis has {size}. "
                "Clip it with cuflash.minimum and cuflash.maximum"
            )
