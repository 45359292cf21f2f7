"""CUDA text of expressions: the one printer of nodes, and the operands that a text reads.

A text stands in the prelude of a kernel, after `struct Params` and `expression.cuh`, whose names it
uses (`floor_divide`, `load_element`, `table_range`, ...). Operands arrive as `p.words`, 8 bytes
each: pointers, strides, numbers, so a new value of any of them compiles nothing.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

from cuflash.expr.expression import Expression, ordered
from cuflash.expr.nodes import Captured, Node
from cuflash.expr.operations import OPERATIONS

TABLE_BLOCK = 64  # tokens that share one entry of a bound table

Word = tuple[Any, ...]
"""What one of `p.words` holds: (which, "pointer", slot), (.., "stride", slot, axis),
(.., "size", slot, axis), (.., "number", slot); ("tables",) the workspace of the bound tables,
("base", table) where one begins; ("param_gradient", param), ("param_base", param),
("param_elements", param), ("dsink_gradient",) of gradients of Params."""


@dataclass(frozen=True)
class TableRows:
    """The extent of a bound table: its side ("q" or "k"), and which axes have rows of their own."""

    side: str
    by_batch: bool
    by_head: bool

    def elements(self, problem: Any) -> int:
        """Elements, 8 bytes each: least and greatest of each block of each row."""
        length = problem.seqlen_q if self.side == "q" else problem.seqlen_k
        rows = (problem.batch if self.by_batch else 1) * (problem.heads_q if self.by_head else 1)
        return 2 * rows * -(-length // TABLE_BLOCK)


class Printer:
    """Prints nodes as statements, one constant each, and collects the words that they read.

    which : "mask", "score" or "sink", whose operands the words are
    real : C type of reals
    exact : products of reals are never contracted; bounds rely on it
    """

    def __init__(
        self, expression: Expression, which: str, words: dict[Word, int], real: str, exact: bool
    ) -> None:
        self._expression = expression
        self._number = {id(node): i for i, node in enumerate(expression.numbers)}
        self._which, self._words, self._exact = which, words, exact
        self.types = {"bool": "bool", "int": "index_t", "real": real}

    def word(self, *what: Any) -> str:
        return f"p.words[{self._words.setdefault(what, len(self._words))}]"

    def own_word(self, *what: Any) -> str:
        """A word that is an operand of this expression."""
        return self.word(self._which, *what)

    def body(self, roots: Sequence[Node]) -> tuple[list[str], list[str]]:
        """Statements that compute the roots, and the roots' names."""
        names: dict[int, str] = {}
        lines: list[str] = []
        for node in ordered(roots):
            text = self._text(node, [names[id(arg)] for arg in node.args])
            if node.op in ("variable", "number"):
                names[id(node)] = text
                continue
            names[id(node)] = f"v{len(lines)}"
            lines.append(f"  const {self.types[node.kind]} v{len(lines)} = {text};")
        return lines, [names[id(root)] for root in roots]

    def _text(self, node: Node, args: list[str]) -> str:
        if node.op == "variable":
            return str(node.value)
        if node.op == "number":
            return self._literal(node)
        if node.op == "load":
            value = f"load_element({self._address(node.value, args)})"
            return f"{self.types['real']}({value})" if node.kind == "real" else value
        if node.op == "box":
            return self._box(node, args)
        if node.op in ("integer", "real"):
            return f"{self.types[node.kind]}({args[0]})"
        if node.op == "multiply" and node.kind == "real" and self._exact:
            return f"multiply({args[0]}, {args[1]})"
        return OPERATIONS[node.op].cuda.format(*args)

    def _literal(self, node: Node) -> str:
        if node.kind == "bool":
            return "true" if node.value else "false"
        kind = self.types[node.kind]
        if id(node) not in self._number:  # made by a bound or a derivative: a small constant
            return f"{kind}({node.value!r})"
        word = self.own_word("number", self._number[id(node)])
        return f"{kind}({word})" if node.kind == "int" else f"{kind}(word_as_real({word}))"

    def _address(self, captured: Captured, index: Iterable[str]) -> str:
        slot = self._expression.slot(captured)
        terms = [
            f"(long long)({name}) * {self.own_word('stride', slot, axis)}"
            for axis, name in enumerate(index)
        ]
        pointer = f"(const element_{captured.dtype}*){self.own_word('pointer', slot)}"
        return " + ".join([pointer, *terms])

    def _box(self, node: Node, ends: list[str]) -> str:
        box = node.value
        axes = len(ends) // 2
        slot = self._expression.slot(box.captured)
        pointer = f"(const element_bool*){self.own_word('pointer', slot)}"
        strides = ", ".join(self.own_word("stride", slot, axis) for axis in range(axes))
        corners = ", ".join(f"(long long)({end})" for end in ends)
        return f"box_{box.quantifier}<{axes}>({pointer}, {{{corners}}}, {{{strides}}})"


def logical_indices(row: str, column: str) -> list[str]:
    """Statements that define row, column and the logical indices q, k of one pair."""
    return [
        f"  const index_t row = index_t({row}), column = index_t({column});",
        "  const index_t q = row + index_t(p.q_offset), k = column;",
    ]


def pack_words(
    words: Sequence[Word],
    operands: dict[str, tuple[Expression, Sequence[Any]]],
    tables: Sequence[TableRows],
    tables_pointer: int,
    gradients: Sequence[int],
    problem: Any,
) -> list[int]:
    """Values of the words for one call.

    operands : by "mask", "score", "sink": the expression, views of its captured arrays
    gradients : addresses of the gradients of Params, those of the score, then the sink's
    """
    params = () if problem.score is None else problem.score.params
    elements = [prod(param.shape) for param in params]
    bases, base = [], 0
    for table in tables:
        bases.append(base)
        base += table.elements(problem)
    values = []
    for which, *what in words:
        if which == "tables":
            values.append(tables_pointer)
        elif which == "base":
            values.append(bases[what[0]])
        elif which == "param_base":
            values.append(sum(elements[: what[0]]))
        elif which == "param_elements":
            values.append(elements[what[0]])
        elif which in ("param_gradient", "dsink_gradient"):
            at = what[0] if what else -1
            values.append(gradients[at] if gradients else 0)  # forward makes no gradient
        else:
            expression, views = operands[which]
            values.append(_operand(expression, views, *what))
    return values


def _operand(
    expression: Expression, views: Sequence[Any], what: str, slot: int, axis: int = 0
) -> int:
    if what == "number":
        number = expression.numbers[slot]
        if number.kind == "int":
            return int(number.value)
        return int(struct.unpack("<q", struct.pack("<d", number.value))[0])
    if what == "pointer":
        return int(views[slot].pointer)
    return int((views[slot].strides if what == "stride" else views[slot].shape)[axis])
