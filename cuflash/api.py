"""The public calls: read the arguments, describe the problem, run it, hand back.

`_Call` is one call read: library, views of the arrays, problem. A `_Pass` is what a pass needs
beside its arrays: what to allocate and how to run on views; it serves eager libraries, which
allocate first, and JAX, where XLA allocates and calls back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from cuflash import arrays, cpu
from cuflash.arrays import View
from cuflash.expr.bounds import TileMask
from cuflash.problem import Axes, Problem, check_backward, make
from cuflash.report import Explanation, report

__all__ = ["Gradients", "attention", "attention_backward", "attention_vjp", "explain", "warmup"]

Spec = tuple[str, tuple[int, ...], str]
"""Name, shape and dtype of an array to allocate."""


class Gradients:
    """dq, dk, dv of a backward pass; unpacks to exactly these three.

    Attributes
    ----------
    dq, dk, dv : shapes, dtype and library of q, k, v
    """

    __slots__ = ("dk", "dq", "dv")

    def __init__(self, dq: Any, dk: Any, dv: Any) -> None:
        self.dq, self.dk, self.dv = dq, dk, dv

    def __iter__(self) -> Iterator[Any]:
        return iter((self.dq, self.dk, self.dv))

    def __len__(self) -> int:
        return 3

    def __repr__(self) -> str:
        return f"Gradients(dq, dk, dv of shapes {self.dq.shape}, {self.dk.shape}, {self.dv.shape})"


def attention(
    q: Any,
    k: Any,
    v: Any,
    *,
    causal: bool | str = False,
    window: int | tuple[int | None, int | None] | None = None,
    mask: Any = None,
    scale: float | None = None,
    positions: Any = None,
    layout: str = "bshd",
    deterministic: bool | None = None,
    return_lse: bool = False,
) -> Any:
    """Attention o = softmax(scale * q k^T, masked) v, exact and in memory linear in the sequence.

    Parameters
    ----------
    q : array (batch, seqlen_q, heads_q, head_dim), float16, bfloat16, float32 or float64, of NumPy,
        CuPy, PyTorch, JAX or any library with DLPack, any strides. 3-D arrays are one batch item,
        2-D arrays one head of one item; results lack the same axes
    k, v : array (batch, seqlen_k, heads_k, head_dim), dtype, library and device of q; v may have
        another head_dim; heads_q is a multiple of heads_k
    causal : True or "bottom-right": the last query sees the last key; "top-left": the first query
        sees the first key only.
        seqlen_q 2, seqlen_k 4: 1110 1111        seqlen_q 3, seqlen_k 2: 00 10 11   (bottom-right)
    window : keys that a query sees before and after its own, both counted: (left, right), None on a
        side is unlimited, an int w is (w, w)
    mask : a mask of `cuflash` (`Causal`, `SlidingWindow`, `Mask`, combined by & | ~), or a bool
        array that broadcasts to (batch, heads_q, seqlen_q, seqlen_k), True where a query attends.
        causal, window and mask all have to allow a pair
    scale : factor on q k^T; None means 1 / sqrt(head_dim)
    positions : logical index of each stored query and key, which causal, window and masks go by:
        one integer array for both or a pair (for q, for k), each (seqlen,) or (batch, seqlen).
        Default: k counts from 0, q so that the last query is at the last key. See `cuflash.order`
    layout : order of the axes, "bshd" (batch, seqlen, heads, head_dim), "bhsd" or "sbhd"
    deterministic : every result is bit-reproducible so far, whatever this says
    return_lse : return (o, lse) instead of o

    Returns
    -------
    o : layout of q with head_dim of v, dtype, library and device of q; 0 in a row that sees no key
    lse : (batch, heads_q, seqlen_q) float32 (float64 for float64), natural log of the sum of
        exp(score); -inf in a row that sees no key

    Raises
    ------
    TypeError: kind, dtype or library of an argument. ValueError: a shape, length or value breaks a
    rule above; both name the argument. Unsupported: no kernel for this on the device.

    References
    ----------
    Dao et al. 2022, arXiv:2205.14135; Dao 2023, arXiv:2307.08691. `reference.py`, equations 1-4.

    Examples
    --------
    >>> o, lse = cuflash.attention(q, k, v, causal=True, return_lse=True)
    """
    call = _Call.read(
        q, k, v, causal=causal, window=window, mask=mask, scale=scale, positions=positions,
        layout=layout, deterministic=deterministic,
    )  # fmt: skip
    return call.forward(return_lse)


def attention_backward(
    do: Any,
    q: Any,
    k: Any,
    v: Any,
    o: Any,
    lse: Any,
    *,
    dlse: Any = None,
    causal: bool | str = False,
    window: int | tuple[int | None, int | None] | None = None,
    mask: Any = None,
    scale: float | None = None,
    positions: Any = None,
    layout: str = "bshd",
    deterministic: bool | None = None,
) -> Gradients:
    """Gradients of a loss by q, k and v, from its gradients by o and lse.

    Parameters
    ----------
    do : array, shape of o; gradient by o. Another float dtype than q's is cast once
    q, k, v : as given to `attention`
    o, lse : as `attention(..., return_lse=True)` returned them for the same options
    dlse : (batch, heads_q, seqlen_q) gradient by lse, or None; ignored in rows that see no key
    the rest : as given to `attention`

    Returns
    -------
    Gradients : dq, dk, dv in shape, dtype and library of q, k, v; dk and dv are sums over the query
        heads that share a key head. Unpacks to these three

    Raises
    ------
    TypeError, ValueError, Unsupported: as `attention`.

    References
    ----------
    Dao 2023, arXiv:2307.08691, Algorithm 2. `reference.py`, equations 5-10.

    Examples
    --------
    >>> o, lse = cuflash.attention(q, k, v, return_lse=True)
    >>> dq, dk, dv = cuflash.attention_backward(do, q, k, v, o, lse)
    """
    call = _Call.read(
        q, k, v, causal=causal, window=window, mask=mask, scale=scale, positions=positions,
        layout=layout, deterministic=deterministic,
        more={"do": do, "o": o, "lse": lse, "dlse": dlse},
    )  # fmt: skip
    return call.backward()


def attention_vjp(
    q: Any, k: Any, v: Any, *, return_lse: bool = False, **options: Any
) -> tuple[Any, Callable[..., Gradients]]:
    """Attention and its pullback: the manual gradient API as a closure.

    Parameters
    ----------
    q, k, v, return_lse and options : as for `attention`

    Returns
    -------
    o : as `attention` returns it; (o, lse) with return_lse
    pullback : pullback(do, dlse=None) returns the `Gradients` that `attention_backward` returns

    Raises
    ------
    TypeError, ValueError, Unsupported: as `attention`.

    Examples
    --------
    >>> o, pullback = cuflash.attention_vjp(q, k, v, causal=True)
    >>> dq, dk, dv = pullback(o - target)
    """
    o, lse = _Call.read(q, k, v, manual=True, **options).forward(True)

    def pullback(do: Any, dlse: Any = None) -> Gradients:
        return attention_backward(do, q, k, v, o, lse, dlse=dlse, **options)

    return ((o, lse) if return_lse else o), pullback


def explain(q: Any, k: Any, v: Any, *, backward: bool = False, **options: Any) -> Explanation:
    """What a call would run: kernel, tiles, memory, work, copies, and why nothing faster.

    Parameters
    ----------
    q, k, v, options : as for `attention`; nothing is computed or compiled
    backward : describe `attention_backward` instead

    Returns
    -------
    Explanation : its fields are the figures (bytes, FLOPs); str() of it is the report

    Raises
    ------
    TypeError, ValueError, Unsupported: as the call itself would.
    """
    call = _Call.read(q, k, v, manual=True, **options)
    step = _Pass(call.problem, call.axes, backward, True)
    return report(
        call.problem, call.views, call.captures, step.outputs(), step.workspaces(call.device),
        backward,
    )  # fmt: skip


def warmup(q: Any, k: Any, v: Any, *, backward: bool = False, **options: Any) -> None:
    """Compile and load the kernels of a call ahead of it, so that the call itself does not wait.

    Parameters
    ----------
    q, k, v, options : as for `attention`; only shapes, dtypes and strides matter
    backward : prepare `attention_backward` too
    """
    call = _Call.read(q, k, v, manual=True, **options)
    if call.device.kind == "cuda":
        from cuflash.gpu import launch

        for is_backward in (False, True) if backward else (False,):
            launch.prepare(call.problem, call.device.index, is_backward)


@dataclass
class _Call:
    """One call, read and validated; nothing is allocated yet."""

    problem: Problem
    axes: Axes
    library: arrays.Library
    views: dict[str, View]  # of q, k, v and, for backward, do, o, lse, dlse: as the caller has them
    given: dict[str, Any]
    captures: list[Any]

    @classmethod
    def read(
        cls, q: Any, k: Any, v: Any, *, more: dict[str, Any] | None = None, manual: bool = False,
        **options: Any,
    ) -> _Call:  # fmt: skip
        """Look at the arrays, then validate; `more` are the further arrays of backward."""
        given = {"q": q, "k": k, "v": v}
        given.update({name: array for name, array in (more or {}).items() if array is not None})
        library, views = arrays.take(given, manual=manual or more is not None)
        if options.get("deterministic") is None:
            options["deterministic"] = library.deterministic()
        problem, axes = make(views["q"], views["k"], views["v"], **options)
        if more is not None:
            check_backward(problem, axes, views["do"], views["o"], views["lse"], views.get("dlse"))
        captures = [] if problem.mask is None else [c.array for c in problem.mask.arrays]
        return cls(problem, axes, library, views, given, captures)

    @property
    def device(self) -> arrays.Device:
        return self.views["q"].device

    def forward(self, return_lse: bool) -> Any:
        step = _Pass(self.problem, self.axes, False, return_lse)
        results = self._run(step)
        return (results[0], results[1]) if return_lse else results[0]

    def backward(self) -> Gradients:
        step = _Pass(self.problem, self.axes, True, "dlse" in self.views)
        return Gradients(*self._run(step)[:3])

    def _run(self, step: _Pass) -> list[Any]:
        """Allocate the outputs by the caller's library, run, and hand the outputs over."""
        device = self.device
        captures = [
            arrays.capture(array, "an array captured by the mask", device, self.library)
            for array in self.captures
        ]
        results = [spec for _, *spec in step.outputs()]
        if self.library.name == "JAX":
            from cuflash import jax

            operands = [*self.given.values(), *(view.owner for view in captures)]
            return jax.call(step, results, *operands)
        specs = [*results, *step.workspaces(device)]
        made = [self.library.empty(shape, dtype, device) for shape, dtype in specs]
        outputs = [self.library.view(array, "an output") for array in made]
        step([*self.views.values(), *captures], outputs, self.library.stream(device))
        return [self.library.give(array) for array in made[: len(results)]]


class _Pass:
    """Forward or backward of one problem, without arrays. Hashable: equal ones do the same work.

    with_lse : forward writes lse; backward reads dlse
    """

    def __init__(self, problem: Problem, axes: Axes, backward: bool, with_lse: bool) -> None:
        self.problem, self.axes = problem, axes
        self.is_backward, self.with_lse = backward, with_lse
        numbers = () if problem.mask is None else problem.mask.operands
        self._key = (problem.key, numbers, axes, backward, with_lse)

    def __hash__(self) -> int:
        return hash(self._key)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Pass) and self._key == other._key

    def outputs(self) -> list[Spec]:
        """What the caller gets, in the caller's axes."""
        p = self.problem
        if self.is_backward:
            return [
                ("dq", self.axes.shape(p.batch, p.seqlen_q, p.heads_q, p.head_dim), p.dtype),
                ("dk", self.axes.shape(p.batch, p.seqlen_k, p.heads_k, p.head_dim), p.dtype),
                ("dv", self.axes.shape(p.batch, p.seqlen_k, p.heads_k, p.head_dim_v), p.dtype),
            ]
        o = ("o", self.axes.shape(p.batch, p.seqlen_q, p.heads_q, p.head_dim_v), p.dtype)
        lse = ("lse", self.axes.lse_shape(p), p.accumulation)
        return [o, lse] if self.with_lse else [o]

    def workspaces(self, device: arrays.Device) -> list[tuple[tuple[int, ...], str]]:
        """Shape and dtype of what the kernels need beside; always written before it is read."""
        return [(shape, dtype) for _, shape, dtype in self._workspaces(device)]

    def _workspaces(self, device: arrays.Device) -> list[Spec]:
        if device.kind == "cpu":
            return []
        from cuflash.gpu import launch

        return launch.workspaces(self.problem, self.is_backward)

    def __call__(self, inputs: Sequence[View], outputs: Sequence[View], stream: int) -> None:
        """Run on views: q, k, v [, do, o, lse, dlse], captured arrays; outputs, workspaces."""
        names = ["q", "k", "v"]
        if self.is_backward:
            names += ["do", "o", "lse"] + (["dlse"] if self.with_lse else [])
        views = dict(zip(names, inputs))
        captures = list(inputs[len(names) :])
        device = views["q"].device
        specs = [*self.outputs(), *self._workspaces(device)]
        views.update((name, view) for (name, *_), view in zip(specs, outputs))
        four = {name: self._four_axes(name, view) for name, view in views.items()}
        if device.kind == "cpu":
            self._run_on_host(four, captures)
        else:
            from cuflash.gpu import launch

            run = launch.backward if self.is_backward else launch.forward
            run(self.problem, four, captures, stream)

    def _four_axes(self, name: str, view: View) -> View:
        """The caller's array as (batch, seqlen, heads, dim); lse as (batch, heads, seqlen)."""
        if name in ("lse", "dlse"):
            return view.with_axes(tuple(range(3 - view.ndim)))
        if name not in ("q", "k", "v", "o", "do", "dq", "dk", "dv"):
            return view
        order = [at for at in self.axes.order if at is not None]
        missing = [place for place, at in enumerate(self.axes.order) if at is None]
        return view.transpose(tuple(order)).with_axes(missing)

    def _run_on_host(self, views: dict[str, View], captures: Sequence[View]) -> None:
        host = {name: view.host for name, view in views.items()}
        mask = None
        if self.problem.mask is not None:
            captured = [view.host for view in captures]
            block_q, block_k = cpu.blocks(self.problem)
            mask = TileMask(self.problem.mask, captured, self.problem, block_q, block_k)  # type: ignore[arg-type]
        if self.is_backward:
            cpu.backward(
                self.problem, mask,
                *(host[name] for name in ("do", "q", "k", "v", "o", "lse")), host.get("dlse"),
                *(host[name] for name in ("dq", "dk", "dv")),
            )  # fmt: skip
        else:
            cpu.forward(
                self.problem, mask, *(host[name] for name in ("q", "k", "v", "o")), host.get("lse")
            )
