"""A repeated call hands the kernels what the first one did, but for addresses; needs no GPU.

NumPy memory is taken for that of a Hopper GPU whose kernels only note their argument.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest

import cuflash
from cuflash import arrays, repeat
from cuflash.arrays import Library, View
from cuflash.arrays.base import device
from cuflash.gpu import launch, module, tensor_map


class OnGpu(np.ndarray):
    """An array that says it is on a GPU."""


def on_gpu(shape: tuple[int, ...], dtype: str = "float16") -> OnGpu:
    buffer = np.zeros(int(np.prod(shape)) * np.dtype(dtype).itemsize + 64, np.uint8)
    start = -buffer.ctypes.data % 64
    flat = buffer[start : start + int(np.prod(shape)) * np.dtype(dtype).itemsize].view(dtype)
    return flat.reshape(shape).view(OnGpu)


class Fake(Library):
    """The library of these arrays."""

    name = "fake"

    def view(self, array: Any, argument: str) -> View:
        steps = tuple(step // array.itemsize for step in array.strides)
        place = device("cuda", 0)
        return View(array.ctypes.data, array.shape, steps, array.dtype.name, place, None, array)

    def signature(self, array: Any) -> Any:
        return array.shape, array.strides, array.dtype, self.pointer(array) & 15

    def pointer(self, array: Any) -> int:
        return array.ctypes.data

    def stream(self, device: Any) -> int:
        return 7

    def empty(self, shape: tuple[int, ...], dtype: str, device: Any) -> Any:
        return on_gpu(shape, dtype)


class Block:
    """The memory that kernels read their argument from."""

    def __init__(self) -> None:
        self.bytes, self.args = memoryview(bytearray(4096)), ()


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[bytes]]:
    """The arguments of all launches, as they happen."""
    noted: list[bytes] = []
    block = Block()

    def note(*_: Any) -> None:
        noted.append(bytes(block.bytes))
        block.bytes[:] = bytes(4096)  # nothing is left of a longer argument

    def encode(to: Any, kind: int, rank: int, pointer: Any, *_: Any) -> int:
        address = to.value
        for i, byte in enumerate(struct.pack("<q", pointer.value)):
            _write(address + i, byte)
        return 0

    monkeypatch.setitem(arrays._known, OnGpu, Fake())
    monkeypatch.setattr(module, "device_limits", lambda index: (90, 232448))
    monkeypatch.setattr(module, "multiprocessors", lambda index: 132)
    monkeypatch.setattr(launch, "on_device", lambda index: nullcontext())
    monkeypatch.setattr(launch, "_refuse_capture", lambda stream: None)
    monkeypatch.setattr(launch, "_block", lambda: block)
    monkeypatch.setattr(launch.Launch, "_load", lambda self: [(note, (1,), (128,), 0)])
    monkeypatch.setattr(tensor_map, "_encode", lambda: encode)
    monkeypatch.setattr(tensor_map, "_maps", {})
    monkeypatch.setattr(repeat, "_repeats", {})
    yield noted


def _write(address: int, byte: int) -> None:
    import ctypes

    ctypes.c_ubyte.from_address(address).value = byte


OPTIONS: dict[str, dict[str, Any]] = {
    "none": {},
    "causal": {"causal": True},
    "window": {"window": (9, None), "layout": "bhsd"},
    "softcap": {"softcap": 4.0, "scale": 0.3},
}


def words(argument: bytes, replaced: dict[int, str]) -> list[Any]:
    """An argument as numbers, addresses by the name of what lies there."""
    numbers = struct.unpack("<512q", argument)
    return [replaced.get(number, number) for number in numbers]


@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_the_argument_is_the_same(
    options: dict[str, Any], dtype: str, launched: list[bytes]
) -> None:
    made: list[tuple[dict[int, str], int]] = []
    for _ in range(3):
        q, k, v = (on_gpu((3, 80, 4, 64), dtype) for _ in range(3))
        o, lse = cuflash.attention(q, k, v, return_lse=True, **options)
        names = {a.ctypes.data: n for n, a in zip(("q", "k", "v", "o", "lse"), (q, k, v, o, lse))}
        made.append((names, len(launched) - 1))
        do, dlse = on_gpu(o.shape, dtype), on_gpu(lse.shape, "float32")
        got = cuflash.attention_backward(do, q, k, v, o, lse, dlse=dlse, **options)
        gradients = {a.ctypes.data: n for n, a in zip(("dq", "dk", "dv"), got)}
        more = {do.ctypes.data: "do", dlse.ctypes.data: "dlse"}
        made.append((names | gradients | more, len(launched) - 1))
    assert len(launched) == 6 and len(repeat._repeats) == 2
    arguments = [words(launched[at], names) for names, at in made]
    new = ("launch", "turns", "delta", "lse2", "dq_sums")  # a number, and what a call allocates
    for maps, calls in ((3, arguments[0::2]), (4, arguments[1::2])):
        head = 128 * maps if dtype == "float16" else 0
        allowed = {(head + launch.offset_of(name)) // 8 for name in new}
        for other in calls[1:]:
            different = {i for i, (a, b) in enumerate(zip(calls[0], other)) if a != b}
            assert different <= allowed


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_a_first_call_allocates_no_more_than_a_later_one(
    dtype: str, launched: list[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[tuple[Any, ...]] = []

    def empty(self: Fake, *what: Any) -> Any:
        made.append(what)
        return on_gpu(*what[:2])

    monkeypatch.setattr(Fake, "empty", empty)
    q = on_gpu((3, 80, 4, 64), dtype)
    by_call = []
    for _ in range(2):
        o, lse = cuflash.attention(q, q, q, return_lse=True)
        cuflash.attention_backward(q, q, q, q, o, lse)
        by_call.append(made[:])
        made.clear()
    assert len(repeat._repeats) == 2 and len(by_call[0]) > 5  # o, lse, dq, dk, dv, workspaces
    assert by_call[0] == by_call[1]


def test_what_is_known_apart(launched: list[bytes]) -> None:
    q = on_gpu((1, 64, 2, 64))
    for other in (
        q,
        q[:, ::2],
        on_gpu((1, 64, 2, 72))[..., 4:68],
        on_gpu((1, 64, 2, 64), "float32"),
    ):
        for causal in (False, True, "top-left"):
            for _ in range(2):
                cuflash.attention(other, other, other, causal=causal)
    assert len(repeat._repeats) == 12 and len(launched) == 24


def test_what_is_read_anew(launched: list[bytes]) -> None:
    q = on_gpu((1, 64, 2, 64))
    for options in (
        {"mask": cuflash.Causal()},
        {"bias": on_gpu((64, 64), "float32")},
        {"score": cuflash.Softcap(3.0)},
        {"sink": on_gpu((2,), "float32")},
        {"positions": np.arange(64)},
    ):
        if "positions" not in options:
            cuflash.attention(q, q, q, **options)
    assert not repeat._repeats
    cuflash.attention(q, q, q, causal=True)
    for wrong in ({"causal": 1}, {"causal": [True]}, {"scale": True}, {"window": (True, 1)}):
        with pytest.raises((TypeError, ValueError)):
            cuflash.attention(q, q, q, **wrong)


def test_forced_families_are_known_apart(launched: list[bytes]) -> None:
    q = on_gpu((1, 64, 2, 64))
    for family in ("sm90", "simt", "sm90"):
        with cuflash.using(family=family):
            cuflash.attention(q, q, q)
    first, second, third = (launched[i][: 8 * 48] for i in range(3))
    assert first == third != second
