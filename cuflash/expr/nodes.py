"""The graph of an index expression, and how a user's function becomes one.

A mask or a score is a Python function of symbols. Calling it once with `Node` objects records what
it does: every operator builds a node. `operations.py` says what each node means; here is only how
nodes are made. A node is never evaluated in place, so `if`, `and` and `not` on one are errors that
say what to write instead.
"""

from __future__ import annotations

import copy
import types
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

VARIABLES = ("b", "h", "q", "k", "row", "column")
"""b, h: batch item and query head; q, k: logical indices; row, column: indices of storage."""

INTEGER_DTYPES = ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32")
REAL_DTYPES = ("float16", "bfloat16", "float32", "float64")

_UFUNCS = {
    "add": "add", "subtract": "subtract", "multiply": "multiply", "true_divide": "divide",
    "divide": "divide", "floor_divide": "floor_divide", "remainder": "remainder",
    "negative": "negative", "absolute": "absolute", "minimum": "minimum", "maximum": "maximum",
    "less": "less", "less_equal": "less_equal", "greater": "greater",
    "greater_equal": "greater_equal", "equal": "equal", "not_equal": "not_equal",
    "logical_and": "and", "bitwise_and": "and", "logical_or": "or", "bitwise_or": "or",
    "logical_not": "not", "invert": "not", "exp": "exp", "log": "log", "tanh": "tanh",
    "sin": "sin", "cos": "cos", "sqrt": "sqrt",
}  # fmt: skip


def _operator(op: str, *, swap: bool = False) -> Callable[..., Node]:
    def method(self: Node, *other: Any) -> Node:
        return apply(op, *other, self) if swap else apply(op, self, *other)

    return method


class Node:
    """One value of an expression: an operation on other nodes, a variable, a number or a load.

    `kind` is "bool", "int" (int64, Python's floor division and modulo) or "real". `value` holds
    what is no node: the name of a variable, a number, the `Captured` array of a load.
    """

    __slots__ = ("args", "kind", "op", "value")
    __hash__ = object.__hash__

    def __init__(self, op: str, args: tuple[Node, ...], kind: str, value: Any = None) -> None:
        self.op = op
        self.args = args
        self.kind = kind
        self.value = value

    __add__, __radd__ = _operator("add"), _operator("add", swap=True)
    __sub__, __rsub__ = _operator("subtract"), _operator("subtract", swap=True)
    __mul__, __rmul__ = _operator("multiply"), _operator("multiply", swap=True)
    __truediv__, __rtruediv__ = _operator("divide"), _operator("divide", swap=True)
    __floordiv__, __rfloordiv__ = _operator("floor_divide"), _operator("floor_divide", swap=True)
    __mod__, __rmod__ = _operator("remainder"), _operator("remainder", swap=True)
    __and__, __rand__ = _operator("and"), _operator("and", swap=True)
    __or__, __ror__ = _operator("or"), _operator("or", swap=True)
    __lt__, __le__ = _operator("less"), _operator("less_equal")
    __gt__, __ge__ = _operator("greater"), _operator("greater_equal")
    __eq__, __ne__ = _operator("equal"), _operator("not_equal")  # type: ignore[assignment]
    __neg__, __abs__, __invert__ = _operator("negative"), _operator("absolute"), _operator("not")

    def __pow__(self, exponent: Any) -> Node:
        if not isinstance(exponent, int) or not 1 <= exponent <= 8:
            raise TypeError(f"** in an expression takes an integer from 1 to 8, got {exponent!r}")
        result = self
        for _ in range(exponent - 1):
            result = result * self
        return result

    def __pos__(self) -> Node:
        return self

    def __bool__(self) -> bool:
        raise TypeError(
            "an expression has no truth value while it is traced: use & | ~ for `and` `or` `not` "
            "(and for chained comparisons), cuflash.where for `if`"
        )

    def __index__(self) -> int:
        raise TypeError(
            "a plain array cannot be indexed by an expression here: capture it with "
            "cuflash.captured(array), or use it as a variable of the function itself"
        )

    __int__ = __float__ = __index__  # type: ignore[assignment]

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **options: Any) -> Node:
        name = _UFUNCS.get(ufunc.__name__)
        if method != "__call__" or options or name is None:
            raise TypeError(f"numpy.{ufunc.__name__} has no meaning in an expression")
        return apply(name, *inputs)

    def __array_function__(self, function: Any, kinds: Any, args: Any, options: Any) -> Node:
        if function is np.where and not options:
            return where(*args)
        raise TypeError(f"numpy.{function.__name__} has no meaning in an expression")


class Captured:
    """An array that an expression reads. Indexing it with expressions gives a load."""

    def __init__(self, array: Any) -> None:
        self.array = array
        self.range: tuple[int, int] | None = None  # least and greatest value, where known
        self.shape = tuple(int(n) for n in array.shape)
        self.dtype = str(array.dtype).removeprefix("torch.")
        if self.dtype == "bool":
            self.kind = "bool"
        elif self.dtype in INTEGER_DTYPES:
            self.kind = "int"
        elif self.dtype in REAL_DTYPES:
            self.kind = "real"
        else:
            raise TypeError(
                f"an array of dtype {self.dtype} cannot be captured by an expression: "
                f"use bool, {', '.join(INTEGER_DTYPES + REAL_DTYPES)}"
            )

    def detached(self) -> Captured:
        """The same description without the array."""
        other = copy.copy(self)
        other.array = object()  # stands for the array's identity
        return other

    def __getitem__(self, index: Any) -> Node:
        indices = index if isinstance(index, tuple) else (index,)
        nodes = tuple(as_node(i) for i in indices)
        if len(nodes) != len(self.shape):
            raise TypeError(
                f"a captured array of shape {self.shape} takes {len(self.shape)} indices in an "
                f"expression, got {len(nodes)}"
            )
        for node in nodes:
            if node.kind != "int":
                raise TypeError(f"an index of a captured array must be an integer, got {node.kind}")
        return Node("load", nodes, self.kind, self)


def captured(array: Any) -> Captured:
    """An array for use inside a mask or score function.

    Arrays that the function's own variables name are captured by themselves; this is for those
    that it reaches in another way, such as an attribute or a dictionary.

    Parameters
    ----------
    array : array of any supported library (with .shape and .dtype), bool, integer or float, any
        shape and strides

    Raises
    ------
    TypeError: no array, or a dtype that expressions do not know.
    """
    if isinstance(array, Captured):
        return array
    if not is_array(array):
        raise TypeError(f"captured() takes an array, got {type(array).__name__}")
    return Captured(array)


class Param(Captured):
    """An array for which backward returns a gradient.

    It is used like any captured array in a score: `slopes = cuflash.Param(array)`, then `slopes[h]`
    in the function; `bias=cuflash.Param(array)` and `sink=cuflash.Param(array)` likewise.

    Parameters
    ----------
    array : float array of the library of q, any shape and strides

    Raises
    ------
    TypeError: no array, or no float array.
    """

    def __init__(self, array: Any) -> None:
        if not is_array(array):
            raise TypeError(f"Param takes an array, got {type(array).__name__}")
        super().__init__(array)
        if self.kind != "real":
            raise TypeError(f"Param takes a float array, got {self.dtype}")


def is_array(value: Any) -> bool:
    """Whether a value is an array of some library (NumPy's scalars are numbers)."""
    if isinstance(value, np.generic) or not hasattr(value, "dtype") or not hasattr(value, "shape"):
        return False
    names = ("__dlpack__", "__array_interface__", "__cuda_array_interface__")
    return any(hasattr(value, name) for name in names)


def variable(name: str) -> Node:
    """The variable of that name; the same node every time, so that shared parts are seen."""
    return _VARIABLES[name]


_VARIABLES = {name: Node("variable", (), "int", name) for name in VARIABLES}
_VARIABLES["x"] = Node("variable", (), "real", "x")


def as_node(value: Any) -> Node:
    """A node as it is; a Python or NumPy number, or a captured 0-d array, as a node."""
    if isinstance(value, Node):
        return value
    if isinstance(value, Captured) or is_array(value):
        array = value if isinstance(value, Captured) else Captured(value)
        if array.shape:
            raise TypeError(
                f"an array of shape {array.shape} stands in an expression without an index: "
                "write array[q], array[h, k] or the like"
            )
        return array[()]
    if isinstance(value, (bool, np.bool_)):
        return Node("number", (), "bool", bool(value))
    if isinstance(value, (int, np.integer)):
        if not -(2**63) <= int(value) < 2**63:
            raise ValueError(f"a number in an expression must fit 64 bits, got {value}")
        return Node("number", (), "int", int(value))
    if isinstance(value, (float, np.floating)):
        return Node("number", (), "real", float(value))
    raise TypeError(f"a {type(value).__name__} has no meaning in an expression: {value!r}")


def cast(node: Node, kind: str) -> Node:
    """The node as another kind: bool to int, int to real. Never the other way."""
    order = ("bool", "int", "real")
    while node.kind != kind:
        if order.index(node.kind) > order.index(kind):
            raise TypeError(f"an expression of kind {node.kind} stands where {kind} is needed")
        step = order[order.index(node.kind) + 1]
        if node.op == "number":
            node = Node("number", (), step, int(node.value) if step == "int" else float(node.value))
        else:
            node = Node("integer" if step == "int" else "real", (node,), step)
    return node


def apply(op: str, *values: Any) -> Node:
    """The node of one operation, its operands brought to the kind that the operation takes."""
    from cuflash.expr.operations import OPERATIONS

    operation = OPERATIONS[op]
    args = [as_node(value) for value in values]
    if len(args) != operation.arity:
        raise TypeError(f"{op} takes {operation.arity} operands, got {len(args)}")
    if op == "where":
        args[0] = _truth(args[0], op)
        kind = _common(args[1:], "bool")
        return Node(op, (args[0], *(cast(arg, kind) for arg in args[1:])), kind)
    if operation.operands == "bool":
        return Node(op, tuple(_truth(arg, op) for arg in args), "bool")
    kind = "real" if operation.operands == "real" else _common(args, "int")
    if op in ("floor_divide", "remainder") and kind != "int":
        raise TypeError(f"{op} in an expression is for integers, got {kind}")
    if op in ("floor_divide", "remainder", "divide") and _is_zero(args[1]):
        raise ValueError(f"{op} by 0 in an expression")
    return Node(op, tuple(cast(arg, kind) for arg in args), operation.result or kind)


def where(condition: Any, yes: Any, no: Any) -> Node:
    """Of two expressions the first where the condition holds, else the second."""
    return apply("where", condition, yes, no)


def trace(function: Callable[..., Any], names: Iterable[str], argument: str) -> Node:
    """Call a user's function once with symbols and return what it computed.

    Arrays among the function's closure, globals and defaults are replaced by `Captured` for this
    call, so that `ids[q] == ids[k]` works on an array of any library.
    """
    symbols = [variable(name) for name in names]
    try:
        result = _with_captured(function)(*symbols)
    except IndexError as error:
        raise TypeError(
            f"{argument}: {error}. An array that the function reaches through an attribute, a list "
            "or a dictionary must be wrapped first: cuflash.captured(array)"
        ) from error
    try:
        return as_node(result)
    except TypeError as error:
        raise TypeError(f"{argument} must return an expression: {error}") from error


def _with_captured(function: Callable[..., Any]) -> Callable[..., Any]:
    if not isinstance(function, types.FunctionType):
        return function
    seen: dict[int, Captured] = {}

    def wrap(value: Any) -> Any:
        return seen.setdefault(id(value), Captured(value)) if is_array(value) else value

    cells = tuple(types.CellType(wrap(cell.cell_contents)) for cell in function.__closure__ or ())
    names = function.__code__.co_names
    scope = {**function.__globals__}
    scope.update({name: wrap(scope[name]) for name in names if name in scope})
    defaults = tuple(wrap(value) for value in function.__defaults__ or ()) or None
    copy = types.FunctionType(function.__code__, scope, function.__name__, defaults, cells or None)
    copy.__kwdefaults__ = {k: wrap(v) for k, v in (function.__kwdefaults__ or {}).items()} or None
    return copy


def _common(args: Iterable[Node], lowest: str) -> str:
    """The widest kind among the nodes, and at least `lowest`."""
    order = ("bool", "int", "real")
    return order[max(order.index(lowest), *(order.index(arg.kind) for arg in args))]


def _truth(node: Node, op: str) -> Node:
    if node.kind != "bool":
        raise TypeError(f"`{op}` in an expression takes conditions, got a node of kind {node.kind}")
    return node


def _is_zero(node: Node) -> bool:
    return node.op == "number" and node.value == 0
