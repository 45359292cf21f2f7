"""The one mask and the one score of a call, as expressions, from its options.

The mask is the AND of causal, window and mask; the score a chain of softcap, bias and score, in
this order. Both see logical indices, which `positions` may read from arrays.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np

from cuflash.expr.expression import Expression, ordered, substitute
from cuflash.expr.functions import maximum, minimum
from cuflash.expr.nodes import Captured, Node, as_node, is_array, variable
from cuflash.masks import Causal, Mask, SlidingWindow
from cuflash.scores import Bias, Score, Softcap

Window = tuple[int | None, int | None] | None
Positions = dict[str, Node]
"""The loads that stand for the variables q and k; empty without positions."""


def read_positions(positions: Any, shape: tuple[int, ...], top_left: bool) -> Positions:
    """Logical indices of the stored rows and keys, as expressions of row and column.

    Raises
    ------
    TypeError: no integer array. ValueError: a wrong shape, or causal="top-left" beside.
    """
    if positions is None:
        return {}
    if top_left:
        raise ValueError(
            "positions say where the diagonal is, so causal must be True or 'bottom-right' beside "
            "them, got 'top-left'"
        )
    batch, _, seqlen_q, seqlen_k = shape
    pair = positions if isinstance(positions, (tuple, list)) else (positions, positions)
    if len(pair) != 2:
        raise TypeError(f"positions must be an array or a pair (pos_q, pos_k), got {positions!r}")
    result = {}
    sides = (("q", "row", seqlen_q), ("k", "column", seqlen_k))
    for array, (name, storage, length) in zip(pair, sides, strict=True):
        captured = _position_array(array, name, length, batch)
        at = variable(storage)
        result[name] = captured[at] if len(captured.shape) == 1 else captured[variable("b"), at]
    return result


def _position_array(array: Any, name: str, length: int, batch: int) -> Captured:
    if not is_array(array):
        raise TypeError(f"positions must hold integer arrays, got {type(array).__name__}")
    captured = Captured(array)
    if captured.kind != "int":
        raise TypeError(f"positions must be integers, got {captured.dtype}")
    if captured.shape not in ((length,), (batch, length)):
        raise ValueError(
            f"positions of {name} must have shape {(length,)} or {(batch, length)}, "
            f"got {captured.shape}"
        )
    if isinstance(array, np.ndarray) and array.size:
        captured.range = (int(array.min()), int(array.max()))
    return captured


def mask_of(
    causal: bool, window: Window, mask: Any, positions: Positions, shape: tuple[int, ...]
) -> Expression | None:
    """The AND of all that masks, as one expression. Built once for the same options."""
    if mask is None:
        if not positions:
            return _plain(causal, window)
        whole = _all_of(causal, window, None)
        return None if whole is None else Expression(place(whole, positions))
    if isinstance(mask, Mask):
        if positions:
            return Expression(place(_all_of(causal, window, mask.node), positions))
        key = (causal, window)
        if key not in mask.combined:
            mask.combined[key] = Expression(_all_of(causal, window, mask.node))
        return mask.combined[key]
    if not is_array(mask):
        hint = ": wrap the function, cuflash.Mask(function)" if callable(mask) else ""
        raise TypeError(
            f"mask must be a cuflash mask or a bool array, got {type(mask).__name__}{hint}"
        )
    whole = _all_of(causal, window, _array_node(mask, shape))
    return Expression(place(whole, positions) if positions else whole)


def score_of(
    softcap: Any, bias: Any, score: Any, positions: Positions, shape: tuple[int, ...]
) -> Expression | None:
    """softcap, then bias, then score, as one expression of x; None where there is none of them."""
    parts: list[Score] = []
    if softcap is not None:
        parts.append(Softcap(softcap))
    if bias is not None:
        added = Bias(bias)
        check_broadcast("bias", added.array.shape, shape)
        parts.append(added)
    if score is not None:
        if not isinstance(score, Score):
            hint = ": wrap the function, cuflash.Score(function)" if callable(score) else ""
            raise TypeError(f"score must be a cuflash score, got {type(score).__name__}{hint}")
        parts.append(score)
    if not parts:
        return None
    chain = parts[0]
    for part in parts[1:]:
        chain = chain >> part
    if positions:
        return Expression(place(chain.node, positions))
    if len(parts) == 1 and parts[0] is score:
        if score.combined is None:
            score.combined = Expression(score.node)
        return score.combined
    return Expression(chain.node)


def sink_of(sink: Any, heads_q: int) -> Expression | None:
    """The sink's logit of head h as an expression."""
    if sink is None:
        return None
    if not isinstance(sink, Captured) and not is_array(sink):
        raise TypeError(f"sink must be a float array or a cuflash.Param, got {sink!r}")
    captured = sink if isinstance(sink, Captured) else Captured(sink)
    if captured.kind != "real":
        raise TypeError(f"sink must be a float array, got {captured.dtype}")
    if captured.shape != (heads_q,):
        raise ValueError(f"sink.shape must be (heads_q,) = ({heads_q},), got {captured.shape}")
    return Expression(captured[variable("h")])


def check_broadcast(name: str, got: tuple[int, ...], shape: tuple[int, ...]) -> None:
    """Whether an array broadcasts to all pairs; a ValueError that says what it must be."""
    sizes = shape[4 - len(got) :] if len(got) <= 4 else ()
    if len(got) > 4 or any(n not in (1, size) for n, size in zip(got, sizes, strict=True)):
        raise ValueError(
            f"{name}.shape must broadcast to (batch, heads_q, seqlen_q, seqlen_k) = {shape}, "
            f"got {got}"
        )


def place(root: Node, positions: Positions) -> Node:
    """The expression with logical indices read from arrays.

    The values of positions on a device are not known here, so an index that is made from them is
    clipped into the array that it reads.
    """
    unknown = [node for node in positions.values() if node.value.range is None]
    node = substitute(root, positions)
    return _clip(node, unknown) if unknown else node


def _clip(root: Node, unknown: list[Node]) -> Node:
    done: dict[int, Node] = {}
    depends: dict[int, bool] = {}
    for node in ordered([root]):
        args = tuple(done[id(arg)] for arg in node.args)
        below = [depends[id(arg)] for arg in node.args]
        if node.op == "load" and any(below):
            args = tuple(
                minimum(maximum(arg, 0), size - 1) if moved else arg
                for arg, moved, size in zip(args, below, node.value.shape, strict=True)
            )
        same = all(a is b for a, b in zip(args, node.args, strict=True))
        done[id(node)] = node if same else Node(node.op, args, node.kind, node.value)
        depends[id(node)] = any(below) or any(node is other for other in unknown)
    return done[id(root)]


@lru_cache(maxsize=256)
def _plain(causal: bool, window: Window) -> Expression | None:
    node = _all_of(causal, window, None)
    return None if node is None else Expression(node)


def _all_of(causal: bool, window: Window, mask: Node | None) -> Any:
    node = mask
    if window is not None:
        near = SlidingWindow(*window).node
        node = near if node is None else near & node
    if causal:
        node = Causal().node if node is None else Causal().node & node
    return node


def _array_node(mask: Any, shape: tuple[int, ...]) -> Node:
    """A bool array as an expression of storage indices; axes of size 1 are broadcast."""
    captured = Captured(mask)
    if captured.kind != "bool":
        raise TypeError(
            f"mask.dtype must be bool (True = attend), got {captured.dtype}: an additive array of "
            "scores is a bias; from 0 / 1 values make a mask by mask != 0"
        )
    check_broadcast("mask", captured.shape, shape)
    names = ("b", "h", "row", "column")[4 - len(captured.shape) :]
    index = tuple(
        as_node(0) if n == 1 else variable(name)
        for n, name in zip(captured.shape, names, strict=True)
    )
    return captured[index]
