"""Masks whose keys of a query form one interval: causal, windows, prefixes, intervals from arrays.

A kernel then asks for the two ends of a row once and compares, instead of evaluating the mask for
every pair. `row_interval` finds the ends as text, from comparisons of a bare key index with what
does not depend on the key, joined by and, or, not.
"""

from __future__ import annotations

from typing import NamedTuple

from cuflash.expr.nodes import Node

_KEY = ("k", "column")
_FLIPPED = {
    "less": "greater", "less_equal": "greater_equal",
    "greater": "less", "greater_equal": "less_equal",
}  # fmt: skip
_NEGATED = {
    "less": "greater_equal", "less_equal": "greater",
    "greater": "less_equal", "greater_equal": "less",
}  # fmt: skip
_ALL, _NONE = "(1ll << 62)", "(-1ll << 62)"


class Ends(NamedTuple):
    """The first attended column and the one after the last, as CUDA text; None: no such end.

    {0}, {1}, ... in a text stand for the nodes that it reads; none of them reads the key index.
    """

    first: str | None
    end: str | None


def row_interval(root: Node) -> tuple[Ends, list[Node]] | None:
    """The ends of a query's interval and the nodes they read, None where its keys are not one."""
    read: list[Node] = []
    ends = _ends(root, False, read)
    return None if ends is None else (ends, read)


def _ends(node: Node, negate: bool, read: list[Node]) -> Ends | None:
    if not _reads_key(node):
        yes, no = (_NONE, _ALL) if negate else (_ALL, _NONE)
        return Ends(None, f"({_placeholder(node, read)} ? {yes} : {no})")
    if node.op == "not":
        return _ends(node.args[0], not negate, read)
    if node.op in ("and", "or"):
        parts = [_ends(arg, negate, read) for arg in node.args]
        if any(part is None for part in parts):
            return None
        joined = _intersect if (node.op == "and") != negate else _unite
        return joined(*(part for part in parts if part is not None))
    if node.op not in _FLIPPED or any(arg.kind != "int" for arg in node.args):
        return None
    op, (left, right) = node.op, node.args
    if not _is_key(left):
        op, left, right = _FLIPPED[op], right, left
    if not _is_key(left) or _reads_key(right):
        return None
    op = _NEGATED[op] if negate else op
    bound = f"(long long)({_placeholder(right, read)})"
    if op in ("less", "less_equal"):
        return Ends(None, bound if op == "less" else f"({bound} + 1)")
    return Ends(bound if op == "greater_equal" else f"({bound} + 1)", None)


def _placeholder(node: Node, read: list[Node]) -> str:
    read.append(node)
    return f"{{{len(read) - 1}}}"


def _intersect(a: Ends, b: Ends) -> Ends:
    return Ends(_join("maximum", a.first, b.first), _join("minimum", a.end, b.end))


def _unite(a: Ends, b: Ends) -> Ends | None:
    """Of two intervals that have no end on the same side; others may leave a gap."""
    if a.first is None and b.first is None:
        return Ends(None, _join("maximum", a.end, b.end))
    if a.end is None and b.end is None:
        return Ends(_join("minimum", a.first, b.first), None)
    return None


def _join(function: str, a: str | None, b: str | None) -> str | None:
    return f"{function}({a}, {b})" if a and b else a or b


def _is_key(node: Node) -> bool:
    return node.op == "variable" and node.value in _KEY


def _reads_key(node: Node) -> bool:
    return _is_key(node) or any(map(_reads_key, node.args))
