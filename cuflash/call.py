"""One call between the public functions and the back ends: what it allocates, and how it runs.

`Call` is one call read: library, views of the arrays, problem. A `Pass` is what a pass needs beside
its arrays: what to allocate and how to run on views; it serves eager libraries, which allocate
first, and JAX, where XLA allocates and calls back. A repeated call finds its problem and passes by
shapes and options, so it validates and plans nothing again.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any

from cuflash import arrays, cpu, family, sm90
from cuflash.arrays import View
from cuflash.expr.bounds import TileMask
from cuflash.expr.nodes import Param
from cuflash.expr.scoring import TileScore
from cuflash.gpu import tensor_map
from cuflash.masks import Mask
from cuflash.problem import Axes, Problem, check_backward, make
from cuflash.scores import Score

Spec = tuple[str, tuple[int, ...], str]
"""Name, shape and dtype of an array to allocate."""

TENSORS = ("q", "k", "v", "o", "do", "dq", "dk", "dv")


class Call:
    """One call, read and validated; nothing is allocated yet.

    views : of q, k, v and, for backward, do, o, lse, dlse, in the caller's axes
    captured : the arrays that mask, score and sink read, as the caller gave them
    """

    def __init__(
        self, q: Any, k: Any, v: Any, options: dict[str, Any], *,
        more: dict[str, Any] | None = None, manual: bool = False,
    ) -> None:  # fmt: skip
        """Look at the arrays, then validate; `more` are the further arrays of backward."""
        given = {"q": q, "k": k, "v": v}
        if more is not None:
            given.update({name: array for name, array in more.items() if array is not None})
        self.library, self.views = arrays.take(given, manual=manual or more is not None)
        if options.get("deterministic") is None:
            options = {**options, "deterministic": self.library.deterministic()}
        self.prepared = _prepare(self.views, options)
        self.problem = self.prepared.problem
        if more is not None:
            views = self.views
            check_backward(
                self.problem, self.prepared.axes, views["do"], views["o"], views["lse"],
                views.get("dlse"),
            )  # fmt: skip
            for name, dtype in (("do", self.problem.dtype), ("dlse", self.problem.accumulation)):
                if name in given and views[name].dtype != dtype:
                    given[name] = self.library.cast(given[name], dtype)
                    views[name] = self.library.view(given[name], name)
        self.given = given

    @property
    def device(self) -> arrays.Device:
        return self.views["q"].device

    def step(self, backward: bool, with_lse: bool) -> Pass:
        """The pass of this call's arrays."""
        read = ("q", "k", "v", "o", "do") if backward else ("q", "k", "v")
        is_readable = self.problem.dtype not in sm90.DTYPES or all(
            tensor_map.is_readable(self.views[name]) for name in read if name in self.views
        )
        return self.prepared.step(backward, with_lse, is_readable)

    def run(self, backward: bool, with_lse: bool) -> list[Any]:
        """Allocate the outputs by the caller's library, run, and hand the outputs over.

        The outputs are those of `Pass.outputs`, in this order.
        """
        device, library = self.device, self.library
        step = self.step(backward, with_lse)
        captured = [
            arrays.capture(array.array, "an array captured by mask, score, bias or sink", device,
                           library)
            for array in self.prepared.captured
        ]  # fmt: skip
        if library.name == "JAX":
            from cuflash import jax

            operands = [*self.given.values(), *(view.owner for view in captured)]
            results = [(shape, dtype) for _, shape, dtype in step.outputs]
            return jax.call(step.detached, results, *operands)
        specs = [*step.outputs, *step.named_workspaces(device)]
        made = [library.empty(shape, dtype, device) for _, shape, dtype in specs]
        outputs = [library.view(array, "an output") for array in made]
        step([*self.views.values(), *captured], outputs, library.stream(device))
        return [library.give(array) for array in made[: len(step.outputs)]]


class Prepared:
    """What calls of the same shapes and options share: the problem and its passes."""

    def __init__(self, problem: Problem, axes: Axes) -> None:
        self.problem, self.axes = problem, axes
        self.captured = problem.captured
        self._steps: dict[tuple[bool, ...], Pass] = {}

    def step(self, backward: bool, with_lse: bool, is_readable: bool) -> Pass:
        """The pass, made once."""
        key = backward, with_lse, is_readable
        if key not in self._steps:
            self._steps[key] = Pass(self.problem, self.axes, *key)
        return self._steps[key]


_plain: dict[Any, Prepared] = {}  # of calls without any object; those live on the object itself


def _prepare(views: dict[str, View], options: dict[str, Any]) -> Prepared:
    """The prepared problem of a call, found by shapes and options where these are hashable.

    What is found is kept with the mask or score object that a call uses, so that it keeps alive
    no array that the object does not. Bias, sink and positions are arrays: such calls read anew.
    """
    inputs = views["q"], views["k"], views["v"]
    objects = [options[name] for name in ("mask", "score") if options.get(name) is not None]
    fresh = any(options.get(name) is not None for name in ("bias", "sink", "positions"))
    if fresh or not all(isinstance(each, (Mask, Score)) for each in objects):
        return Prepared(*make(*inputs, **options))
    kept = objects[0].prepared if objects else _plain
    key = (
        tuple((view.shape, view.dtype) for view in inputs),
        *((name, value, kinds(value)) for name, value in options.items()),
    )
    try:
        prepared = kept.get(key)
    except TypeError:  # an option that is no number: `make` says which
        return Prepared(*make(*inputs, **options))
    if prepared is None:
        if len(kept) >= 256:
            kept.clear()
        prepared = kept[key] = Prepared(*make(*inputs, **options))
    return prepared


def kinds(value: Any) -> Any:
    """The types in an option: True and 1 are equal, but not the same option."""
    return tuple(map(type, value)) if isinstance(value, tuple) else type(value)


class Pass:
    """Forward or backward of one problem, without arrays. Hashable: equal ones do the same work.

    with_lse : forward writes lse; backward reads dlse
    is_readable : Hopper's copy engine reads q, k and v in place
    """

    def __init__(
        self, problem: Problem, axes: Axes, backward: bool, with_lse: bool, is_readable: bool
    ) -> None:
        self.problem, self.axes = problem, axes
        self.is_backward, self.with_lse, self._is_readable = backward, with_lse, is_readable
        numbers = tuple(None if e is None else e.operands for e in problem.expressions)
        self._key = (problem.key, numbers, axes, backward, with_lse, is_readable)
        self._launches: dict[Any, Any] = {}

    def __hash__(self) -> int:
        return hash(self._key)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Pass) and self._key == other._key

    @cached_property
    def detached(self) -> Pass:
        """An equal pass that holds none of the arrays that the expressions captured."""
        options = self.is_backward, self.with_lse, self._is_readable
        return Pass(self.problem.detached(), self.axes, *options)

    @property
    def params(self) -> list[Param]:
        """What gets a gradient beside q, k, v: the Params of the score, then the sink's."""
        expressions = (self.problem.score, self.problem.sink)
        return [param for e in expressions if e is not None for param in e.params]

    @cached_property
    def outputs(self) -> list[Spec]:
        """What the caller gets, in the caller's axes."""
        p = self.problem
        if self.is_backward:
            return [
                ("dq", self.axes.shape(p.batch, p.seqlen_q, p.heads_q, p.head_dim), p.dtype),
                ("dk", self.axes.shape(p.batch, p.seqlen_k, p.heads_k, p.head_dim), p.dtype),
                ("dv", self.axes.shape(p.batch, p.seqlen_k, p.heads_k, p.head_dim_v), p.dtype),
                *((f"dparam{i}", each.shape, each.dtype) for i, each in enumerate(self.params)),
            ]
        o = ("o", self.axes.shape(p.batch, p.seqlen_q, p.heads_q, p.head_dim_v), p.dtype)
        lse = ("lse", self.axes.lse_shape(p), p.accumulation)
        return [o, lse] if self.with_lse else [o]

    @cached_property
    def _inputs(self) -> list[str]:
        if not self.is_backward:
            return ["q", "k", "v"]
        return ["q", "k", "v", "do", "o", "lse"] + ["dlse"] * self.with_lse

    def named_workspaces(self, device: arrays.Device) -> list[Spec]:
        """What the kernels need beside; always written before it is read."""
        if device.kind == "cpu":
            return []
        return self.launch(device).workspaces

    def workspaces(self, device: arrays.Device) -> list[tuple[tuple[int, ...], str]]:
        """Shape and dtype of each workspace, for libraries that allocate outputs and these."""
        return [(shape, dtype) for _, shape, dtype in self.named_workspaces(device)]

    def __call__(self, inputs: Sequence[View], outputs: Sequence[View], stream: int) -> None:
        """Run on views: q, k, v [, do, o, lse, dlse], captured arrays; outputs, workspaces."""
        device = inputs[0].device
        views = self.named(inputs, outputs, device)
        captured = inputs[len(self._inputs) :]
        if device.kind == "cpu":
            self._run_on_host(views, captured)
        else:
            self.launch(device)(views, captured, stream)

    def named(
        self, inputs: Sequence[View], outputs: Sequence[View], device: arrays.Device
    ) -> dict[str, View]:
        """The views by name, in four axes."""
        made = [name for name, *_ in (*self.outputs, *self.named_workspaces(device))]
        return {
            name: self._four_axes(name, view)
            for name, view in (*zip(self._inputs, inputs), *zip(made, outputs))
        }

    def prepare(self, device: arrays.Device) -> None:
        """Compile and load the kernels of a GPU, so that a call does not wait for them."""
        self.launch(device).prepare()

    def describe(self, device: arrays.Device) -> tuple[str, tuple[int, int], tuple[str, ...]]:
        """For `explain`: the kernel's name, its tile (block_q, block_k), why no faster family."""
        name, tile, reasons = self.launch(device).describe()
        return f"{name} on {device}", tile, reasons

    def launch(self, device: arrays.Device) -> Any:
        """The launch of this pass on a device with the family in force, prepared once."""
        key = device, family.forced()
        if key not in self._launches:
            from cuflash.gpu.launch import Launch

            options = self.is_backward, self._is_readable
            self._launches[key] = Launch(self.problem, device.index, *options)
        return self._launches[key]

    def _four_axes(self, name: str, view: View) -> View:
        """The caller's array as (batch, seqlen, heads, dim); lse as (batch, heads, seqlen)."""
        if self.axes.plain:
            return view
        if name in ("lse", "dlse"):
            return view.with_axes(tuple(range(3 - view.ndim)))
        if name not in TENSORS:
            return view
        order = [at for at in self.axes.order if at is not None]
        missing = [place for place, at in enumerate(self.axes.order) if at is None]
        return view.transpose(tuple(order)).with_axes(missing)

    def _run_on_host(self, views: dict[str, View], captured: Sequence[View]) -> None:
        host: dict[str, Any] = {name: view.host for name, view in views.items()}
        problem, rest = self.problem, [view.host for view in captured]
        parts = []
        for expression in problem.expressions:
            count = 0 if expression is None else len(expression.arrays)
            parts.append([array for array in rest[:count] if array is not None])
            rest = rest[count:]
        mask: Any = None
        score: Any = None
        sink: Any = None
        if problem.mask is not None:
            mask = TileMask(problem.mask, parts[0], problem, *cpu.blocks(problem))
        if problem.score is not None:
            score = TileScore(problem.score, parts[1], problem)
        if problem.sink is not None:
            sink = parts[2][0].astype(problem.accumulation)
        if not self.is_backward:
            arrays_of_pass = (host.get(name) for name in ("q", "k", "v", "o", "lse"))
            cpu.forward(problem, mask, score, sink, *arrays_of_pass)  # type: ignore[arg-type]
            return
        names = ("do", "q", "k", "v", "o", "lse", "dlse", "dq", "dk", "dv")
        dsink = cpu.backward(problem, mask, score, sink, *(host.get(name) for name in names))  # type: ignore[arg-type]
        found = [] if score is None else list(score.gradients)
        if dsink is not None:
            found.append(dsink)
        for i, _ in enumerate(self.params):
            host[f"dparam{i}"][...] = found[i]
