"""Bounds of an expression on a tile of pairs: what lets every back end skip tiles.

`Bounds` turns an expression into the intervals of its nodes over a tile, written as expressions of
the tile's corners; NumPy evaluates them here, `cuda.py` prints them. A part of the expression that
reads captured arrays at indices of one side only (document ids, flags) is tabulated: its least
and greatest value over each block of tokens, O(N) in all. What depends on both sides is not; a bool
array read at few places of the tile is looked at there (`Box`), all else is "perhaps".
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from cuflash.expr.expression import Expression, evaluate, ordered
from cuflash.expr.nodes import Captured, Node, apply, as_node
from cuflash.expr.operations import FALSE, OPERATIONS, TRUE, Interval

SIDE = {"q": "q", "row": "q", "k": "k", "column": "k"}
BOX_LIMIT = 64  # places of a bool array that one tile may look at: a 128-tile over blocks of 16
_DTYPE_RANGE = {
    name: (int(np.iinfo(name).min), int(np.iinfo(name).max))
    for name in ("int8", "int16", "int32", "uint8", "uint16")
}


@dataclass(frozen=True)
class Table:
    """A one-sided part of the expression, of which least and greatest are kept per block."""

    node: Node
    side: str
    by_batch: bool
    by_head: bool


@dataclass(frozen=True)
class Box:
    """Whether any (or all) of a bool array's places in a box of indices are true."""

    captured: Captured
    quantifier: str  # "any" or "all"

    def on_numpy(self, ends: Sequence[Any], arrays: Mapping[int, np.ndarray]) -> np.ndarray:
        """`ends`: low and high index of each axis; the answer is sure only in a small box."""
        ends = np.broadcast_arrays(*ends)
        lows, highs = ends[0::2], ends[1::2]
        counts = [high - low + 1 for low, high in zip(lows, highs, strict=True)]
        small = np.prod(np.broadcast_arrays(*counts), axis=0) <= BOX_LIMIT
        result = np.full(ends[0].shape, self.quantifier == "all")
        extents = [int(np.max(np.where(small, n, 1), initial=1)) for n in counts]
        for steps in np.ndindex(*extents):
            index = tuple(
                np.where(small, np.minimum(low + step, high), low)
                for low, high, step in zip(lows, highs, steps, strict=True)
            )
            here = arrays[id(self.captured)][index]
            result = result & here if self.quantifier == "all" else result | here
        return np.where(small, result, self.quantifier == "any")


class Bounds:
    """The interval of every node of an expression over a tile.

    points : b and h are single values (a tile belongs to one head); else intervals as well
    tables : one-sided parts that read arrays become `Table`s; without, their dtype bounds them
    """

    def __init__(self, expression: Expression, *, points: bool = True, tables: bool = True) -> None:
        self.tables: list[Table] = []
        self.intervals: dict[int, Interval] = {}
        self._points = points
        self._sides: dict[int, frozenset[str]] = {}
        self._reads: dict[int, bool] = {}
        for node in expression.nodes:
            own = {SIDE.get(node.value, node.value)} if node.op == "variable" else set()
            self._sides[id(node)] = frozenset(own).union(*(self._sides[id(a)] for a in node.args))
            below = any(self._reads[id(arg)] for arg in node.args)
            self._reads[id(node)] = node.op == "load" or below
        if tables:
            self._interval(expression.root, tables)
        else:
            for node in expression.nodes:
                self._interval(node, tables)
        certainly, possibly = self.intervals[id(expression.root)]
        self.certainly: Node = FALSE if certainly is None else certainly
        self.possibly: Node = TRUE if possibly is None else possibly

    def _interval(self, node: Node, tables: bool) -> Interval:
        if id(node) not in self.intervals:
            self.intervals[id(node)] = self._make(node, tables)
        return self.intervals[id(node)]

    def _make(self, node: Node, tables: bool) -> Interval:
        sides = self._sides[id(node)] & {"q", "k"}
        if node.op == "variable" and node.value == "x":
            return None, None
        if node.op == "variable" and (sides or not self._points):
            return tuple(  # type: ignore[return-value]
                Node("variable", (), "int", f"{node.value}_{end}") for end in ("low", "high")
            )
        if node.op in ("variable", "number") or (self._points and not sides):
            return node, node
        if tables and len(sides) == 1 and self._reads[id(node)]:
            return self._tabulate(node, next(iter(sides)))
        args = [self._interval(arg, tables) for arg in node.args]
        if node.op != "load":
            return OPERATIONS[node.op].bound(*args)
        captured: Captured = node.value
        if captured.kind == "bool":
            ends = [end for interval in args for end in interval if end is not None]
            if not tables or len(ends) != 2 * len(args):
                return FALSE, TRUE
            boxes = [Node("box", tuple(ends), "bool", Box(captured, x)) for x in ("all", "any")]
            return boxes[0], boxes[1]
        known = captured.range or _DTYPE_RANGE.get(captured.dtype)
        return (None, None) if known is None else (as_node(known[0]), as_node(known[1]))

    def _tabulate(self, node: Node, side: str) -> Interval:
        sides = self._sides[id(node)]
        number = len(self.tables)
        self.tables.append(Table(node, side, "b" in sides, "h" in sides))
        kind = "int" if node.kind == "bool" else node.kind
        low, high = (Node("variable", (), kind, f"table{number}_{e}") for e in ("low", "high"))
        if node.kind == "bool":
            return apply("equal", low, 1), apply("equal", high, 1)
        return low, high


class TileMask:
    """A mask on NumPy: the state of tiles, and values where a tile is neither empty nor whole.

    Parameters
    ----------
    expression : a boolean expression
    arrays : its captured arrays as NumPy arrays, in the order of `expression.arrays`
    problem : sizes, and q_offset between a row of storage and its logical index
    block_q, block_k : sizes of the tiles
    """

    def __init__(
        self, expression: Expression, arrays: Sequence[np.ndarray], problem: Any,
        block_q: int, block_k: int,
    ) -> None:  # fmt: skip
        self._expression = expression
        self._arrays = arrays
        self._offset = problem.q_offset
        # int32 is compared twice as fast; the survey of the call has shown that it is enough
        self._index = np.int32 if getattr(problem, "index_bits", 64) == 32 else np.int64
        self._leaves = expression.leaves(arrays)
        self._sizes = {"q": (problem.seqlen_q, block_q), "k": (problem.seqlen_k, block_k)}
        self.depends_on_batch = "b" in expression.variables
        self.depends_on_head = "h" in expression.variables
        self._bounds = bounds = Bounds(expression)
        self._order = ordered([bounds.certainly, bounds.possibly])
        self._ends = {side: self._tile_ends(side) for side in ("q", "k")}
        self._tables = [self._fill(table, problem) for table in bounds.tables]

    def states(self, b: int, h: int, tile_q: int) -> np.ndarray:
        """Of every key tile with this query tile: 0 no pair, 1 perhaps some, 2 every pair."""
        return self._states(b, h, {"q": tile_q})

    def states_k(self, b: int, h: int, tile_k: int) -> np.ndarray:
        """Of every query tile with this key tile the same."""
        return self._states(b, h, {"k": tile_k})

    def values(self, b: int, h: int, rows: slice, columns: slice) -> np.ndarray:
        """The mask itself, (rows, columns) bool: True where the query attends to the key."""
        row = np.arange(rows.start, rows.stop, dtype=self._index)[:, None]
        column = np.arange(columns.start, columns.stop, dtype=self._index)[None, :]
        env = {"b": b, "h": h, "row": row, "column": column, "q": row + self._offset, "k": column}
        value = self._expression.evaluate(env, self._arrays, self._index)
        return np.broadcast_to(value, (row.size, column.size))

    def _tile_ends(self, side: str) -> tuple[np.ndarray, np.ndarray]:
        length, block = self._sizes[side]
        low = np.arange(0, length, block)
        return low, np.minimum(low + block, length) - 1

    def _states(self, b: int, h: int, fixed: dict[str, int]) -> np.ndarray:
        env: dict[str, Any] = {"b": b, "h": h}
        free = "k" if "q" in fixed else "q"
        for side, (index, storage) in {"q": ("q", "row"), "k": ("k", "column")}.items():
            offset = self._offset if side == "q" else 0
            for end, values in zip(("low", "high"), self._ends[side], strict=True):
                here = values[fixed[side]] if side in fixed else values
                env[f"{storage}_{end}"] = here
                env[f"{index}_{end}"] = here + offset
        for number, (table, ends) in enumerate(zip(self._bounds.tables, self._tables, strict=True)):
            at = (b if table.by_batch else 0, h if table.by_head else 0)
            tile = fixed.get(table.side, slice(None))
            for end, values in zip(("low", "high"), ends, strict=True):
                env[f"table{number}_{end}"] = values[at][tile]
        computed = evaluate(self._order, env, self._leaves)
        found = dict(zip(map(id, self._order), computed, strict=True))
        certainly = found[id(self._bounds.certainly)]
        possibly = found[id(self._bounds.possibly)]
        count = self._ends[free][0].size
        state = np.where(certainly, np.int8(2), np.asarray(possibly).astype(np.int8))
        return np.broadcast_to(state, (count,))

    def _fill(self, table: Table, problem: Any) -> tuple[np.ndarray, np.ndarray]:
        """Least and greatest of the table's node by (batch or 1, heads or 1, tile)."""
        length, _ = self._sizes[table.side]
        storage = np.arange(length)
        env = {
            "b": np.arange(problem.batch if table.by_batch else 1)[:, None, None],
            "h": np.arange(problem.heads_q if table.by_head else 1)[None, :, None],
            "row": storage, "q": storage + self._offset, "column": storage, "k": storage,
        }  # fmt: skip
        value = np.asarray(evaluate(ordered([table.node]), env, self._leaves)[-1])
        value = value.astype(np.float64 if table.node.kind == "real" else np.int64)
        value = np.broadcast_to(value, (env["b"].size, env["h"].size, length))
        starts = self._ends[table.side][0]
        if not starts.size:
            return value, value
        low = np.minimum.reduceat(value, starts, axis=2)
        high = np.maximum.reduceat(value, starts, axis=2)
        return np.where(low != low, -np.inf, low), np.where(high != high, np.inf, high)
