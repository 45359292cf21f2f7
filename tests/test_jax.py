"""JAX on its CPU platform: eager, jit, loops; grad and vmap are refused, inputs never written."""

from dataclasses import dataclass

import numpy as np
import pytest

jax = pytest.importorskip("jax")
jnp = jax.numpy

import cuflash  # noqa: E402
from cuflash import jax as adapter  # noqa: E402

SHAPE = (2, 9, 3, 4)
calls = []


@dataclass(frozen=True)
class Scale:
    """Writes factor * x + sum(ids)."""

    factor: float = 2.0

    def workspaces(self, device):
        return [("partial", (16,), "float32")]

    def __call__(self, inputs, outputs, stream):
        calls.append((inputs, outputs, stream))
        total = inputs[1].host.sum() if len(inputs) > 1 else 0
        outputs[0].host[...] = self.factor * inputs[0].host + total


def scale(x, *more, factor=2.0):
    return adapter.call(Scale(factor), [("o", x.shape, str(x.dtype))], x, *more)[0]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_eager_and_jit(dtype):
    x = jnp.arange(6).reshape(2, 3).astype(dtype)
    for run in (scale, jax.jit(scale)):
        out = run(x)
        assert isinstance(out, jax.Array) and out.dtype == x.dtype
        np.testing.assert_array_equal(np.asarray(out), 2 * np.asarray(x))


def test_inputs_are_read_in_place_and_cannot_be_written():  # FAULTS 79
    x = jnp.arange(6.0).reshape(2, 3)
    scale(x).block_until_ready()
    inputs, outputs, stream = calls[-1]
    assert inputs[0].pointer == x.unsafe_buffer_pointer() and stream == 0
    assert not inputs[0].host.flags.writeable and outputs[0].host.flags.writeable
    assert inputs[0].strides == (3, 1) and inputs[0].device is cuflash.arrays.CPU


def test_compiles_once():
    x = jnp.ones((2, 3))
    scale(x, factor=5.0).block_until_ready()
    before = adapter._compiled.cache_info().misses
    for _ in range(3):
        scale(x, factor=5.0)
    assert adapter._compiled.cache_info().misses == before


@pytest.mark.parametrize("dtype", ["int64", "uint64", "float64", "int32", "bool"])
def test_numpy_operands_keep_all_their_bits(dtype):
    ids = (np.array([1, 3, 2**40]) % (2 if dtype in ("bool", "int32") else 2**60)).astype(dtype)
    expected = ids[::-1].sum()
    for run in (scale, jax.jit(lambda x: scale(x, ids[::-1]))):
        run(*((jnp.zeros(3), ids[::-1]) if run is scale else (jnp.zeros(3),))).block_until_ready()
        operand = calls[-1][0][1]
        assert operand.dtype == dtype and operand.host.sum() == expected
        np.testing.assert_array_equal(operand.host, ids[::-1])


def test_numpy_operands_are_placed_once_and_let_go():
    kept = [np.arange(3)]
    x = jnp.zeros(3)
    jax.jit(lambda x: scale(x, kept[0]))(x).block_until_ready()  # placed while tracing, no leak
    scale(x, kept[0]).block_until_ready()
    first = calls[-1][0][1].pointer
    scale(x, kept[0]).block_until_ready()
    assert calls[-1][0][1].pointer == first
    calls.clear()
    count = len(adapter._placed._made)
    kept.clear()
    assert len(adapter._placed._made) < count


LOSS = {"grad": jax.grad, "value_and_grad": jax.value_and_grad, "jacrev": jax.jacrev}


@pytest.mark.parametrize("name", LOSS)
@pytest.mark.parametrize("jit", ["none", "inside", "outside"])
def test_grad_is_refused(name, jit):
    def loss(x):
        return (jax.jit(scale) if jit == "inside" else scale)(x).sum()

    derived = LOSS[name](loss)
    with pytest.raises(cuflash.Unsupported, match="attention_vjp"):
        (jax.jit(derived) if jit == "outside" else derived)(jnp.ones((2, 3)))


def test_jvp_and_vmap_are_refused():
    x = jnp.ones((2, 3))
    with pytest.raises(cuflash.Unsupported, match="attention_vjp"):
        jax.jvp(scale, (x,), (x,))
    for run in (jax.vmap(scale), jax.jit(jax.vmap(scale)), jax.vmap(jax.jit(scale))):
        with pytest.raises(TypeError, match=r"jax\.vmap over cuflash is not"):
            run(x)


def test_grad_around_and_loops_work():
    x = jnp.ones((2, 3))
    around = jax.grad(lambda x: (scale(jax.lax.stop_gradient(x)) * x).sum())(x)
    np.testing.assert_array_equal(np.asarray(around), 2.0)
    np.testing.assert_array_equal(np.asarray(jax.lax.map(scale, x)), 2.0)
    powers = jax.lax.scan(lambda c, _: (scale(c), None), x, None, length=3)[0]
    np.testing.assert_array_equal(np.asarray(powers), 8.0)
    np.testing.assert_array_equal(np.asarray(jax.checkpoint(scale)(x)), 2.0)


def test_an_error_inside_is_an_error_outside():
    with pytest.raises(Exception, match="read-only"):

        @dataclass(frozen=True)
        class Bad(Scale):
            def __call__(self, inputs, outputs, stream):
                inputs[0].host[...] = 3

        adapter.call(Bad(), [((3,), "float32")], jnp.ones(3))[0].block_until_ready()


def test_both_platforms_are_traced_where_there_is_a_gpu(monkeypatch):
    """On the CPU XLA must drop the branch of the GPU with its workspaces."""
    monkeypatch.setattr(adapter, "_has_cuda", lambda: True)
    out = scale(jnp.ones(3), factor=11.0)
    np.testing.assert_array_equal(np.asarray(out), 11.0)
    assert len(calls[-1][1]) == 1


# ---- the public calls


def attention_numpy(*arrays, **options):
    return cuflash.attention(*(np.asarray(x) for x in arrays), **options)


@pytest.fixture
def qkv(rng):
    return [jnp.asarray(rng.standard_normal(SHAPE), jnp.float32) for _ in range(3)]


def test_attention_eager_and_jit(qkv):
    ids = jnp.asarray(np.arange(9) // 4)
    host_ids = np.arange(9) // 4
    by_jax = cuflash.Mask(lambda b, h, q, k: ids[q] == ids[k])
    by_numpy = cuflash.Mask(lambda b, h, q, k: host_ids[q] == host_ids[k])
    expected = attention_numpy(*qkv, causal=True, mask=by_numpy)
    for mask in (by_jax, by_numpy):
        for wrap in (lambda f: f, jax.jit):
            o = wrap(lambda *x: cuflash.attention(*x, causal=True, mask=mask))(*qkv)  # noqa: B023
            assert isinstance(o, jax.Array)
            np.testing.assert_allclose(np.asarray(o), expected, rtol=1e-6, atol=1e-6)


def test_attention_mask_array_traced(qkv):
    allowed = jnp.asarray(np.tril(np.ones((9, 9), bool)))
    expected = attention_numpy(*qkv, causal=True)
    o = jax.jit(lambda q, k, v, m: cuflash.attention(q, k, v, mask=m))(*qkv, allowed)
    np.testing.assert_allclose(np.asarray(o), expected, rtol=1e-6, atol=1e-6)


def test_nothing_traced_is_kept(qkv):
    allowed = jnp.asarray(np.tri(9, 8, dtype=bool))
    k, v = (x[:, :8] for x in qkv[1:])
    with jax.checking_leaks():
        jax.jit(lambda q, m: cuflash.attention(q, k, v, mask=m))(qkv[0], allowed)


def test_backward_eager_and_jit(qkv, rng):
    do = jnp.asarray(rng.standard_normal(SHAPE), jnp.float32)

    def step(q, k, v, do):
        o, lse = cuflash.attention(q, k, v, causal=True, return_lse=True)
        return tuple(cuflash.attention_backward(do, q, k, v, o, lse, causal=True))

    host = [np.asarray(x) for x in (*qkv, do)]
    expected = step(*host)
    for run in (step, jax.jit(step)):
        for got, want in zip(run(*qkv, do), expected):
            np.testing.assert_allclose(np.asarray(got), want, rtol=1e-5, atol=1e-5)


def test_attention_refuses_grad_and_vmap(qkv):
    def loss(q):
        return cuflash.attention(q, *qkv[1:]).sum()

    for derived in (jax.grad(loss), jax.jit(jax.grad(loss)), jax.grad(jax.jit(loss))):
        with pytest.raises(cuflash.Unsupported, match="attention_vjp"):
            derived(qkv[0])
    with pytest.raises(TypeError, match=r"jax\.vmap over cuflash"):
        jax.vmap(cuflash.attention)(*(x[:, None] for x in qkv))
