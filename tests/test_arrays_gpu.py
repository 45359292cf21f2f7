"""Arrays of every library on a GPU through the public calls: no copies, streams, memory.

Longer than other files: each rule is asked of each library, and all share the makers below.
"""

import gc
import os
import sys
import threading

# Before JAX starts: it would take three quarters of the GPU's memory for itself.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

import fake_dlpack
import numpy as np
import pytest

import cuflash
from cuflash import arrays, call

pytestmark = pytest.mark.gpu

SHAPE = (2, 33, 3, 16)
KINDS = ("cupy", "torch", "jax", "dlpack")
SPIN = r"""
extern "C" __global__ void spin(long long cycles) {
    long long start = clock64();
    while (clock64() - start < cycles) {}
}
"""


class Only:
    """A CuPy array behind nothing but DLPack."""

    def __init__(self, array):
        self.array, self.asked = array, []

    def __dlpack__(self, **keywords):
        self.asked.append(keywords.get("stream"))
        return self.array.__dlpack__(**keywords)

    def __dlpack_device__(self):
        return self.array.__dlpack_device__()


def make(kind, array):
    """This NumPy array on the GPU, of this library."""
    if kind in ("cupy", "dlpack"):
        cupy = pytest.importorskip("cupy")
        array = cupy.asarray(array)
        return Only(array) if kind == "dlpack" else array
    if kind == "torch":
        torch = pytest.importorskip("torch")
        if array.dtype.name == "bfloat16":
            return torch.as_tensor(array.astype("f4"), device="cuda").bfloat16()
        return torch.as_tensor(array, device="cuda")
    jax = pytest.importorskip("jax")
    return jax.device_put(array, gpu(jax))


def gpu(jax):
    try:
        return jax.devices("cuda")[0]
    except RuntimeError:
        pytest.skip("this JAX has no CUDA platform")


def to_numpy(array):
    module = type(array).__module__.partition(".")[0]
    if module == "cupy":
        return array.get().astype("f8")
    if module == "torch":
        return array.double().cpu().numpy()
    return np.asarray(array).astype("f8")


def pointer(array):
    if isinstance(array, Only):
        array = array.array
    module = type(array).__module__.partition(".")[0]
    if module == "cupy":
        return array.data.ptr
    return array.data_ptr() if module == "torch" else array.unsafe_buffer_pointer()


@pytest.fixture
def spy(monkeypatch):
    """What reaches the kernels: (inputs, outputs, stream) of each pass."""
    seen = []
    run = call.Pass.__call__

    def wrapped(self, inputs, outputs, stream):
        seen.append((list(inputs), list(outputs), stream))
        return run(self, inputs, outputs, stream)

    monkeypatch.setattr(call.Pass, "__call__", wrapped)
    return seen


@pytest.fixture
def host(rng):
    return [rng.standard_normal(SHAPE).astype("f4") for _ in range(3)]


def close(got, want, tolerance=2e-5):
    np.testing.assert_allclose(to_numpy(got), np.asarray(want, "f8"), rtol=0, atol=tolerance)


# ---- same memory in, same kind out


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
@pytest.mark.parametrize("kind", KINDS)
def test_no_copy_either_way(kind, dtype, host, spy):
    if kind == "jax" and dtype == "float64":
        pytest.skip("JAX has no float64 unless it is switched on")
    host = [x.astype(arrays.numpy_dtype(dtype)) for x in host]
    q, k, v = (make(kind, x) for x in host)
    o, lse = cuflash.attention(q, k, v, causal=True, return_lse=True)
    close(o, cuflash.attention(*(x.astype("f8") for x in host), causal=True), 2e-2)
    inputs, outputs, _ = spy[0]
    assert [view.pointer for view in inputs] == [pointer(x) for x in (q, k, v)]
    assert [view.pointer for view in outputs[:2]] == [pointer(o), pointer(lse)]
    wanted = make("cupy" if kind == "dlpack" else kind, host[0])
    assert type(o) is type(wanted) and o.dtype == wanted.dtype and tuple(o.shape) == SHAPE
    assert str(lse.dtype).endswith("float64" if dtype == "float64" else "float32")
    assert inputs[0].device is outputs[0].device is arrays.device("cuda", 0)


@pytest.mark.parametrize("kind", KINDS)
def test_backward(kind, host, spy):
    q, k, v = (make(kind, x) for x in host)
    o, lse = cuflash.attention(q, k, v, causal=True, return_lse=True)
    do = make(kind, host[0])
    if kind == "dlpack":
        o, lse = Only(o), Only(lse)
    grads = cuflash.attention_backward(do, q, k, v, o, lse, causal=True)
    o_host, lse_host = cuflash.attention(*host, causal=True, return_lse=True)
    wanted = cuflash.attention_backward(host[0], *host, o_host, lse_host, causal=True)
    for got, want, view in zip(grads, wanted, spy[1][1]):
        close(got, want, 1e-4)
        assert view.pointer == pointer(got)
    assert len({pointer(x) for x in grads}) == 3


STRIDED = {
    "transposed": lambda x: x.transpose(0, 2, 1, 3)[:, :, ::2].transpose(0, 2, 1, 3),
    "heads sliced": lambda x: x[:, :, 1:],
    "misaligned": lambda x: x[..., 1:],
    "one token": lambda x: x[:, :1],
    "repeated": None,
    "negative": lambda x: x[:, ::-1],
}


@pytest.mark.parametrize("variant", STRIDED)
@pytest.mark.parametrize("kind", ["cupy", "torch", "dlpack"])
def test_strides_are_read_in_place(kind, variant, host, spy):
    if variant == "negative" and kind == "torch":
        pytest.skip("torch has no negative strides")

    def change(x):
        if variant == "repeated":
            return x[:, :1].expand(SHAPE) if kind == "torch" else np.broadcast_to(x[:, :1], SHAPE)
        if kind == "torch" and variant == "transposed":
            return x.transpose(1, 2)[:, :, ::2].transpose(1, 2)
        return STRIDED[variant](x)

    wanted_change = change
    if variant == "repeated":
        wanted_change = lambda x: np.broadcast_to(x[:, :1], SHAPE)  # noqa: E731
    elif kind == "torch":
        wanted_change = STRIDED[variant]
    given = [change(make("cupy" if kind == "dlpack" else kind, x)) for x in host]
    o = cuflash.attention(*(Only(x) for x in given) if kind == "dlpack" else given)
    close(o, cuflash.attention(*(wanted_change(x) for x in host)))
    assert [view.pointer for view in spy[0][0]] == [pointer(x) for x in given]


def test_dlpack_gives_back_through_the_producers_module(host, spy):
    torch = pytest.importorskip("torch")
    fake_dlpack.module("fakelib_gpu", torch.from_dlpack)
    try:
        kind = type("Array", (Only,), {"__module__": "fakelib_gpu"})
        q, k, v = (kind(make("cupy", x)) for x in host)
        o = cuflash.attention(q, k, v)
        assert isinstance(o, torch.Tensor) and o.data_ptr() == spy[0][1][0].pointer
        close(o, cuflash.attention(*host))
    finally:
        sys.modules.pop("fakelib_gpu", None)


# ---- streams


def on_new_stream(kind):
    """A non-blocking stream: (raw pointer, context, function that keeps it busy for ~50 ms)."""
    import cupy

    if kind == "torch":
        torch = pytest.importorskip("torch")
        stream = torch.cuda.Stream()
        return stream.cuda_stream, torch.cuda.stream(stream), lambda: torch.cuda._sleep(10**8)
    stream = cupy.cuda.Stream(non_blocking=True)
    spin = cupy.RawKernel(SPIN, "spin")
    spin.compile()
    return stream.ptr, stream, lambda: spin((1,), (1,), (np.int64(10**8),))


@pytest.mark.parametrize("kind", ["cupy", "torch", "dlpack"])
def test_every_kernel_is_on_the_callers_stream(kind, host, spy):  # FAULTS 81
    raw, context, delay = on_new_stream(kind)
    late = [make("cupy" if kind == "dlpack" else kind, x) for x in host]
    early = [x * 0 for x in late]
    wrap = Only if kind == "dlpack" else lambda x: x
    cuflash.warmup(*(wrap(x) for x in early), causal=True, backward=True)
    synchronize()
    with context:
        delay()
        for x, y in zip(early, late):
            x[...] = y
        q, k, v = (wrap(x) for x in early)
        o, lse = cuflash.attention(q, k, v, causal=True, return_lse=True)
        grads = cuflash.attention_backward(q, q, k, v, wrap(o), wrap(lse), causal=True)
    synchronize()
    assert [stream for *_, stream in spy] == [raw, raw]
    o_host, lse_host = cuflash.attention(*host, causal=True, return_lse=True)
    close(o, o_host)
    wanted = cuflash.attention_backward(host[0], *host, o_host, lse_host, causal=True)
    for got, want in zip(grads, wanted):
        close(got, want, 1e-4)
    if kind == "dlpack":
        assert set(q.asked) == {raw}


def synchronize():
    import cupy

    cupy.cuda.runtime.deviceSynchronize()


@pytest.mark.parametrize("kind", ["cupy", "torch"])
def test_threads_with_streams_of_their_own(kind, host):  # FAULTS 90
    wanted = cuflash.attention(*host)
    failures = []

    def work(turn):
        try:
            _, context, _ = on_new_stream(kind)
            with context:
                q, k, v = (make(kind, x) for x in host)
                for _ in range(20):
                    o = cuflash.attention(q * (turn + 1) / (turn + 1), k, v)
                close(o, wanted)
        except Exception as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(turn,)) for turn in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


@pytest.mark.parametrize("ids_on", ["none", "torch", "cupy"])
def test_torch_graph_capture(ids_on, host):  # FAULTS 74
    torch = pytest.importorskip("torch")
    q, k, v = (make("torch", x) for x in host)
    ids = np.arange(SHAPE[1]) // 10
    options = {}
    if ids_on != "none":
        held = make(ids_on, ids)
        options = {"mask": cuflash.Mask(lambda b, h, q, k: held[q] == held[k])}
        host_mask = {"mask": cuflash.Mask(lambda b, h, q, k: ids[q] == ids[k])}
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        cuflash.attention(q, k, v, **options)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        o = cuflash.attention(q, k, v, **options)
    q.copy_(k)
    graph.replay()
    torch.cuda.synchronize()
    close(o, cuflash.attention(host[1], *host[1:], **(host_mask if options else {})))


# ---- devices


@pytest.mark.parametrize("kind", ["cupy", "torch"])
def test_current_device_is_unchanged(kind, host):  # FAULTS 80
    import cupy

    here = cupy.cuda.runtime.getDevice()
    given = [make(kind, x) for x in host]
    cuflash.attention(*given)
    assert cupy.cuda.runtime.getDevice() == here
    if cupy.cuda.runtime.getDeviceCount() < 2:
        pytest.skip("one GPU only: the other half needs two")
    other = 1 - here
    if kind == "torch":
        moved = [x.to(f"cuda:{other}") for x in given]
    else:
        with cupy.cuda.Device(other):
            moved = [cupy.asarray(x) for x in host]
    o = cuflash.attention(*moved)
    assert cupy.cuda.runtime.getDevice() == here
    assert (o.get_device() if kind == "torch" else o.device.id) == other
    close(o, cuflash.attention(*host))
    with pytest.raises(ValueError, match=f"q is on cuda:{here} and k on cuda:{other}"):
        cuflash.attention(given[0], *moved[1:])


def test_host_and_device_arrays_do_not_mix(host):  # FAULTS 75
    torch = pytest.importorskip("torch")
    q = torch.as_tensor(host[0])
    k = make("torch", host[1])
    with pytest.raises(ValueError, match="q is on cpu and k on cuda:0; move one of them"):
        cuflash.attention(q, k, k)
    with pytest.raises(TypeError, match="q is of NumPy and k of torch"):
        cuflash.attention(host[0], k, k)


def test_host_arrays_stay_on_the_host(host):
    torch = pytest.importorskip("torch")
    o = cuflash.attention(*(torch.as_tensor(x).pin_memory() for x in host))  # FAULTS 77
    assert o.device.type == "cpu"
    close(o, cuflash.attention(*host), 1e-6)


# ---- memory


@pytest.mark.parametrize("kind", KINDS)
def test_memory_is_flat(kind, host):  # FAULTS 76
    import cupy

    q, k, v = (make(kind, x) for x in host)

    def used():
        synchronize()
        if kind == "torch":
            return sys.modules["torch"].cuda.memory_allocated()
        if kind == "jax":
            return gpu(sys.modules["jax"]).memory_stats()["bytes_in_use"]
        return cupy.get_default_memory_pool().total_bytes()

    gc.collect()
    gc.disable()
    try:
        for turn in range(10_000):
            if turn == 1000:
                start = used()
            cuflash.attention(q, k, v)
        o_bytes = int(np.prod(SHAPE)) * 4
        assert used() - start <= 64 * o_bytes  # events of borrowed memory may lag a few calls
    finally:
        gc.enable()


@pytest.mark.parametrize("kind", KINDS)
def test_inputs_may_go_right_after_the_call(kind, host):
    wanted = cuflash.attention(*host)
    for _ in range(50):
        given = [make(kind, x) for x in host]
        o = cuflash.attention(*given)
        del given
        again = [make(kind, x * np.nan) for x in host]  # takes the memory that was let go
        close(o, wanted)
        del again


# ---- arrays that masks capture


@pytest.mark.parametrize("ids_kind", ["numpy", "cupy", "torch"])
@pytest.mark.parametrize("kind", ["cupy", "torch", "dlpack"])
def test_mask_captures_arrays_of_any_library(kind, ids_kind, host):
    ids = np.arange(SHAPE[1], dtype=np.int32) // 7
    held = ids if ids_kind == "numpy" else make(ids_kind, ids)
    mask = cuflash.Mask(lambda b, h, q, k: held[q] == held[k])
    o = cuflash.attention(*(make(kind, x) for x in host), mask=mask)
    close(o, cuflash.attention(*host, mask=cuflash.Mask(lambda b, h, q, k: ids[q] == ids[k])))


def test_device_arrays_of_masks_are_read_in_every_call(host):
    given = [make("cupy", x) for x in host]
    ids = make("cupy", np.zeros(SHAPE[1], np.int32))
    mask = cuflash.Mask(lambda b, h, q, k: ids[q] == ids[k])
    close(cuflash.attention(*given, mask=mask), cuflash.attention(*host))
    ids[20:] = 1
    new = ids.get()
    expected = cuflash.attention(*host, mask=cuflash.Mask(lambda b, h, q, k: new[q] == new[k]))
    close(cuflash.attention(*given, mask=mask), expected)


def test_device_mask_in_a_host_call_is_an_error(host):
    allowed = make("cupy", np.ones((SHAPE[1], SHAPE[1]), bool))
    with pytest.raises(ValueError, match="is on cuda:0, but q, k and v are on cpu; copy it to"):
        cuflash.attention(*host, mask=allowed)


# ---- torch autograd, JAX transformations


def test_torch_requires_grad(host):  # FAULTS 72
    torch = pytest.importorskip("torch")
    q, k, v = (make("torch", x) for x in host)
    q.requires_grad_()
    with pytest.raises(cuflash.Unsupported, match=r"q requires grad .*torch\.no_grad"):
        cuflash.attention(q, k, v)
    with torch.no_grad():
        close(cuflash.attention(q, k, v), cuflash.attention(*host))
    _, pullback = cuflash.attention_vjp(q, k, v)
    assert pullback(torch.ones_like(v)).dq.shape == q.shape


def test_jax_jit_grad_vmap_and_untouched_inputs(host):  # FAULTS 79
    jax = pytest.importorskip("jax")
    q, k, v = (make("jax", x) for x in host)
    close(jax.jit(lambda *x: cuflash.attention(*x, causal=True))(q, k, v),
          cuflash.attention(*host, causal=True))  # fmt: skip
    for x, y in zip((q, k, v), host):
        np.testing.assert_array_equal(np.asarray(x), y)
    for derived in (jax.grad(lambda q: cuflash.attention(q, k, v).sum()),):
        for run in (derived, jax.jit(derived)):
            with pytest.raises(cuflash.Unsupported, match="attention_vjp"):
                run(q)
    with pytest.raises(TypeError, match=r"jax\.vmap over cuflash"):
        jax.vmap(cuflash.attention)(*(x[:, None] for x in (q, k, v)))


@pytest.mark.parametrize("ids_kind", ["numpy", "jax"])
def test_jax_captured_ids(ids_kind, host):
    jax = pytest.importorskip("jax")
    ids = np.arange(SHAPE[1]) // 7
    held = ids if ids_kind == "numpy" else make("jax", ids.astype(np.int32))
    mask = cuflash.Mask(lambda b, h, q, k: held[q] == held[k])
    given = [make("jax", x) for x in host]
    expected = cuflash.attention(*host, mask=cuflash.Mask(lambda b, h, q, k: ids[q] == ids[k]))
    for run in (cuflash.attention, jax.jit(cuflash.attention, static_argnames=["mask"])):
        close(run(*given, mask=mask), expected)


def test_jax_chains_stay_ordered_on_xlas_stream(host):
    jax = pytest.importorskip("jax")
    q, k, v = (make("jax", x) for x in host)

    @jax.jit
    def chain(x):
        for _ in range(10):
            x = cuflash.attention(x + 1.0, k, v) * 2.0
        return x

    x = host[0]
    for _ in range(10):
        x = cuflash.attention(x + np.float32(1), *host[1:]) * np.float32(2)
    close(chain(q), x, 1e-4)


def test_jax_on_the_cpu_of_a_machine_with_a_gpu(host):
    jax = pytest.importorskip("jax")
    gpu(jax)
    cpu = jax.devices("cpu")[0]
    given = [jax.device_put(x, cpu) for x in host]
    for run in (cuflash.attention, jax.jit(cuflash.attention)):
        o = run(*given)
        assert o.devices() == {cpu}
        close(o, cuflash.attention(*host), 1e-6)
    with pytest.raises(ValueError, match="q is on cpu and k on cuda:0; move one"):
        cuflash.attention(given[0], *(make("jax", x) for x in host[1:]))
