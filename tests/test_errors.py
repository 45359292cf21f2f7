"""Every message about a wrong argument: before any work, naming argument, rule, value and fix."""

import math
from typing import Any

import numpy as np
import pytest

import cuflash


def arrays(dtype: Any = np.float32, **shapes: tuple[int, ...]) -> list[np.ndarray]:
    sizes = {"q": (2, 6, 4, 8), "k": (2, 7, 2, 8), "v": (2, 7, 2, 8), **shapes}
    return [np.zeros(sizes[name], dtype) for name in "qkv"]


SHAPES = [
    ({"q": (8,)}, "q must have 2, 3 or 4 axes"),
    ({"k": (7, 2, 8)}, "k must have as many axes as q (4)"),
    ({"k": (3, 7, 2, 8)}, "k.shape[0] must equal q.shape[0] = 2, got 3"),
    ({"v": (3, 7, 2, 8)}, "v.shape[0] must equal q.shape[0] = 2, got 3"),
    ({"k": (2, 7, 2, 9)}, "k.shape[3] must equal q.shape[3] = 8, got 9"),
    ({"v": (2, 6, 2, 8)}, "v.shape[1] must equal k.shape[1] = 7, got 6"),
    ({"v": (2, 7, 4, 8)}, "v.shape[2] must equal k.shape[2] = 2, got 4"),
    ({"q": (2, 6, 3, 8)}, "must be a multiple of k.shape[2] = 2, got 3"),
    ({"k": (2, 7, 0, 8), "v": (2, 7, 0, 8)}, "must be a multiple of k.shape[2] = 0, got 4"),
    ({"q": (2, 6, 4, 0), "k": (2, 7, 2, 0)}, "q.shape[3] (head_dim) must be at least 1, got 0"),
    ({"v": (2, 7, 2, 0)}, "v.shape[3] (head_dim) must be at least 1, got 0"),
]


@pytest.mark.parametrize(("shapes", "message"), SHAPES)
def test_shapes(shapes: dict[str, tuple[int, ...]], message: str) -> None:
    with pytest.raises(ValueError) as error:
        cuflash.attention(*arrays(**shapes))
    assert message in str(error.value)


OPTIONS = [
    ({"causal": "upper"}, ValueError, "'bottom-right' (as True) or 'top-left'"),
    ({"causal": 1}, TypeError, "causal must be True or False, got 1"),
    ({"window": -1}, ValueError, "must not be negative (None is unlimited)"),
    ({"window": (3, -1)}, ValueError, "must not be negative (None is unlimited)"),
    ({"window": (1, 2, 3)}, TypeError, "a pair (left, right)"),
    ({"window": 2.5}, TypeError, "a pair (left, right)"),
    ({"window": (True, 1)}, TypeError, "window counts keys"),
    ({"scale": math.inf}, ValueError, "scale must be finite"),
    ({"scale": math.nan}, ValueError, "scale must be finite"),
    ({"scale": "1"}, TypeError, "scale must be a number or None"),
    ({"scale": True}, TypeError, "scale must be a number or None"),
    ({"layout": "bsdh"}, ValueError, "layout must be one of bshd, bhsd, sbhd"),
    ({"deterministic": "yes"}, TypeError, "deterministic must be True or False"),
    ({"mask": lambda b, h, q, k: q >= k}, TypeError, "wrap the function, cuflash.Mask(function)"),
    ({"mask": 3}, TypeError, "mask must be a cuflash mask or a bool array, got int"),
    ({"mask": np.zeros((6, 7), np.float32)}, TypeError, "an additive array of scores is a bias"),
    ({"mask": np.zeros((6, 7), int)}, TypeError, "mask != 0"),
    ({"mask": np.zeros((7, 6), bool)}, ValueError, "must broadcast to (batch, heads_q, seqlen_q"),
    ({"mask": np.zeros((1, 2, 4, 6, 7), bool)}, ValueError, "must broadcast to"),
]


@pytest.mark.parametrize(("options", "kind", "message"), OPTIONS)
def test_options(options: dict[str, Any], kind: type[Exception], message: str) -> None:
    with pytest.raises(kind) as error:
        cuflash.attention(*arrays(), **options)
    assert message in str(error.value)


def test_an_equal_option_of_another_type_is_no_old_acquaintance() -> None:
    """Calls are found again by their options, and True == 1."""
    cuflash.attention(*arrays(), window=(1, 1), causal=True)
    with pytest.raises(TypeError, match="window counts keys"):
        cuflash.attention(*arrays(), window=(True, 1), causal=True)
    with pytest.raises(TypeError, match="causal must be True or False"):
        cuflash.attention(*arrays(), window=(1, 1), causal=1)


def test_dtypes() -> None:
    q, k, v = arrays()
    with pytest.raises(TypeError, match=r"v.dtype must equal q.dtype = float32, got float64"):
        cuflash.attention(q, k, v.astype(np.float64))
    with pytest.raises(TypeError, match=r"q.dtype must be one of float16, bfloat16.*got int64"):
        cuflash.attention(*arrays(np.int64))
    with pytest.raises(TypeError, match="complex64"):
        cuflash.attention(*arrays(np.complex64))
    with pytest.raises(TypeError, match="q must be an array"):
        cuflash.attention([[1.0]], k, v)


ids = np.zeros(7, int)
held = {"ids": ids}
MASKS = [
    (lambda b, h, q, k: q > k and k > 2, TypeError, "use & | ~ for `and`"),
    (lambda b, h, q, k: 0 <= q - k <= 2, TypeError, "chained comparisons"),
    (lambda b, h, q, k: k if q > k else q, TypeError, "cuflash.where for `if`"),
    (lambda b, h, q, k: q - k, TypeError, "mask must return a condition"),
    (lambda b, h, q, k: None, TypeError, "mask must return an expression"),
    (lambda b, h, q, k: ids[q + 6] == 1, ValueError, "Clip it with cuflash.minimum"),
    (lambda b, h, q, k: ids[q - 3] == 1, ValueError, "can leave axis 0: it spans [-2, 3]"),
    (lambda b, h, q, k: ids[q, k] == 1, TypeError, "takes 1 indices"),
    (lambda b, h, q, k: ids[q / 2] == 1, TypeError, "must be an integer, got real"),
    (lambda b, h, q, k: ids == q, TypeError, "without an index"),
    (lambda b, h, q, k: held["ids"][q] == 1, TypeError, "cuflash.captured(array)"),
    (lambda b, h, q, k: q // 0 == k, ValueError, "floor_divide by 0"),
    (lambda b, h, q, k: q // 2.0 == k, TypeError, "is for integers, got real"),
    (lambda b, h, q, k: q & k, TypeError, "takes conditions"),
    (lambda b, h, q, k: "q" == k, TypeError, "a str has no meaning in an expression"),
    (lambda b, h, q, k: q**0 == k, TypeError, "an integer from 1 to 8"),
    (lambda b, h, q, k: np.gcd(q, k) == 1, TypeError, "numpy.gcd has no meaning"),
    (lambda b, h, q, k: np.clip(q, 0, 2) == k, TypeError, "numpy.clip has no meaning"),
    (lambda b, h, q, k: q < 2**70, ValueError, "must fit 64 bits"),
]


@pytest.mark.parametrize(("function", "kind", "message"), MASKS)
def test_expressions(function: Any, kind: type[Exception], message: str) -> None:
    with pytest.raises(kind) as error:
        cuflash.attention(*arrays(), mask=cuflash.Mask(function))
    assert message in str(error.value)


def test_masks_and_captured_arrays() -> None:
    for bad in (lambda: cuflash.Mask(3), lambda: cuflash.Causal() & np.ones(3, bool)):
        with pytest.raises(TypeError):
            bad()
    with pytest.raises(TypeError, match="combine masks with"):
        bool(cuflash.Causal())
    with pytest.raises(ValueError, match="left must not be negative"):
        cuflash.SlidingWindow(-1, 2)
    with pytest.raises(TypeError, match="right must be an integer or None"):
        cuflash.SlidingWindow(1, 2.0)
    with pytest.raises(TypeError, match="captured\\(\\) takes an array, got list"):
        cuflash.captured([1, 2])
    with pytest.raises(TypeError, match="dtype complex128 cannot be captured"):
        cuflash.captured(np.zeros(3, complex))
    with (
        pytest.raises(ValueError, match="family must be one of sm90, simt"),
        cuflash.using(family="x"),
    ):
        pass


BACKWARD = [
    ({"do": np.zeros((2, 6, 4, 9), np.float32)}, ValueError, "do.shape must be (2, 6, 4, 8)"),
    ({"o": np.zeros((2, 6, 4, 9), np.float32)}, ValueError, "o.shape must be (2, 6, 4, 8)"),
    ({"o": np.zeros((2, 6, 4, 8))}, TypeError, "o.dtype must be q.dtype = float32, got float64"),
    ({"lse": np.zeros((2, 6, 4), np.float32)}, ValueError, "lse.shape must be (2, 4, 6)"),
    ({"lse": np.zeros((2, 4, 6))}, TypeError, "lse.dtype must be float32"),
    ({"do": np.zeros((2, 6, 4, 8), int)}, TypeError, "do.dtype must be one of float16"),
    ({"dlse": np.zeros((2, 4), np.float32)}, ValueError, "dlse.shape must be (2, 4, 6)"),
    ({"dlse": np.zeros((2, 4, 6), int)}, TypeError, "dlse.dtype must be one of float16"),
]


@pytest.mark.parametrize(("wrong", "kind", "message"), BACKWARD)
def test_backward(wrong: dict[str, Any], kind: type[Exception], message: str) -> None:
    q, k, v = arrays()
    right = {"do": q, "o": q, "lse": np.zeros((2, 4, 6), np.float32), **wrong}
    with pytest.raises(kind) as error:
        cuflash.attention_backward(
            right["do"], q, k, v, right["o"], right["lse"], dlse=right.get("dlse")
        )
    assert message in str(error.value)
