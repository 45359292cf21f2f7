"""CUDA text of a call's mask and score: the functions that kernels call, by name.

bool mask_allows(p, b, h, row, column)        whether a pair is attended
mask_interval(p, b, h, row, from, to)         MASK_IS_INTERVAL: a query's columns from, .., to - 1
int mask_state(p, b, h, row0, row1, column0, column1)    of a tile: 0 never, 1 perhaps, 2 always
tabulate                                      the kernel that fills the mask's bound tables
MASK_BY_BATCH, MASK_BY_HEAD                   what the mask depends on
score_t score(p, b, h, row, column, x)        the score of a pair; -inf leaves it out
score_t score_slope(p, b, h, row, column, x)  its derivative by x
void score_params(p, b, h, row, column, x, ds, add)      add<LOAD, PARAM, UNIFORM>(index, value)
    for each load of a Param: value is ds times the derivative by the element `index` of all
    Params together; UNIFORM: the index is the same for every pair of a head
param_elements(p), store_all_params(p)        how many elements these are, and their gradients
store_dsink(p, h, value)                      the gradient of a sink that is a Param
Accumulation sink_logit(p, h)                 the logit of a head's sink
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from cuflash.expr.bounds import SIDE, Bounds, Table
from cuflash.expr.cuda import Printer, TableRows, Word, logical_indices, pack_words
from cuflash.expr.derivative import derivatives, param_loads
from cuflash.expr.expression import Expression, ordered
from cuflash.expr.interval import row_interval
from cuflash.expr.nodes import Node, variable

INLINE_LINES = 24  # statements of a mask that are copied to where they are used
_PAIR = "const Params& p, int b, int h, long long row_at, long long column_at"


@dataclass(frozen=True)
class CallText:
    """The CUDA functions of a mask and a score and the launch parameters that they read.

    words : what each of `p.words` holds, in order (see `cuda.Word`)
    tables : the mask's bound tables; when there are none there is no `tabulate` kernel
    has_mask, has_score, has_sink : which functions there are
    has_order : whether owned tiles may differ in length, other than as causal ones do
    by_batch, by_head : whether the mask depends on the batch item, on the head
    params : dtype of each Param of the score
    store_code : the functions that store their gradients; it follows gradients.cuh
    has_dsink : whether the sink is a Param

    It holds no operand, so that a cached text keeps no array alive.
    """

    code: str
    has_mask: bool
    has_score: bool
    has_sink: bool
    has_order: bool
    by_batch: bool
    by_head: bool
    words: tuple[Word, ...]
    tables: tuple[TableRows, ...]
    params: tuple[str, ...]
    store_code: str
    has_dsink: bool

    def table_elements(self, problem: Any) -> int:
        """Elements (8 bytes each) of the workspace that the tables need."""
        return sum(table.elements(problem) for table in self.tables)

    def pack(
        self, problem: Any, views: Sequence[Any], tables_pointer: int = 0,
        gradients: Sequence[int] = (),
    ) -> list[int]:  # fmt: skip
        """Values of the words for one call.

        views : of the arrays of `problem.captured`
        gradients : addresses of the gradients of Params, those of the score, then the sink's
        """
        operands, at = {}, 0
        for which, expression in zip(("mask", "score", "sink"), problem.expressions, strict=True):
            if expression is not None:
                operands[which] = (expression, views[at : at + len(expression.arrays)])
                at += len(expression.arrays)
        return pack_words(self.words, operands, self.tables, tables_pointer, gradients, problem)


def emit(
    mask: Expression | None, score: Expression | None, sink: Expression | None, bits: int
) -> CallText:
    """The CUDA text of a call's expressions, each of which may be None.

    Parameters
    ----------
    mask : a boolean expression
    score : a real expression of x
    sink : a real expression of h
    bits : 32 or 64, what `Expression.survey` found for all
    """
    words: dict[Word, int] = {}
    parts = [f"using index_t = {'int' if bits == 32 else 'long long'};"]
    tables: list[Table] = []
    params: tuple[str, ...] = ()
    stores: list[str] = []
    if mask is not None:
        bounds = Bounds(mask)
        tables = bounds.tables
        parts += _mask(mask, bounds, Printer(mask, "mask", words, "double", exact=True))
    if score is not None:
        params = tuple(param.dtype for param in score.params)
        printer = Printer(score, "score", words, "score_t", exact=False)
        parts += _score(score, printer)
        stores += _stores(score, printer) if params else []
    extents = tuple(TableRows(table.side, table.by_batch, table.by_head) for table in tables)
    if sink is not None:
        printer = Printer(sink, "sink", words, "Accumulation", exact=False)
        lines, (value,) = printer.body([sink.root])
        parts += [
            "__device__ __forceinline__ Accumulation sink_logit(const Params& p, int h) {",
            *lines, f"  return {value};", "}",
        ]  # fmt: skip
        for param in sink.params:
            gradient = printer.word("dsink_gradient")
            parts += [
                "__device__ __forceinline__ void store_dsink(",
                "    const Params& p, long long h, double value) {",
                f"  store_element((element_{param.dtype}*){gradient} + h, value);", "}",
            ]  # fmt: skip
    variables = frozenset() if mask is None else mask.variables
    code, store_code = ("\n".join([*lines, ""]) for lines in (parts, stores))
    return CallText(
        code=code,
        has_mask=mask is not None,
        has_score=score is not None,
        has_sink=sink is not None,
        has_order=mask is not None and not mask.is_band,
        by_batch="b" in variables,
        by_head="h" in variables,
        words=tuple(words),
        tables=extents,
        params=params,
        store_code=store_code,
        has_dsink=sink is not None and bool(sink.params),
    )


def _mask(mask: Expression, bounds: Bounds, printer: Printer) -> list[str]:
    lines, (allows,) = printer.body([mask.root])
    # A long text is compiled once: its calls cost little beside it, its copies seconds.
    inline = "__forceinline__" if len(lines) <= INLINE_LINES else "COLD"
    by_batch, by_head = (str(name in mask.variables).lower() for name in "bh")
    parts = [
        f"constexpr bool MASK_BY_BATCH = {by_batch}, MASK_BY_HEAD = {by_head};",
        f"__device__ {inline} bool mask_allows({_PAIR}) {{",
        *logical_indices("row_at", "column_at"), *lines, f"  return {allows};", "}",
    ]  # fmt: skip
    parts += _interval(mask, printer)
    lines, (certainly, possibly) = printer.body([bounds.certainly, bounds.possibly])
    parts += [
        # once for 32 tiles of a warp: a call costs nothing there, and the text is compiled once
        "__device__ COLD int mask_state(const Params& p, int b, int h, long long row0,",
        "    long long row1, long long column0, long long column1) {",
        *_ends(), *_tables(bounds.tables, printer), *lines,
        f"  return {certainly} ? 2 : {possibly} ? 1 : 0;", "}",
    ]  # fmt: skip
    return parts + _tabulate(bounds.tables, printer) if bounds.tables else parts


def _interval(mask: Expression, printer: Printer) -> list[str]:
    ends, read = row_interval(mask.root) or (None, [])
    lines, names = printer.body(read)
    is_interval, has_first = ends is not None, ends is not None and ends.first is not None
    parts = [
        f"constexpr bool MASK_IS_INTERVAL = {str(is_interval).lower()};",
        f"constexpr bool INTERVAL_HAS_FIRST = {str(has_first).lower()};",
        "__device__ __forceinline__ void mask_interval(const Params& p, int b, int h,",
        "    long long row_at, long long& from, long long& to) {",
    ]
    if ends is None:
        return [*parts, "}"]
    given = [(name, end) for name, end in zip(("from", "to"), ends) if end is not None]
    assigned = [f"  {name} = {end.format(*names)};" for name, end in given]
    return [*parts, *logical_indices("row_at", "0"), *lines, *assigned, "}"]


def _score(score: Expression, printer: Printer) -> list[str]:
    params = [score.slot(param) for param in score.params]
    loads = param_loads(score.root)
    slope, *partials = derivatives(score.root, [variable("x"), *loads])
    parts = ["using score_t = Accumulation;"]
    for name, node in (("score", score.root), ("score_slope", slope)):
        lines, (value,) = printer.body([node])
        parts += [
            f"__device__ __forceinline__ score_t {name}({_PAIR}, score_t x) {{",
            *logical_indices("row_at", "column_at"), *lines, f"  return {value};", "}",
        ]  # fmt: skip
    lines, names = printer.body([*partials, *(index for load in loads for index in load.args)])
    partial_names, index_names = names[: len(loads)], iter(names[len(loads) :])
    adds: list[str] = []
    for load, partial in zip(loads, partial_names, strict=True):
        slot = score.slot(load.value)
        index = "0ll"
        for axis in range(len(load.args)):
            size = printer.own_word("size", slot, axis)
            index = f"({index} * {size} + {next(index_names)})"
        uniform = "false" if _varies(load) else "true"
        place = f"{len(adds)}, {params.index(slot)}, {uniform}"
        base = printer.word("param_base", params.index(slot))
        adds.append(f"  add.template add<{place}>({base} + {index}, ds * {partial});")
    if not params:
        return parts
    return [
        *parts,
        f"constexpr int PARAMS = {len(params)}, PARAM_LOADS = {len(loads)};",
        "template <class Add>",
        f"__device__ __forceinline__ void score_params({_PAIR},",
        "    score_t x, score_t ds, Add& add) {",
        *logical_indices("row_at", "column_at"), *lines, *adds, "}",
    ]  # fmt: skip


def _stores(score: Expression, printer: Printer) -> list[str]:
    """What follows gradients.cuh: the stores of each Param's gradient."""
    stores = []
    for number, param in enumerate(score.params):
        words = (printer.word(f"param_{what}", number) for what in ("gradient", "base", "elements"))
        stores.append(
            f"  store_param<IS_FIXED, element_{param.dtype}>(p, {number}, {', '.join(words)});"
        )
    return [
        "__device__ __forceinline__ long long param_elements(const Params& p) {",
        f"  return {printer.word('param_base', len(score.params))};",
        "}",
        "template <bool IS_FIXED>",
        "__device__ void store_all_params(const Params& p) {",
        *stores,
        "}",
    ]


def _varies(load: Node) -> bool:
    """Whether the index of a load depends on the query or the key."""
    return any(n.op == "variable" and n.value in SIDE for n in ordered(load.args))


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


def _tables(tables: Sequence[Table], printer: Printer) -> list[str]:
    """Statements that read least and greatest of each table over this tile's tokens."""
    lines = []
    for number, table in enumerate(tables):
        kind = printer.types["real" if table.node.kind == "real" else "int"]
        first, last = ("row0", "row1") if table.side == "q" else ("column0", "column1")
        length = f"p.seqlen_{table.side}"
        lines += [
            f"  {kind} table{number}_low, table{number}_high;",
            f"  table_range({printer.word('tables')}, {printer.word('base', number)}, "
            f"{_row_of_table(table)}, {length}, {first}, {last}, table{number}_low, "
            f"table{number}_high);",
        ]
    return lines


def _tabulate(tables: Sequence[Table], printer: Printer) -> list[str]:
    """The kernel that fills the tables: a thread an entry, TABLE_BLOCK tokens each."""
    parts = []
    workspace = printer.word("tables")
    for number, table in enumerate(tables):
        lines, (value,) = printer.body([table.node])
        kind = printer.types["real" if table.node.kind == "real" else "int"]
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
            f"    TableRange<{kind}> range;",
            "    for (long long at = entry.first; at <= entry.last; ++at) {",
            *(f"    {line}" for line in logical_indices("at", "at")),
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
        "#if PART_TABLES",
        *parts,
        'extern "C" __global__ void tabulate(const __grid_constant__ Params p) {',
        "  const long long thread = (long long)blockIdx.x * blockDim.x + threadIdx.x;",
        "  const long long threads = (long long)gridDim.x * blockDim.x;",
        *calls,
        "}",
        "#endif",
    ]
