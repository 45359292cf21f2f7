"""CUDA text of an expression: the mask per pair, its state on a tile, and its bound tables.

The text stands in the prelude of a kernel, after `struct Params` and `expression.cuh`, whose names
it uses (`floor_divide`, `load_element`, `table_range`, ...). Operands arrive as `p.words`, 8 bytes
each: pointers, strides, numbers, so a new value of any of them compiles nothing.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from cuflash.expr.bounds import Bounds, Table
from cuflash.expr.expression import Expression, ordered
from cuflash.expr.nodes import Node
from cuflash.expr.operations import OPERATIONS

TABLE_BLOCK = 64  # tokens that share one entry of a bound table; the same in expression.cuh
_TYPES = {"bool": "bool", "int": "index_t", "real": "real_t"}


@dataclass(frozen=True)
class TableRows:
    """The extent of a bound table: its side ("q" or "k"), and which axes have rows of their own."""

    side: str
    by_batch: bool
    by_head: bool


@dataclass(frozen=True)
class MaskText:
    """The CUDA functions of a mask and the launch parameters that they read.

    words : what each of `p.words` holds, in order: ("pointer", slot), ("stride", slot, axis),
        ("number", slot), ("tables",) the workspace of the bound tables, ("base", table)
    tables : of each bound table its side and whether it has a row a batch item and a head; empty
        when the mask needs none: then there is no `tabulate` kernel

    It holds no operand, so that a cached text keeps no array alive.
    """

    code: str
    words: tuple[tuple[Any, ...], ...]
    tables: tuple[TableRows, ...]

    def table_elements(self, problem: Any) -> int:
        """Elements (8 bytes each) of the workspace that the tables need."""
        return sum(_elements(table, problem) for table in self.tables)

    def pack(
        self, expression: Expression, views: Sequence[Any], problem: Any, tables_pointer: int = 0
    ) -> list[int]:
        """Values of the words for one call; `views` are the captured arrays on the device."""
        bases, base = [], 0
        for table in self.tables:
            bases.append(base)
            base += _elements(table, problem)
        values = []
        for what, *at in self.words:
            if what == "pointer":
                values.append(views[at[0]].pointer)
            elif what == "stride":
                values.append(views[at[0]].strides[at[1]])
            elif what == "number":
                values.append(_bits(expression.numbers[at[0]]))
            else:
                values.append(tables_pointer if what == "tables" else bases[at[0]])
        return values


class _Printer:
    """Prints nodes as statements, one constant each, and collects the words that they read."""

    def __init__(self, expression: Expression, words: dict[tuple[Any, ...], int]) -> None:
        self._expression = expression
        self._number = {id(node): i for i, node in enumerate(expression.numbers)}
        self._words = words

    def word(self, *what: Any) -> str:
        return f"p.words[{self._words.setdefault(what, len(self._words))}]"

    def body(self, roots: Sequence[Node]) -> tuple[list[str], list[str]]:
        """Statements that compute the roots, and the roots' names."""
        names: dict[int, str] = {}
        lines = []
        for node in ordered(roots):
            text = self._text(node, [names[id(arg)] for arg in node.args])
            if node.op in ("variable", "number"):
                names[id(node)] = text
                continue
            names[id(node)] = f"v{len(lines)}"
            lines.append(f"  const {_TYPES[node.kind]} v{len(lines)} = {text};")
        return lines, [names[id(root)] for root in roots]

    def _text(self, node: Node, args: list[str]) -> str:
        if node.op == "variable":
            return str(node.value)
        if node.op == "number":
            return self._literal(node)
        if node.op == "load":
            return f"load_element({self._address(node.value, args)})"
        if node.op == "box":
            return self._box(node, args)
        if node.op == "multiply" and node.kind == "real":
            return f"multiply({args[0]}, {args[1]})"  # never contracted: bounds rely on it
        return OPERATIONS[node.op].cuda.format(*args)

    def _literal(self, node: Node) -> str:
        if node.kind == "bool":
            return "true" if node.value else "false"
        if id(node) not in self._number:  # made by a bound: a small constant
            return f"{_TYPES[node.kind]}({node.value!r})"
        word = self.word("number", self._number[id(node)])
        return f"index_t({word})" if node.kind == "int" else f"real_t(word_as_real({word}))"

    def _address(self, captured: Any, index: Iterable[str]) -> str:
        slot = self._expression.slot(captured)
        terms = [
            f"(long long)({name}) * {self.word('stride', slot, axis)}"
            for axis, name in enumerate(index)
        ]
        pointer = f"(const element_{captured.dtype}*){self.word('pointer', slot)}"
        return " + ".join([pointer, *terms])

    def _box(self, node: Node, ends: list[str]) -> str:
        box = node.value
        axes = len(ends) // 2
        slot = self._expression.slot(box.captured)
        pointer = f"(const element_bool*){self.word('pointer', slot)}"
        strides = ", ".join(self.word("stride", slot, axis) for axis in range(axes))
        corners = ", ".join(f"(long long)({end})" for end in ends)
        return f"box_{box.quantifier}<{axes}>({pointer}, {{{corners}}}, {{{strides}}})"


def emit_mask(expression: Expression, bits: int) -> MaskText:
    """CUDA functions of a mask expression: mask_allows, mask_state and, if needed, tabulate.

    Parameters
    ----------
    expression : a boolean expression
    bits : 32 or 64, what `Expression.survey` found
    """
    words: dict[tuple[Any, ...], int] = {}
    printer = _Printer(expression, words)
    bounds = Bounds(expression)
    lines, (allows,) = printer.body([expression.root])
    parts = [
        f"using index_t = {'int' if bits == 32 else 'long long'};",
        "using real_t = double;",
        "__device__ __forceinline__ bool mask_allows(",
        "    const Params& p, int b, int h, long long row_at, long long column_at) {",
        *_pair("row_at", "column_at"), *lines, f"  return {allows};", "}",
    ]  # fmt: skip
    lines, (certainly, possibly) = printer.body([bounds.certainly, bounds.possibly])  # type: ignore[list-item]
    parts += [
        "__device__ __forceinline__ int mask_state(const Params& p, int b, int h, long long row0,",
        "    long long row1, long long column0, long long column1) {",
        *_ends(), *_tables(bounds.tables, printer), *lines,
        f"  return {certainly} ? 2 : {possibly} ? 1 : 0;", "}",
    ]  # fmt: skip
    if bounds.tables:
        parts += _tabulate(bounds.tables, printer)
    parts.append(f"constexpr int MASK_WORDS = {len(words)};")
    tables = tuple(TableRows(t.side, t.by_batch, t.by_head) for t in bounds.tables)
    return MaskText("\n".join(parts) + "\n", tuple(words), tables)


def _pair(row: str, column: str) -> list[str]:
    return [
        f"  const index_t row = index_t({row}), column = index_t({column});",
        "  const index_t q = row + index_t(p.q_offset), k = column;",
    ]


def _ends() -> list[str]:
    lines = []
    for end, digit in (("low", 0), ("high", 1)):
        lines += [
            f"  const index_t row_{end} = index_t(row{digit});",
            f"  const index_t column_{end} = index_t(column{digit});",
            f"  const index_t q_{end} = row_{end} + index_t(p.q_offset), k_{end} = column_{end};",
        ]
    return lines


def _row_of_table(table: Table) -> str:
    return {
        (False, False): "0", (True, False): "b", (False, True): "h",
        (True, True): "((long long)b * p.heads_q + h)",
    }[table.by_batch, table.by_head]  # fmt: skip


def _tables(tables: Sequence[Table], printer: _Printer) -> list[str]:
    """Statements that read least and greatest of each table over this tile's tokens."""
    lines = []
    for number, table in enumerate(tables):
        kind = _TYPES["real" if table.node.kind == "real" else "int"]
        first, last = ("row0", "row1") if table.side == "q" else ("column0", "column1")
        length = f"p.seqlen_{table.side}"
        lines += [
            f"  {kind} table{number}_low, table{number}_high;",
            f"  table_range({printer.word('tables')}, {printer.word('base', number)}, "
            f"{_row_of_table(table)}, {length}, {first}, {last}, table{number}_low, "
            f"table{number}_high);",
        ]
    return lines


def _tabulate(tables: Sequence[Table], printer: _Printer) -> list[str]:
    """The kernel that fills the tables: a thread an entry, TABLE_BLOCK tokens each."""
    parts = []
    workspace = printer.word("tables")
    for number, table in enumerate(tables):
        lines, (value,) = printer.body([table.node])
        parts += [
            f"__device__ void tabulate{number}(",
            "    const Params& p, long long thread, long long threads) {",
            f"  const long long length = p.seqlen_{table.side};",
            f"  const long long batches = {'p.batch' if table.by_batch else '1'};",
            f"  const long long heads = {'p.heads_q' if table.by_head else '1'};",
            "  for (TableEntry entry(thread, threads, length, batches, heads); entry.valid();",
            "       entry.advance()) {",
            "    const int b = entry.b, h = entry.h;",
            "    (void)b, (void)h;",
            f"    TableRange<{_TYPES['real' if table.node.kind == 'real' else 'int']}> range;",
            "    for (long long at = entry.first; at <= entry.last; ++at) {",
            *(f"    {line}" for line in _pair("at", "at")),
            "      (void)q, (void)k;",
            *(f"    {line}" for line in lines),
            f"      range.include({value});",
            "    }",
            f"    range.store({workspace}, {printer.word('base', number)}, entry.index);",
            "  }",
            "}",
        ]
    calls = [f"  tabulate{number}(p, thread, threads);" for number in range(len(tables))]
    return [
        *parts,
        'extern "C" __global__ void tabulate(const __grid_constant__ Params p) {',
        "  const long long thread = (long long)blockIdx.x * blockDim.x + threadIdx.x;",
        "  const long long threads = (long long)gridDim.x * blockDim.x;",
        *calls,
        "}",
    ]


def _elements(table: TableRows, problem: Any) -> int:
    length = problem.seqlen_q if table.side == "q" else problem.seqlen_k
    rows = (problem.batch if table.by_batch else 1) * (problem.heads_q if table.by_head else 1)
    return 2 * rows * -(-length // TABLE_BLOCK)


def _bits(number: Node) -> int:
    if number.kind == "int":
        return int(number.value)
    return int(struct.unpack("<q", struct.pack("<d", number.value))[0])
