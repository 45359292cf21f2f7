"""Arrays of every library in host memory: what they become, and what is refused.

Longer than other files: each library has its own oddities, and all share the makers below.
"""

import gc
import subprocess
import sys

import fake_dlpack
import numpy as np
import pytest

from cuflash import Unsupported, arrays
from cuflash.arrays import captured

SHAPE = (2, 5, 3, 4)


def look(array, argument="q"):
    return arrays.library_of(array, argument).view(array, argument)


def numbers(shape=SHAPE, dtype="float32"):
    return np.arange(np.prod(shape)).reshape(shape).astype(dtype)


def read_elements(view):
    """The values, by walking the raw memory with pointer and strides: nothing of NumPy's."""
    import ctypes

    size = arrays.numpy_dtype(view.dtype).itemsize
    values = np.empty(view.shape, arrays.numpy_dtype(view.dtype))
    for index in np.ndindex(view.shape):
        offset = sum(i * step for i, step in zip(index, view.strides)) * size
        raw = ctypes.string_at(view.pointer + offset, size)
        values[index] = np.frombuffer(raw, values.dtype)[0]
    return values


@pytest.fixture
def torch():
    return pytest.importorskip("torch")


@pytest.fixture
def jnp():
    return pytest.importorskip("jax.numpy")


# ---- NumPy


VARIANTS = {
    "plain": lambda x: x,
    "transposed": lambda x: x.transpose(0, 2, 1, 3),
    "sliced": lambda x: x[:, ::2],
    "negative": lambda x: x[:, ::-1, :, ::-1],
    "repeated": lambda x: np.broadcast_to(x[:, :1], x.shape),
    "one element": lambda x: x[:1, 2:3],
    "empty": lambda x: x[:, :0],
    "fortran": np.asfortranarray,
    "one axis": lambda x: x[0, 0, 0],
}


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64", "bool", "int64"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_numpy_is_read_in_place(variant, dtype):
    array = VARIANTS[variant](numbers(dtype=arrays.numpy_dtype(dtype)))
    view = look(array)
    assert (view.shape, view.dtype, view.device) == (array.shape, dtype, arrays.CPU)
    assert view.pointer == array.ctypes.data and view.host.ctypes.data == array.ctypes.data
    np.testing.assert_array_equal(view.host, array)
    np.testing.assert_array_equal(read_elements(view), array)


def test_numpy_read_only_misaligned_and_subclasses():
    array = numbers()
    array.flags.writeable = False
    assert look(array).pointer == array.ctypes.data
    raw = np.zeros(4 * 60 + 1, np.uint8)[1:].view(np.float32)  # FAULTS 62
    raw[...] = np.arange(60)
    assert not raw.flags.aligned
    view = look(raw.reshape(3, 20))
    assert view.pointer == raw.ctypes.data
    np.testing.assert_array_equal(read_elements(view), np.arange(60).reshape(3, 20))
    matrix = np.asmatrix([[1.0, 2.0]])
    assert type(look(matrix).host) is np.ndarray and look(matrix).pointer == matrix.ctypes.data


def test_numpy_strides_that_split_elements_are_copied_once():
    records = np.zeros((3, 4), np.dtype([("x", "f4"), ("tag", "u1")]))
    records["x"] = np.arange(12).reshape(3, 4)
    view = look(records["x"])
    assert view.strides == (4, 1) and view.pointer != records["x"].ctypes.data
    np.testing.assert_array_equal(read_elements(view), records["x"])


def test_stride_of_an_axis_of_one_element_says_nothing():
    array = np.lib.stride_tricks.as_strided(numbers(), (2, 1, 3, 1), (240, 7, 16, 12345))
    assert look(array).strides == (60, 0, 4, 1)
    torch = pytest.importorskip("torch")
    tensor = torch.zeros(100).as_strided((1, 5, 1, 4), (999, 4, 77, 1))
    assert look(tensor).strides == (0, 4, 0, 1)


@pytest.mark.parametrize(
    "array, message",
    [
        (np.float32(3), "q must be an array"),
        ([[1.0]], "q must be an array of NumPy, CuPy, PyTorch, JAX"),
        (None, "q must be an array"),
        (numbers().astype(">f4"), "byte order"),
        (numbers().astype(complex), "q has dtype complex128, which cuflash does not support"),
        (numbers().astype(object), "q has dtype object"),
        (np.zeros(3, "M8[s]"), "q has dtype datetime64"),
        (np.ma.masked_array(numbers(), False), "masked array"),
    ],
)
def test_numpy_refusals(array, message):
    with pytest.raises(TypeError, match=message):
        look(array)


def test_scalars_are_captured_but_not_attended(torch, jnp):
    for scalar in (np.array(3), torch.tensor(3), jnp.array(3), fake_dlpack.Array(np.array(3))):
        with pytest.raises(TypeError, match="q must be an array with at least 1 axis, got a 0-d"):
            arrays.take({"q": scalar})
        view = arrays.capture(scalar, "limit", arrays.CPU, arrays.library_named("numpy"))
        assert view.shape == view.strides == () and view.host.shape == () and view.host == 3


def test_float8_is_refused_by_name():
    ml_dtypes = pytest.importorskip("ml_dtypes")
    with pytest.raises(TypeError, match="q has dtype float8_e4m3fn, which cuflash does not supp"):
        look(np.zeros(3, ml_dtypes.float8_e4m3fn))
    torch = pytest.importorskip("torch")
    with pytest.raises(TypeError, match="q has dtype float8_e5m2, which cuflash does not support"):
        look(torch.zeros(3).to(torch.float8_e5m2))
    jnp = pytest.importorskip("jax.numpy")
    with pytest.raises(TypeError, match="q has dtype float8_e4m3fn, which cuflash does not supp"):
        look(jnp.zeros(3, jnp.float8_e4m3fn))


# ---- views


def test_views_follow_their_memory():
    array = numbers()
    view = look(array)
    turned = view.transpose((0, 2, 1, 3))
    np.testing.assert_array_equal(read_elements(turned), array.transpose(0, 2, 1, 3))
    np.testing.assert_array_equal(turned.host, array.transpose(0, 2, 1, 3))
    wider = look(array[0, :, 0]).with_axes((0, 2))
    assert wider.shape == (1, 5, 1, 4) == wider.host.shape
    np.testing.assert_array_equal(read_elements(wider), array[:1, :, :1])


# ---- torch


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64", "bool", "int64"])
def test_torch_is_read_in_place(torch, dtype):
    for tensor in (
        torch.arange(120).reshape(SHAPE).to(getattr(torch, dtype)),
        torch.arange(120).reshape(SHAPE).to(getattr(torch, dtype)).transpose(1, 2)[:, :, 1::2],
        torch.ones(2, 1, 3, 4).to(getattr(torch, dtype)).expand(SHAPE),
    ):
        view = look(tensor)
        assert (view.shape, view.strides, view.dtype) == (
            tuple(tensor.shape),
            tensor.stride(),
            dtype,
        )
        assert view.pointer == tensor.data_ptr() == view.host.ctypes.data
        np.testing.assert_array_equal(read_elements(view).astype(float), tensor.double().numpy())


def test_torch_subclasses_parameters_and_neg_bit(torch):
    class Mine(torch.Tensor):
        pass

    tensor = torch.randn(2, 3).as_subclass(Mine)
    assert look(tensor).pointer == tensor.data_ptr()
    weight = torch.nn.Parameter(torch.randn(2, 3))
    assert look(weight).host.shape == (2, 3)
    negative = torch.randn(2, 3, dtype=torch.complex64).conj().imag
    assert negative.is_neg()  # FAULTS 73
    np.testing.assert_array_equal(look(negative).host, negative.resolve_neg().numpy())


def test_torch_refusals(torch):
    cases = {
        "q is a sparse": torch.eye(3).to_sparse(),
        "q is a sparse .sparse_csr": torch.eye(3).to_sparse_csr(),
        "q is a quantized": torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8),
        "q is a meta tensor": torch.ones(3, device="meta"),
        "dtype complex64": torch.ones(3, dtype=torch.complex64).conj(),
        "q is a nested": torch.nested.nested_tensor([torch.ones(2, 3), torch.ones(4, 3)]),
    }
    for message, tensor in cases.items():
        with pytest.raises(TypeError, match=message):
            look(tensor)
    with pytest.raises(TypeError, match=r"inside torch.func"):
        torch.vmap(lambda x: look(x) and x)(torch.ones(3, 4))


def test_torch_autograd_is_refused_not_dropped(torch):  # FAULTS 72
    free, tracked = torch.randn(SHAPE), torch.randn(SHAPE, requires_grad=True)
    with pytest.raises(Unsupported, match=r"k requires grad .*torch.no_grad.*attention_vjp"):
        arrays.take({"q": free, "k": tracked})
    with torch.no_grad():
        arrays.take({"q": free, "k": tracked})
    arrays.take({"q": free, "k": tracked}, manual=True)
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(free, free)
        with torch.no_grad(), pytest.raises(Unsupported, match="q is a dual tensor"):
            arrays.take({"q": dual})
        arrays.take({"q": torch.randn(3)})
    with pytest.raises(Unsupported, match="q requires grad"):
        torch.func.grad(lambda x: arrays.take({"q": x}) and x.sum())(free)


# ---- any library with DLPack


@pytest.mark.parametrize("versioned", [True, False])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64", "bool", "uint8"])
def test_dlpack_is_read_in_place(dtype, versioned):
    memory = numbers(dtype=arrays.numpy_dtype(dtype))
    for odd in (
        {"memory": memory},
        {"memory": memory, "strides": "null"},  # FAULTS 78
        {"memory": memory, "read_only": True},  # FAULTS 67
        {"memory": memory, "device": fake_dlpack.CUDA_HOST},  # FAULTS 77
        {"memory": memory, "byte_offset": 16},
        {"memory": memory[:, ::-1]},  # FAULTS 69
        {"memory": memory.transpose(2, 0, 1, 3)},
        {"memory": memory[:, :0]},
    ):
        view = look(fake_dlpack.Array(**odd, versioned=versioned))
        assert (view.shape, view.dtype, view.device) == (odd["memory"].shape, dtype, arrays.CPU)
        assert not odd["memory"].size or view.pointer == odd["memory"].ctypes.data
        np.testing.assert_array_equal(view.host, odd["memory"])
        np.testing.assert_array_equal(read_elements(view), odd["memory"])
        assert not view.host.size or not view.host.flags.writeable


@pytest.mark.parametrize(
    "odd, error, message",
    [
        ({"code": fake_dlpack.FLOAT8_E4M3FN, "bits": 8}, TypeError, "dtype float8_e4m3fn, which"),
        ({"code": fake_dlpack.FLOAT4, "bits": 4}, TypeError, "q has dtype float4_e2m1fn, which"),
        ({"code": fake_dlpack.COMPLEX, "bits": 64}, TypeError, "q has dtype complex64, which"),
        ({"code": fake_dlpack.FLOAT, "lanes": 4}, TypeError, "dtype float32 x 4 lanes, which"),
        ({"code": 99}, TypeError, "q has dtype code 99, which"),
        ({"major": 2}, TypeError, "q comes as DLPack 2.0; cuflash reads version 1"),
        ({"refuse": BufferError("no bfloat16")}, TypeError, "refuses to share it.*no bfloat16"),
        ({"device": fake_dlpack.ROCM}, Unsupported, "q is on a device of DLPack type 10"),
    ],
)
def test_dlpack_refusals(odd, error, message):  # FAULTS 70, 71
    before = len(fake_dlpack.alive)
    with pytest.raises(error, match=message):
        look(fake_dlpack.Array(numbers(), **odd))
    assert len(fake_dlpack.alive) == before  # an exception lets go of the capsule


def test_dlpack_keeps_the_producer_alive_and_no_longer():
    view = look(fake_dlpack.Array(numbers()))
    np.testing.assert_array_equal(view.host, numbers())
    host = view.host[1:, ::2]
    before = fake_dlpack.freed
    del view
    np.testing.assert_array_equal(host, numbers()[1:, ::2])
    assert fake_dlpack.freed == before
    del host
    assert fake_dlpack.freed == before + 1


def test_dlpack_gives_the_producers_kind():
    try:
        plain = fake_dlpack.module("fakelib_plain")
        library, views = arrays.take({"q": plain(numbers())})
        made = library.empty(SHAPE, "float32", views["q"].device)
        assert library.give(made) is made and isinstance(made, np.ndarray)
        giving = fake_dlpack.module("fakelib_giving", lambda x: ("giving", np.from_dlpack(x)))
        library, views = arrays.take({"q": giving(numbers()), "k": giving(numbers())})
        made = library.empty(SHAPE, "float32", views["q"].device)
        view = library.view(made, "o")
        view.host[...] = 7
        kind, given = library.give(made)
        assert kind == "giving" and given.ctypes.data == view.pointer and given[0, 0, 0, 0] == 7
        half = library.empty(SHAPE, "bfloat16", views["q"].device)  # NumPy cannot export it
        assert library.give(half) is half
        with pytest.raises(TypeError, match="q is of fakelib_plain and k of fakelib_giving"):
            arrays.take({"q": plain(numbers()), "k": giving(numbers())})
    finally:
        sys.modules.pop("fakelib_plain", None)
        sys.modules.pop("fakelib_giving", None)


# ---- JAX


def test_jax_arrays_and_tracers_are_described(jnp):
    import jax

    array = jnp.zeros(SHAPE, jnp.bfloat16)
    library, views = arrays.take({"q": array})
    assert (views["q"].shape, views["q"].dtype) == (SHAPE, "bfloat16")
    assert views["q"].device is arrays.CPU and views["q"].owner is array and library.name == "JAX"
    assert not arrays.is_tracer(array)

    def traced(x):
        _, views = arrays.take({"q": array, "k": x, "v": array})
        assert arrays.is_tracer(x) and views["k"].device is arrays.TRACED
        assert views["k"].shape == SHAPE
        return x

    jax.jit(traced)(array)
    jax.vmap(traced)(jnp.zeros((7, *SHAPE), jnp.bfloat16))
    for dtype in ("complex64", "int4"):
        with pytest.raises(TypeError, match=f"q has dtype {dtype}"):
            look(jnp.zeros(3, dtype))
    with pytest.raises(TypeError, match=r"q has dtype key<"):
        look(jax.random.key(0)[None])


# ---- one call


def test_libraries_do_not_mix(torch, jnp):
    one = {"NumPy": numbers(), "torch": torch.ones(SHAPE), "JAX": jnp.ones(SHAPE)}
    for a in one:
        for b in one:
            if a != b:
                with pytest.raises(TypeError, match=f"v is of {a} and do of {b}; convert one"):
                    arrays.take({"v": one[a], "do": one[b]})


def test_outputs_come_from_the_library(torch):
    for array, kind in ((numbers(), np.ndarray), (torch.ones(3), torch.Tensor)):
        library = arrays.library_of(array, "q")
        for dtype in ("float16", "bfloat16", "float32", "float64"):
            made = library.empty((2, 3), dtype, arrays.CPU)
            view = library.view(made, "o")
            assert type(made) is kind and view.dtype == dtype and view.strides == (3, 1)
            view.host[...] = 3
            assert float(library.give(made)[1, 2]) == 3.0
    assert library.stream(arrays.CPU) == 0
    assert library.deterministic() is False


def test_no_framework_is_imported():
    code = (
        "import sys; import numpy as np; from cuflash import arrays\n"
        "arrays.take({'q': np.ones((2, 3))}); arrays.is_tracer(3)\n"
        "class A:\n"
        "    def __dlpack__(self, **k): return np.ones(3).__dlpack__(**k)\n"
        "    def __dlpack_device__(self): return (1, 0)\n"
        "arrays.take({'q': A()})\n"
        "print([m for m in ('torch', 'jax', 'cupy', 'ml_dtypes') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.strip() == "[]", done.stdout + done.stderr


@pytest.mark.parametrize("kind", ["numpy", "torch", "dlpack"])
def test_memory_is_flat_over_many_calls(kind):  # FAULTS 76
    def make():
        if kind == "torch":
            return pytest.importorskip("torch").ones(64, 64)
        array = np.ones((64, 64), np.float32)
        return array if kind == "numpy" else fake_dlpack.Array(array)

    kept = make()
    gc.collect()
    gc.disable()
    try:
        for turn in range(10_000):
            if turn == 2_000:
                start = sys.getallocatedblocks()
            library, views = arrays.take({"q": make(), "k": kept, "v": kept})
            made = library.empty((4, 4), "float32", arrays.CPU)
            library.view(made, "o").transpose((1, 0))
            if kind == "dlpack":
                kept.exports.clear()
        assert sys.getallocatedblocks() - start < 500
    finally:
        gc.enable()
    del views, library
    assert not [x for x in fake_dlpack.alive.values() if x[2] is getattr(kept, "memory", 0)]


# ---- arrays that masks capture


def test_capture_on_the_cpu_takes_any_library(torch, jnp):
    ids = np.arange(5, dtype=np.int32)[::-1]
    sources = (ids, torch.tensor(ids.copy()), jnp.asarray(ids), fake_dlpack.Array(ids))
    for q in (numbers(), torch.ones(SHAPE)):
        library = arrays.library_of(q, "q")
        for source in sources:
            view = arrays.capture(source, "ids", arrays.CPU, library)
            np.testing.assert_array_equal(view.host, ids)
            assert view.device is arrays.CPU
    assert arrays.capture(ids, "ids", arrays.CPU, arrays.library_of(ids, "")).owner is ids


def test_capture_in_a_jax_call(torch, jnp):
    library = arrays.library_of(jnp.ones(3), "q")
    ids = np.arange(5)
    assert arrays.capture(ids, "ids", arrays.CPU, library).owner is ids
    on_jax = jnp.arange(5)
    assert arrays.capture(on_jax, "ids", arrays.TRACED, library).owner is on_jax
    with pytest.raises(TypeError, match="ids is of torch, but q, k and v are JAX arrays"):
        arrays.capture(torch.ones(3), "ids", arrays.CPU, library)


def test_capture_refuses_tracers_elsewhere(jnp):
    import jax

    library = arrays.library_of(numbers(), "q")
    with pytest.raises(TypeError, match="ids is a JAX tracer"):
        jax.jit(lambda x: arrays.capture(x, "ids", arrays.CPU, library) and x)(jnp.ones(3))


def test_host_copies_live_as_long_as_their_array():
    cache = captured.HostCache()
    array = np.arange(6)
    key = captured.host_key(array, array, "cuda:0")
    cache.put(key, array, "copy")
    assert cache.get(key) == "copy" and not cache.ended
    assert captured.host_key(array[:3], array[:3], "cuda:0") != key
    del array
    assert cache.get(key) is None and cache.ended == ["copy"]
