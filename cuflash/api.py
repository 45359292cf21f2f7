"""The public calls: read the arguments, run, hand back. `call.py` is what happens between."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from cuflash import repeat
from cuflash.call import Call
from cuflash.expr.nodes import Param
from cuflash.report import Explanation, report

__all__ = ["Gradients", "attention", "attention_backward", "attention_vjp", "explain", "warmup"]


class Gradients:
    """What a backward pass returns; unpacks to exactly dq, dk, dv.

    Attributes
    ----------
    dq, dk, dv : shapes, dtype and library of q, k, v
    dbias, dsink : gradient by the bias and the sink where these were given as `Param`, else None
    dparams : dict from every `Param` of the call to its gradient, in its shape and dtype
    """

    __slots__ = ("dbias", "dk", "dparams", "dq", "dsink", "dv")

    def __init__(
        self, dq: Any, dk: Any, dv: Any, dparams: dict[Param, Any], bias: Any, sink: Any
    ) -> None:
        self.dq, self.dk, self.dv, self.dparams = dq, dk, dv, dparams
        self.dbias, self.dsink = (
            dparams.get(each) if isinstance(each, Param) else None for each in (bias, sink)
        )

    def __iter__(self) -> Iterator[Any]:
        return iter((self.dq, self.dk, self.dv))

    def __len__(self) -> int:
        return 3

    def __repr__(self) -> str:
        shapes = ", ".join(str(tuple(array.shape)) for array in self)
        return f"Gradients(dq, dk, dv of shapes {shapes}; {len(self.dparams)} Params)"


def attention(
    q: Any,
    k: Any,
    v: Any,
    *,
    causal: bool | str = False,
    window: int | tuple[int | None, int | None] | None = None,
    mask: Any = None,
    bias: Any = None,
    score: Any = None,
    softcap: float | None = None,
    sink: Any = None,
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
        causal, window and mask all have to allow a pair. In a call on a GPU, NumPy arrays given as
        mask, bias, sink or positions, or captured by masks and scores, are copied to it once and
        kept while they live: later changes in place are not seen (give arrays on the device)
    bias : float array that broadcasts to the same shape and is added to the scores, any dtype and
        strides; or `Param(array)`, to get its gradient
    score : a score of `cuflash` (`Softcap`, `ALiBi`, `RelativeBias`, `Bias`, `Score`, chained by
        >>), applied to scale * q k^T after softcap and bias
    softcap : caps the scores at +-softcap: softcap * tanh(x / softcap), before the bias
    sink : float array (heads_q,) or `Param`: logits that take part in the softmax without a value
    scale : factor on q k^T; None means 1 / sqrt(head_dim)
    positions : logical index of each stored query and key, which causal, window and masks go by:
        one integer array for both or a pair (for q, for k), each (seqlen,) or (batch, seqlen).
        Default: k counts from 0, q so that the last query is at the last key. See `cuflash.order`
    layout : order of the axes, "bshd" (batch, seqlen, heads, head_dim), "bhsd" or "sbhd"
    deterministic : True makes dq and the gradients of `Param`s bit-reproducible too; o, lse, dk and
        dv are so always. None takes PyTorch's own switch, elsewhere False
    return_lse : return (o, lse) instead of o

    Returns
    -------
    o : layout of q with head_dim of v, dtype, library and device of q; 0 in a row that sees no key
    lse : (batch, heads_q, seqlen_q) float32 (float64 for float64), natural log of the sum of
        exp(score), sink included; -inf in a row that sees no key and has no sink

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
    options = {
        "causal": causal, "window": window, "mask": mask, "bias": bias, "score": score,
        "softcap": softcap, "sink": sink, "scale": scale, "positions": positions,
        "layout": layout, "deterministic": deterministic,
    }  # fmt: skip
    results, _ = repeat.run({"q": q, "k": k, "v": v}, options, False, return_lse)
    return (results[0], results[1]) if return_lse else results[0]


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
    bias: Any = None,
    score: Any = None,
    softcap: float | None = None,
    sink: Any = None,
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
        heads that share a key head. Unpacks to these three; dbias, dsink, dparams hold the rest

    Raises
    ------
    TypeError, ValueError, Unsupported: as `attention`.

    References
    ----------
    Dao 2023, arXiv:2307.08691, Algorithm 2. `reference.py`, equations 5-12.

    Examples
    --------
    >>> o, lse = cuflash.attention(q, k, v, return_lse=True)
    >>> dq, dk, dv = cuflash.attention_backward(do, q, k, v, o, lse)
    """
    options = {
        "causal": causal, "window": window, "mask": mask, "bias": bias, "score": score,
        "softcap": softcap, "sink": sink, "scale": scale, "positions": positions,
        "layout": layout, "deterministic": deterministic,
    }  # fmt: skip
    given = {"q": q, "k": k, "v": v, "do": do, "o": o, "lse": lse}
    if dlse is not None:
        given["dlse"] = dlse
    (dq, dk, dv, *rest), params = repeat.run(given, options, True, dlse is not None)
    return Gradients(dq, dk, dv, dict(zip(params, rest, strict=True)), bias, sink)


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
    o, lse = Call(q, k, v, options, manual=True).run(False, True)

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
    call = Call(q, k, v, options, manual=True)
    return report(call.step(backward, True), call.views)


def warmup(q: Any, k: Any, v: Any, *, backward: bool = False, **options: Any) -> None:
    """Compile and load the kernels of a call ahead of it, so that the call itself does not wait.

    Parameters
    ----------
    q, k, v, options : as for `attention`; only shapes, dtypes and strides matter
    backward : prepare `attention_backward` too
    """
    call = Call(q, k, v, options, manual=True)
    if call.device.kind == "cuda":
        for is_backward in (False, True) if backward else (False,):
            call.step(is_backward, True).prepare(call.device)
