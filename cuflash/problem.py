"""One call, described and validated once: every rule about shapes, dtypes and options is here.

Nothing in this file knows an array library, a back end or where memory lies. It reads `.shape` and
`.dtype` (a name such as "bfloat16") of what it is given, and raises before any work is done.
"""

from __future__ import annotations

import math
import numbers
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Protocol

from cuflash import combine
from cuflash.expr.expression import Expression
from cuflash.expr.nodes import Captured

DTYPES = ("float16", "bfloat16", "float32", "float64")
LAYOUTS = ("bshd", "bhsd", "sbhd")


class Described(Protocol):
    """Anything with a shape and the name of a dtype."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def dtype(self) -> str: ...


@dataclass(frozen=True)
class Axes:
    """How the caller orders axes: `layout` for 4-D arrays, and how many axes there are.

    3-D arrays are one batch item, 2-D arrays one head of one item; an axis that the inputs lack is
    lacking in every result too.
    """

    layout: str
    ndim: int

    @property
    def names(self) -> str:
        """The axes that are there, in the caller's order, of "b", "s", "h", "d"."""
        missing = {4: "", 3: "b", 2: "bh"}[self.ndim]
        return "".join(axis for axis in self.layout if axis not in missing)

    @cached_property
    def plain(self) -> bool:
        """Whether the caller's axes are (batch, seqlen, heads, dim) as they are."""
        return self.layout == "bshd" and self.ndim == 4

    @property
    def order(self) -> tuple[int | None, ...]:
        """Where in the caller's array each of (b, s, h, d) is; None where it is missing."""
        names = self.names
        return tuple(names.index(axis) if axis in names else None for axis in "bshd")

    def shape(self, batch: int, seqlen: int, heads: int, dim: int) -> tuple[int, ...]:
        """The caller's shape of an array like q, k, v or o."""
        sizes = {"b": batch, "s": seqlen, "h": heads, "d": dim}
        return tuple(sizes[axis] for axis in self.names)

    def lse_shape(self, problem: Problem) -> tuple[int, ...]:
        """The caller's shape of lse and dlse."""
        return (problem.batch, problem.heads_q, problem.seqlen_q)[4 - self.ndim :]


@dataclass(frozen=True, eq=False)
class Problem:
    """What chooses and shapes a kernel. `key` compares problems and holds no operand of the mask.

    mask : one boolean expression of everything that masks (causal, window, mask), or None
    score : one real expression of x of everything between product and softmax, or None
    sink : one real expression of h, each head's logit without a value, or None
    q_offset : the logical index of query row r is r + q_offset; that of key column c is c
    index_bits : 32 or 64, what integers in the mask need
    """

    batch: int
    heads_q: int
    heads_k: int
    seqlen_q: int
    seqlen_k: int
    head_dim: int
    head_dim_v: int
    dtype: str
    scale: float
    mask: Expression | None = None
    score: Expression | None = None
    sink: Expression | None = None
    q_offset: int = 0
    index_bits: int = 32
    deterministic: bool = False

    @cached_property
    def expression_key(self) -> tuple[Any, ...] | None:
        """What the CUDA text of the expressions depends on; None without any."""
        keys = tuple(None if e is None else e.key for e in self.expressions)
        return None if keys == (None, None, None) else (*keys, self.index_bits)

    @cached_property
    def key(self) -> tuple[Any, ...]:
        return (
            self.batch, self.heads_q, self.heads_k, self.seqlen_q, self.seqlen_k, self.head_dim,
            self.head_dim_v, self.dtype, self.scale, self.expression_key, self.q_offset,
            self.deterministic,
        )  # fmt: skip

    @property
    def expressions(self) -> tuple[Expression | None, ...]:
        """mask, score and sink; the arrays that they capture are operands in this order."""
        return self.mask, self.score, self.sink

    @property
    def captured(self) -> list[Captured]:
        """The arrays that the expressions capture, as the back ends take them."""
        return [array for e in self.expressions if e is not None for array in e.arrays]

    def detached(self) -> Problem:
        """The same problem, holding none of the arrays that its expressions captured."""
        names = ("mask", "score", "sink")
        pairs = zip(names, self.expressions, strict=True)
        without: dict[str, Any] = {name: e.detached() for name, e in pairs if e is not None}
        return replace(self, **without)

    @property
    def accumulation(self) -> str:
        """The dtype of sums, softmax, lse and delta."""
        return "float64" if self.dtype == "float64" else "float32"

    @property
    def group(self) -> int:
        """Query heads that share one key head."""
        return self.heads_q // self.heads_k if self.heads_k else 1


def make(
    q: Described,
    k: Described,
    v: Described,
    *,
    causal: bool | str = False,
    window: Any = None,
    mask: Any = None,
    bias: Any = None,
    score: Any = None,
    softcap: Any = None,
    sink: Any = None,
    scale: Any = None,
    layout: str = "bshd",
    positions: Any = None,
    deterministic: bool | None = None,
) -> tuple[Problem, Axes]:
    """Validate a call and describe it.

    Raises
    ------
    TypeError: an argument of the wrong kind or dtype. ValueError: a shape, length or value that
    breaks a rule. Both name the argument, the rule, the value and the fix.
    """
    axes = _axes(q, k, v, layout)
    _check_dtypes(q, k, v)
    (batch, seqlen_q, heads_q, head_dim), (_, seqlen_k, heads_k, _), (_, _, _, head_dim_v) = (
        _check_shapes(q, k, v, axes)
    )
    top_left = _check_causal(causal) == "top-left"
    shape = (batch, heads_q, seqlen_q, seqlen_k)
    logical = combine.read_positions(positions, shape, top_left)
    masked = combine.mask_of(bool(causal), _check_window(window), mask, logical, shape)
    scored = combine.score_of(softcap, bias, score, logical, shape)
    q_offset = 0 if top_left else seqlen_k - seqlen_q
    bits = 32
    if min(batch, heads_q, seqlen_q, seqlen_k) > 0:
        ranges = (
            ("b", 0, batch - 1), ("h", 0, heads_q - 1),
            ("row", 0, seqlen_q - 1), ("q", q_offset, q_offset + seqlen_q - 1),
            ("column", 0, seqlen_k - 1), ("k", 0, seqlen_k - 1),
        )  # fmt: skip
        expressions = [e for e in (masked, scored) if e is not None]
        bits = max([32, *(expression.survey(ranges) for expression in expressions)])
    problem = Problem(
        batch=batch, heads_q=heads_q, heads_k=heads_k, seqlen_q=seqlen_q, seqlen_k=seqlen_k,
        head_dim=head_dim, head_dim_v=head_dim_v, dtype=q.dtype,
        scale=_check_scale(scale, head_dim), mask=masked, score=scored,
        sink=combine.sink_of(sink, heads_q), q_offset=q_offset, index_bits=bits,
        deterministic=_check_flag("deterministic", deterministic),
    )  # fmt: skip
    return problem, axes


def check_backward(
    problem: Problem, axes: Axes, do: Described, o: Described, lse: Described, dlse: Any
) -> None:
    """Validate what backward gets beside the arguments of forward."""
    o_shape = axes.shape(problem.batch, problem.seqlen_q, problem.heads_q, problem.head_dim_v)
    lse_shape = axes.lse_shape(problem)
    for name, array, shape in (("do", do, o_shape), ("o", o, o_shape), ("lse", lse, lse_shape)):
        if tuple(array.shape) != shape:
            raise ValueError(
                f"{name}.shape must be {shape}, as attention returns it for these inputs, "
                f"got {tuple(array.shape)}"
            )
    if o.dtype != problem.dtype:
        raise TypeError(f"o.dtype must be q.dtype = {problem.dtype}, got {o.dtype}")
    if lse.dtype != problem.accumulation:
        raise TypeError(
            f"lse.dtype must be {problem.accumulation} for q of {problem.dtype}, got {lse.dtype}"
        )
    if do.dtype not in DTYPES:
        raise TypeError(f"do.dtype must be one of {', '.join(DTYPES)}, got {do.dtype}")
    if dlse is not None:
        if tuple(dlse.shape) != lse_shape:
            raise ValueError(f"dlse.shape must be {lse_shape}, got {tuple(dlse.shape)}")
        if dlse.dtype not in DTYPES:
            raise TypeError(f"dlse.dtype must be one of {', '.join(DTYPES)}, got {dlse.dtype}")


def _axes(q: Described, k: Described, v: Described, layout: str) -> Axes:
    if layout not in LAYOUTS:
        raise ValueError(f"layout must be one of {', '.join(LAYOUTS)}, got {layout!r}")
    ndim = len(q.shape)
    if ndim not in (2, 3, 4):
        raise ValueError(f"q must have 2, 3 or 4 axes, got shape {tuple(q.shape)}")
    for name, array in (("k", k), ("v", v)):
        if len(array.shape) != ndim:
            raise ValueError(
                f"{name} must have as many axes as q ({ndim}), got shape {tuple(array.shape)}"
            )
    return Axes(layout, ndim)


def _check_dtypes(q: Described, k: Described, v: Described) -> None:
    if q.dtype not in DTYPES:
        raise TypeError(f"q.dtype must be one of {', '.join(DTYPES)}, got {q.dtype}")
    for name, array in (("k", k), ("v", v)):
        if array.dtype != q.dtype:
            raise TypeError(
                f"{name}.dtype must equal q.dtype = {q.dtype}, got {array.dtype}: convert one"
            )


def _check_shapes(
    q: Described, k: Described, v: Described, axes: Axes
) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    """Shapes of q, k, v as (batch, seqlen, heads, dim)."""

    def sizes(array: Described) -> tuple[int, ...]:
        return tuple(1 if at is None else int(array.shape[at]) for at in axes.order)

    def place(axis: str) -> int:
        return axes.names.index(axis)

    shapes = sizes(q), sizes(k), sizes(v)
    (batch, _, heads_q, head_dim), (batch_k, seqlen_k, heads_k, head_dim_k), of_v = shapes

    def rule(name: str, axis: str, other: str, wanted: int, got: int) -> None:
        if wanted != got:
            at = place(axis)
            raise ValueError(
                f"{name}.shape[{at}] must equal {other}.shape[{at}] = {wanted}, got {got}"
            )

    if axes.ndim == 4:
        rule("k", "b", "q", batch, batch_k)
        rule("v", "b", "q", batch, of_v[0])
    rule("k", "d", "q", head_dim, head_dim_k)
    rule("v", "s", "k", seqlen_k, of_v[1])
    if axes.ndim > 2:
        rule("v", "h", "k", heads_k, of_v[2])
    for name, dim in (("q", head_dim), ("v", of_v[3])):
        if dim == 0:
            raise ValueError(f"{name}.shape[{place('d')}] (head_dim) must be at least 1, got 0")
    if (heads_k == 0 and heads_q > 0) or (heads_k and heads_q % heads_k):
        at = place("h")
        raise ValueError(
            f"q.shape[{at}] (heads of q) must be a multiple of k.shape[{at}] = {heads_k}, "
            f"got {heads_q}"
        )
    return shapes


def _check_causal(causal: Any) -> str | None:
    if isinstance(causal, str):
        if causal not in ("bottom-right", "top-left"):
            raise ValueError(
                f"causal must be a bool, 'bottom-right' (as True) or 'top-left', got {causal!r}"
            )
        return causal
    return "bottom-right" if _check_flag("causal", causal) else None


def _check_flag(name: str, value: Any) -> bool:
    if value is None and name == "deterministic":
        return False
    if isinstance(value, bool) or type(value).__name__ in ("bool", "bool_"):
        return bool(value)
    raise TypeError(f"{name} must be True or False, got {value!r}")


def _check_window(window: Any) -> tuple[int | None, int | None] | None:
    if window is None:
        return None
    pair = (window, window) if isinstance(window, numbers.Integral) else window
    if not isinstance(pair, (tuple, list)) or len(pair) != 2:
        raise TypeError(f"window must be None, an integer or a pair (left, right), got {window!r}")
    for side in pair:
        if side is not None and (isinstance(side, bool) or not isinstance(side, numbers.Integral)):
            raise TypeError(f"window counts keys: integers or None, got {window!r}")
        if side is not None and side < 0:
            raise ValueError(f"window must not be negative (None is unlimited), got {window!r}")
    left, right = (None if side is None else int(side) for side in pair)
    return left, right


def _check_scale(scale: Any, head_dim: int) -> float:
    if scale is None:
        return 1.0 / math.sqrt(head_dim)
    if isinstance(scale, bool) or not isinstance(scale, numbers.Real):
        raise TypeError(f"scale must be a number or None (1 / sqrt(head_dim)), got {scale!r}")
    if not math.isfinite(scale):
        raise ValueError(f"scale must be finite, got {scale!r}")
    return float(scale)
