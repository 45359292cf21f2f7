"""A score on NumPy tiles: its values, its derivative, and the gradients of its parameters."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from cuflash.expr.derivative import derivatives, param_loads
from cuflash.expr.expression import Expression, evaluate, flat_index, ordered
from cuflash.expr.nodes import Node, variable

STORAGE = ("b", "h", "row", "column")


class TileScore:
    """The score of a call, tile by tile. Tiles are (heads, rows, columns) of one batch item.

    Parameters
    ----------
    expression : a real expression of x
    arrays : its captured arrays as NumPy arrays, in the order of `expression.arrays`
    problem : q_offset between a row of storage and its logical index, and the accumulation type

    Attributes
    ----------
    gradients : float64 arrays, one for each of `expression.params`, of its shape: what `backward`
        has added up so far
    """

    def __init__(self, expression: Expression, arrays: Sequence[np.ndarray], problem: Any) -> None:
        self._leaves = expression.leaves(arrays)
        self._offset = problem.q_offset
        self._types = (
            np.dtype(problem.accumulation).type,
            np.int32 if getattr(problem, "index_bits", 64) == 32 else np.int64,
        )
        self._root = expression.root
        self._forward = expression.nodes
        self._loads = param_loads(expression.root)
        self._slope, *self._partials = derivatives(expression.root, [variable("x"), *self._loads])
        indices = [index for load in self._loads for index in load.args]
        self._backward = ordered([self._slope, *self._partials, *indices])
        self.gradients = [np.zeros(param.shape, np.float64) for param in expression.params]
        place = {id(param): i for i, param in enumerate(expression.params)}
        self._targets = [self.gradients[place[id(load.value)]] for load in self._loads]

    def apply(self, b: int, heads: slice, rows: slice, columns: slice, x: np.ndarray) -> np.ndarray:
        """s of a tile of x, in the accumulation type."""
        env = self._env(b, heads, rows, columns, x)
        value = evaluate(self._forward, env, self._leaves, *self._types)[-1]
        return np.broadcast_to(np.asarray(value, x.dtype), x.shape)

    def backward(
        self, b: int, heads: slice, rows: slice, columns: slice, x: np.ndarray, ds: np.ndarray,
        add: bool = True,
    ) -> np.ndarray:  # fmt: skip
        """dx of a tile from its ds, which is 0 where a pair is masked; `add`s to `gradients`."""
        env = self._env(b, heads, rows, columns, x)
        computed = evaluate(self._backward, env, self._leaves, *self._types)
        values = dict(zip(map(id, self._backward), computed, strict=True))
        live = ds != 0  # the derivative of a masked pair may be NaN
        params = zip(self._loads, self._partials, self._targets, strict=True)
        for load, partial, target in params if add else ():
            part = np.where(live, ds * values[id(partial)], 0)
            _add(target, load, [values[id(index)] for index in load.args], part, env)
        return np.where(live, ds * values[id(self._slope)], 0)

    def _env(
        self, b: int, heads: slice, rows: slice, columns: slice, x: np.ndarray
    ) -> dict[str, Any]:
        integer = self._types[1]
        row = np.arange(rows.start, rows.stop, dtype=integer)[:, None]
        column = np.arange(columns.start, columns.stop, dtype=integer)[None, :]
        head = np.arange(heads.start, heads.stop, dtype=integer)[:, None, None]
        logical = {"q": row + self._offset, "k": column}
        return {"x": x, "b": b, "h": head, "row": row, "column": column, **logical}


def _add(
    target: np.ndarray, load: Node, index: Sequence[Any], part: np.ndarray, env: dict[str, Any]
) -> None:
    """target[index] += part, summed where an index repeats."""
    if not index:
        target += part.sum(dtype=np.float64)
    elif all(_is_storage(node) for node in load.args):
        _add_block(target, load, part, env)
    else:
        flat = flat_index(index, target.shape)
        low = int(flat.min(initial=0))
        count = int(flat.max(initial=0)) + 1 - low
        flat = np.broadcast_to(flat - low, part.shape)
        sums = np.bincount(flat.ravel(), part.ravel().astype(np.float64), count)
        target.reshape(-1)[low : low + count] += sums


def _is_storage(node: Node) -> bool:
    return node.op == "number" or (node.op == "variable" and node.value in STORAGE)


def _add_block(target: np.ndarray, load: Node, part: np.ndarray, env: dict[str, Any]) -> None:
    """The same for an array that is indexed by storage itself, as a bias is: a block of it."""
    named = [node.value if node.op == "variable" else None for node in load.args]
    where: list[Any] = []
    for name, node in zip(named, load.args, strict=True):
        if name is None:
            where.append(slice(int(node.value), int(node.value) + 1))
        else:
            at = np.ravel(env[name])
            where.append(slice(int(at[0]), int(at[-1]) + 1))
    axes = tuple(axis for axis, name in enumerate(("h", "row", "column")) if name not in named)
    kept = [name for name in ("h", "row", "column") if name in named]
    total = part.sum(axis=axes, dtype=np.float64) if axes else part
    order = [kept.index(name) for name in named if name in kept]
    total = total.transpose(order)
    shape = [total.shape[kept_at] for kept_at in range(total.ndim)]
    sizes = iter(shape)
    target[tuple(where)] += total.reshape([next(sizes) if n in kept else 1 for n in named])
