"""Symbolic derivatives of a score: by its variable x and by every `Param` that it reads."""

from __future__ import annotations

from collections.abc import Sequence

from cuflash.expr.expression import ordered
from cuflash.expr.nodes import Node, Param, apply, as_node
from cuflash.expr.operations import OPERATIONS


def derivatives(root: Node, by: Sequence[Node]) -> list[Node]:
    """d root / d node for each node of `by`, as expressions; 0 where root does not depend on it.

    Reverse mode: one walk from the root, each operation's `pull` sends its derivative on to its
    operands. Conditions and integers have none.
    """
    adjoint: dict[int, Node] = {id(root): as_node(1.0)}
    for node in reversed(ordered([root])):
        here = adjoint.get(id(node))
        if here is None or not node.args or node.kind != "real" or node.op in ("load", "real"):
            continue
        pull = OPERATIONS[node.op].pull
        if pull is None:
            raise TypeError(f"{node.op} in a score has no derivative")
        for arg, part in zip(node.args, pull(here, node, *node.args), strict=True):
            if part is not None and arg.kind == "real" and not _is_constant(arg):
                seen = adjoint.get(id(arg))
                adjoint[id(arg)] = part if seen is None else apply("add", seen, part)
    zero = as_node(0.0)
    return [adjoint.get(id(node), zero) for node in by]


def param_loads(root: Node) -> list[Node]:
    """Every load of a `Param` below the root."""
    return [n for n in ordered([root]) if n.op == "load" and isinstance(n.value, Param)]


def _is_constant(node: Node) -> bool:
    return node.op in ("number", "real") or (
        node.op == "load" and not isinstance(node.value, Param)
    )
