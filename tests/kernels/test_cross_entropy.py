"""Cross-entropy in tiles: values against NumPy in float64, gradients against autodiff, memory, four devices."""


import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.simulated import results_on_devices
from tests.tolerances import TOLERANCE, relative_error
from xfresearch.kernels import cross_entropy
from xfresearch.kernels.choice import KernelChoice
from xfresearch.kernels.cross_entropy import linear_cross_entropy, token_nll
from xfresearch.kernels.head import Head


def reference(x, head, labels, weights, z_loss):
    logits = logits_in_numpy(x, head)
    lse = np.log(np.exp(logits).sum(1))
    nll = (weights * (lse - logits[np.arange(len(labels)), labels])).sum()
    return nll + z_loss * (weights * lse**2).sum(), nll


def logits_in_numpy(x, head):
    x, table = (np.asarray(a, np.float64) for a in (x, head.table_VD))
    logits = head.scale * x @ table.T + (0 if head.bias_V is None else np.asarray(head.bias_V))
    return head.softcap * np.tanh(logits / head.softcap) if head.softcap else logits


def naive(x, head, labels, weights, z_loss):
    wide = jnp.promote_types(x.dtype, jnp.float32)
    logits = head.scale * jnp.einsum("TD,VD->TV", x, head.table_VD, preferred_element_type=wide)
    logits = logits if head.bias_V is None else logits + head.bias_V
    logits = head.softcap * jnp.tanh(logits / head.softcap) if head.softcap else logits
    lse = jax.nn.logsumexp(logits, -1)
    nll = lse - jnp.take_along_axis(logits, labels[:, None], 1)[:, 0]
    return (weights * (nll + z_loss * lse**2)).sum()


def draw(T=13, D=5, V=11, seed=0, dtype="float64", bias=False, softcap=0.0, scale=1.0):
    """x, a head, labels and weights."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(T, D))
    table = rng.normal(size=(V, D))
    labels = rng.integers(0, V, T)
    weights = rng.integers(0, 3, T) / 2
    bias_V = jnp.asarray(rng.normal(size=V), "float64" if dtype == "float64" else "float32") if bias else None
    return (
        jnp.asarray(x, dtype),
        Head(jnp.asarray(table, dtype), bias_V, softcap, scale),
        jnp.asarray(labels, jnp.int32),
        jnp.asarray(weights, "float32"),
    )


@settings(max_examples=8, deadline=None)
@given(
    st.integers(1, 20),
    st.integers(1, 6),
    st.integers(1, 12),
    st.integers(1, 25),
    st.sampled_from([0.0, 0.3]),
    st.booleans(),
    st.sampled_from([0.0, 1.5]),
    st.sampled_from([1.0, 0.6]),
    st.integers(0, 99),
)
def test_values_equal_numpy_and_gradients_equal_autodiff(T, D, V, rows, z_loss, bias, softcap, scale, seed):
    with jax.enable_x64(True):
        x, head, labels, weights = draw(T, D, V, seed, bias=bias, softcap=softcap, scale=scale)
        weights = weights.astype("float64")

        def tiled(x, head, weights):
            values = linear_cross_entropy(x, head, labels, weights, z_loss=z_loss, rows=rows)
            return 3 * values[0], values

        def whole(x, head, weights):
            return 3 * naive(x, head, labels, weights, z_loss)

        (_, values), gradients = jax.jit(jax.value_and_grad(tiled, (0, 1, 2), has_aux=True))(x, head, weights)
        for actual, expected in zip(values, reference(x, head, labels, weights, z_loss), strict=True):
            assert abs(actual - expected) <= TOLERANCE["float64"] * max(1, abs(expected))
        expected = jax.jit(jax.grad(whole, (0, 1, 2)))(x, head, weights)
        for a, e in zip(jax.tree.leaves(gradients), jax.tree.leaves(expected), strict=True):
            assert np.max(np.abs(a - e)) <= TOLERANCE["float64"] * max(1, np.max(np.abs(e)))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_values_and_gradients_in_lower_precision(dtype, x64):
    x, head, labels, weights = draw(64, 16, 50, dtype=dtype, bias=True, softcap=4.0, scale=0.5)
    total, nll = linear_cross_entropy(x, head, labels, weights, z_loss=0.1, rows=16)
    assert total.dtype == nll.dtype == jnp.float32
    expected = reference(x, head, labels, np.asarray(weights), 0.1)
    assert relative_error(total, expected[0]) < TOLERANCE[dtype]
    assert relative_error(nll, expected[1]) < TOLERANCE[dtype]
    actual = jax.grad(lambda x, h: linear_cross_entropy(x, h, labels, weights, z_loss=0.1, rows=16)[0], (0, 1))(x, head)
    wide = jax.tree.map(lambda a: a.astype("float64"), (x, head))
    expected = jax.grad(lambda x, h: naive(x, h, labels, weights, 0.1), (0, 1))(*wide)
    for a, e, like in zip(*map(jax.tree.leaves, (actual, expected, (x, head))), strict=True):
        assert a.dtype == like.dtype
        assert relative_error(a.astype("float64"), e) < TOLERANCE[dtype]


def test_nll_alone_has_no_gradient(x64):
    x, head, labels, weights = draw()
    gradient = jax.grad(lambda x: linear_cross_entropy(x, head, labels, weights)[1])(x)
    assert not gradient.any()


@pytest.mark.parametrize("settings", [{}, {"bias": True, "softcap": 1.5}], ids=str)
def test_token_nll_and_correctness_equal_numpy(settings, x64):
    x, head, labels, weights = draw(T=13, **settings)
    logits = logits_in_numpy(x, head)
    labels = labels.at[:5].set(logits.argmax(-1)[:5].astype(labels.dtype))
    nll_T, correct_T = token_nll(x, head, labels, rows=4)
    expected = np.log(np.exp(logits).sum(1)) - logits[np.arange(13), labels]
    assert relative_error(nll_T, expected) < TOLERANCE["float64"]
    assert correct_T.dtype == bool
    np.testing.assert_array_equal(correct_T, logits.argmax(1) == labels)
    assert correct_T[:5].all() and not correct_T.all()


def temporary_bytes(function, *arguments) -> int:
    return jax.jit(function).lower(*arguments).compile().memory_analysis().temp_size_in_bytes


def test_memory_is_far_less_than_the_logits():
    """Less than a quarter of the logits [T, V] in float32. The naive form holds them, so this test can fail."""
    T, D, V, rows = 4096, 32, 4096, 256
    x, head, labels, weights = draw(T, D, V, dtype="float32", bias=True, softcap=30.0)
    limit = T * V * 4 // 4

    def tiled(x, head):
        return linear_cross_entropy(x, head, labels, weights, rows=rows)[0]

    def whole(x, head):
        return naive(x, head, labels, weights, 0.0)

    for transform in (lambda f: f, lambda f: jax.value_and_grad(f, (0, 1))):
        assert temporary_bytes(transform(tiled), x, head) < limit
        assert temporary_bytes(transform(whole), x, head) > limit
    assert temporary_bytes(lambda x, head: token_nll(x, head, labels, rows), x, head) < limit


def test_differentiation_has_three_matrix_products():
    """The forward pass with gradients has three, the backward pass none."""
    x, head, labels, weights = draw(dtype="float32")
    step = jax.grad(lambda x, head: linear_cross_entropy(x, head, labels, weights, rows=4)[0], (0, 1))
    assert str(jax.make_jaxpr(step)(x, head)).count("dot_general[") == 3


@pytest.fixture
def padded(monkeypatch):
    """The vocabulary is padded as on a GPU, to a multiple of 8, and the table's gradient has the table's axes."""
    monkeypatch.setattr(cross_entropy, "platform", lambda mesh: "gpu")
    monkeypatch.setattr(cross_entropy, "vocabulary_multiple", lambda mesh: KernelChoice(8, ""))


def products(function, *arguments) -> list:
    """The sizes of the operands of every matrix product."""
    lines = str(jax.make_jaxpr(function)(*arguments)).splitlines()
    return [line.split(" = ")[0] for line in lines if "dot_general[" in line]


@pytest.mark.parametrize("V", [11, 16])
def test_a_padded_vocabulary_changes_only_the_products(V, padded, x64):
    x, head, labels, weights = draw(V=V, bias=True, softcap=1.5)
    weights = weights.astype("float64")

    def tiled(x, head, weights):
        return linear_cross_entropy(x, head, labels, weights, z_loss=0.3, rows=5)

    for actual, expected in zip(tiled(x, head, weights), reference(x, head, labels, weights, 0.3), strict=True):
        assert relative_error(actual, expected) < TOLERANCE["float64"]
    gradient = jax.grad(lambda *a: tiled(*a)[0], (0, 1, 2))
    expected = jax.grad(lambda *a: naive(a[0], a[1], labels, a[2], 0.3), (0, 1, 2))(x, head, weights)
    result = gradient(x, head, weights)
    for a, e in zip(jax.tree.leaves(result), jax.tree.leaves(expected), strict=True):
        assert a.shape == e.shape and relative_error(a, e) < TOLERANCE["float64"]
    logits, _, table = products(gradient, x, head, weights)
    assert "f64[5,16]" in logits and "f64[16,5]" in table
    nll_T, correct_T = token_nll(x, head, labels, rows=4)
    logits = logits_in_numpy(x, head)
    assert relative_error(nll_T, np.log(np.exp(logits).sum(1)) - logits[np.arange(13), labels]) < TOLERANCE["float64"]
    np.testing.assert_array_equal(correct_T, logits.argmax(1) == labels)


SHARDED = """
import jax, numpy as np, jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
from xfresearch.kernels import cross_entropy
from xfresearch.kernels.choice import KernelChoice
from xfresearch.kernels.cross_entropy import linear_cross_entropy, token_nll
from xfresearch.kernels.head import Head
rng = np.random.default_rng(0)
T, D, V = 64, 8, 24
x, table = (jnp.asarray(rng.normal(size=s), jnp.float32) for s in ((T, D), (V, D)))
labels, weights = jnp.asarray(rng.integers(0, V, T)), jnp.asarray(rng.integers(0, 2, T), jnp.float32)
def loss(x, head, labels, weights, mesh=None):
    return linear_cross_entropy(x, head, labels, weights, z_loss=0.1, rows=16, mesh=mesh)[0]

def check(actual, expected):
    for a, e in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        a, e = np.asarray(a), np.asarray(e)
        assert a.shape == e.shape and np.max(np.abs(a - e)) < 1e-5 * np.max(np.abs(e))

step = jax.value_and_grad(loss, (0, 1))
expected = step(x, Head(table), labels, weights)
mesh = Mesh(np.array(jax.devices()), ("data",))
put = lambda a, spec: jax.device_put(a, NamedSharding(mesh, spec))
arguments = put(x, P("data")), Head(put(table, P())), put(labels, P("data")), put(weights, P("data"))
compiled = jax.jit(step).lower(*arguments).compile()
check(compiled(*arguments), expected)
assert len(jax.devices()) == 4 and "all-reduce" in compiled.as_text() and "all-gather" not in compiled.as_text()

# A bias, a softcap and a scale, the vocabulary sharded over `tensor` and the table's width over `fsdp`.
head = Head(table, jnp.asarray(rng.normal(size=V), jnp.float32), 2.0, 0.5)
mesh = Mesh(np.array(jax.devices()).reshape(1, 2, 1, 2, 1), ("data", "fsdp", "expert", "tensor", "context"))
kept = Head(NamedSharding(mesh, P("tensor", "fsdp")), NamedSharding(mesh, P("tensor")), 2.0, 0.5)
rows = [a.reshape(4, 16, *a.shape[1:]) for a in (x, labels, weights)]
x, labels, weights = (put(a, P("fsdp")) for a in rows)
expected = step(rows[0], head, *rows[1:]), token_nll(rows[0], head, rows[1])[0]
for multiple in (1, 8):  # 8: the 12 ids of a shard are padded to 16, as on a GPU
    cross_entropy.vocabulary_multiple = lambda mesh: KernelChoice(multiple, "")
    found = jax.jit(lambda *a: step(*a, mesh=mesh))(x, jax.device_put(head, kept), labels, weights)
    check(found, expected[0])
    nll = jax.jit(lambda *a: token_nll(*a, rows=16, mesh=mesh))(x, jax.device_put(head, kept), labels)
    check(nll[0], expected[1])
print('"equal"')
"""


def test_four_devices_equal_one():
    """Sharded tokens have the same values and gradients as on one device, and no all-gather of tokens."""
    assert results_on_devices(4, "-c", SHARDED, timeout=120) == "equal"
