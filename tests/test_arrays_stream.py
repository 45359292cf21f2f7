"""Streams, lifetime and copies of arrays on a GPU, on a pretended CUDA runtime: no GPU needed."""

import ctypes
import types

import fake_dlpack
import numpy as np
import pytest

from cuflash import arrays
from cuflash.arrays import captured, dlpack
from cuflash.arrays import cupy as cupy_row

CUDA = arrays.device("cuda", 0)


class Runtime:
    """A CUDA runtime whose device memory is host memory; says what it was asked."""

    def __init__(self):
        self.device, self.capturing, self.stream = 0, False, 0
        self.done: set[int] = set()  # events that have passed
        self.log: list[tuple] = []

    def getDevice(self):
        return self.device

    def streamIsCapturing(self, stream):
        return self.capturing

    def eventRecord(self, event, stream):
        self.log.append(("record", event, stream))

    def memcpyAsync(self, target, source, size, kind, stream):
        self.log.append(("copy", size, kind, stream))
        ctypes.memmove(target, source, size)

    def deviceSynchronize(self):
        self.log.append(("synchronize",))


@pytest.fixture
def runtime(monkeypatch):
    runtime = Runtime()
    count = iter(range(10**6))

    class Event:
        def __init__(self, disable_timing):
            self.ptr = next(count)

        @property
        def done(self):
            return self.ptr in runtime.done

    class Context:
        def __init__(self, index):
            self.index = index

        def __enter__(self):
            self.before, runtime.device = runtime.device, self.index

        def __exit__(self, *error):
            runtime.device = self.before

    cuda = types.SimpleNamespace(
        runtime=runtime,
        Event=Event,
        Device=Context,
        get_current_stream=lambda index: types.SimpleNamespace(ptr=runtime.stream),
    )
    fake = types.SimpleNamespace(cuda=cuda)
    monkeypatch.setattr(cupy_row, "load_cupy", lambda: fake)
    monkeypatch.setattr(dlpack, "_held", type(dlpack._held)())
    monkeypatch.setattr(captured, "_copies", captured.HostCache())
    return runtime


class OnDevice(arrays.Library):
    """A library whose arrays are NumPy's, said to lie on the GPU; its stream is 77."""

    name = "fake"

    def view(self, array, argument):
        view = arrays.library_named("numpy").view(array, argument)
        return arrays.View(
            view.pointer, view.shape, view.strides, view.dtype, CUDA, None, view.owner
        )

    def stream(self, device):
        return 77

    def empty(self, shape, dtype, device):
        return np.empty(shape, dtype)


def gpu_array(**odd):
    return fake_dlpack.Array(np.arange(6.0), device=fake_dlpack.CUDA, **odd)


@pytest.mark.parametrize("stream, asked", [(0, 1), (1234, 1234)])
def test_producer_orders_itself_on_the_stream_that_reads(runtime, stream, asked):
    array = gpu_array()
    runtime.stream = stream
    view = dlpack.read(array, "q", None)
    assert array.exports[-1]["stream"] == asked and view.device is CUDA and view.host is None
    dlpack.read(array, "q", 99)
    assert array.exports[-1]["stream"] == 99


def test_producers_device_is_current_only_while_it_exports(runtime):  # FAULTS 80
    seen = []

    class Watching(fake_dlpack.Array):
        def __dlpack__(self, **keywords):
            seen.append(runtime.device)
            return super().__dlpack__(**keywords)

    array = Watching(np.arange(6.0), device=fake_dlpack.CUDA_MANAGED, index=3)
    assert dlpack.read(array, "q", None).device is arrays.device("cuda", 3)
    assert seen == [3] and runtime.device == 0


def test_no_wait_under_graph_capture(runtime):  # FAULTS 74
    array = gpu_array()
    runtime.capturing = True
    view = dlpack.read(array, "q", 5)
    assert array.exports[-1]["stream"] == -1
    del view
    assert not runtime.log and not dlpack._held


def test_borrowed_memory_waits_for_our_stream(runtime):
    array = gpu_array()
    before = fake_dlpack.freed
    view = dlpack.read(array, "q", 5)
    turned = view.with_axes((0,))
    del view
    assert not runtime.log
    del turned
    ((_, event, stream),) = runtime.log
    assert stream == 5 and fake_dlpack.freed == before
    dlpack.read(gpu_array(), "q", 5)
    assert fake_dlpack.freed == before  # not passed yet
    runtime.done.update(range(event + 5))
    dlpack.read(gpu_array(), "q", 5)
    assert fake_dlpack.freed == before + 2 and len(dlpack._held) == 1


def test_mixed_devices_name_both_arguments(runtime):  # FAULTS 75
    host = fake_dlpack.Array(np.arange(6.0))
    other = fake_dlpack.Array(np.arange(6.0), device=fake_dlpack.CUDA, index=1)
    with pytest.raises(ValueError, match=r"but q is on cuda:0 and v on cuda:1; move one"):
        arrays.take({"q": gpu_array(), "k": gpu_array(), "v": other})
    with pytest.raises(ValueError, match=r"but q is on cuda:0 and k on cpu; move one"):
        arrays.take({"q": gpu_array(), "k": host})


def test_captured_array_on_the_device_is_read_in_place(runtime):
    array = gpu_array()
    view = arrays.capture(array, "ids", CUDA, OnDevice())
    assert view.pointer == array.memory.ctypes.data
    assert [keywords["stream"] for keywords in array.exports] == [77]


def test_captured_array_elsewhere_is_an_error(runtime):
    other = fake_dlpack.Array(np.arange(6.0), device=fake_dlpack.CUDA, index=1)
    with pytest.raises(ValueError, match="ids is on cuda:1, but q, k and v are on cuda:0; copy it"):
        arrays.capture(other, "ids", CUDA, OnDevice())
    numpy_row = arrays.library_named("numpy")
    with pytest.raises(ValueError, match="ids is on cuda:1, but q, k and v are on cpu; copy it to"):
        arrays.capture(other, "ids", arrays.CPU, numpy_row)


def test_captured_host_array_is_copied_once(runtime):
    ids, library = np.arange(12)[::-2], OnDevice()
    view = arrays.capture(ids, "ids", CUDA, library)
    assert view.device is CUDA and view.strides == (1,) and view.dtype == "int64"
    np.testing.assert_array_equal(view.owner, ids)
    assert runtime.log == [("copy", 48, 1, 77), ("synchronize",)]
    ids[0] = 99  # later changes in place are not seen, as documented
    assert arrays.capture(ids, "ids", CUDA, library) is view and len(runtime.log) == 2
    np.testing.assert_array_equal(arrays.capture(ids[:3], "ids", CUDA, library).owner, ids[:3])
    assert len(runtime.log) == 4 and len(captured._copies._made) == 1


def test_copies_of_dead_host_arrays_stay_until_the_device_has_waited(runtime):
    library, cache = OnDevice(), captured._copies
    for turn in range(5):
        arrays.capture(np.full(3, turn), "ids", CUDA, library)
        assert len(cache._made) == 0 and len(cache.ended) == 1  # flat, whatever the turn


def test_copy_under_graph_capture_is_refused(runtime):
    ids, library = np.arange(3), OnDevice()
    runtime.capturing = True
    with pytest.raises(ValueError, match=r"ids is in host memory .*call once before the capture"):
        arrays.capture(ids, "ids", CUDA, library)
    runtime.capturing = False
    view = arrays.capture(ids, "ids", CUDA, library)
    runtime.capturing = True
    assert arrays.capture(ids, "ids", CUDA, library) is view


def test_missing_cupy_says_what_to_install(monkeypatch):
    import sys

    monkeypatch.setitem(sys.modules, "cupy", None)
    with pytest.raises(ImportError, match=r"pip install 'cuflash\[cuda13\]'"):
        cupy_row.load_cupy()
