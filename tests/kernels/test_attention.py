"""Attention: values against NumPy in float64, gradients of kernels against each other, the choice of a kernel."""

from functools import partial
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.tolerances import TOLERANCE, relative_error
from xfresearch.kernels.attention import attention, choose_attention, describe
from xfresearch.kernels.masks import Mask
from xfresearch.runtime.errors import UserError
from xfresearch.sharding.devices import compute_capability

IMPLEMENTATIONS = ("plain", "blocked")


def reference(q, k, v, memory=None, q_segments=None, k_segments=None, q_offset=0, causal=True, own=None):
    """o = softmax([own Mk^T, q k^T] / sqrt(K)) [Mv; v], one query and one head at a time. own: q by default."""
    B, L, H, K = q.shape
    S, G = k.shape[1:3]
    o = np.zeros(q.shape)
    for b, l, h in np.ndindex(B, L, H):
        g = h // (H // G)
        sees = np.ones(S, bool)
        if causal:
            sees &= np.arange(S) <= q_offset + l
        if q_segments is not None:
            sees &= k_segments[b] == q_segments[b, l]
        keys, values = k[b, sees, g], v[b, sees, g]
        logits = keys @ q[b, l, h]
        if memory is not None:
            logits = np.concatenate([memory[0][:, g] @ (q if own is None else own)[b, l, h], logits])
            values = np.concatenate([memory[1][:, g], values])
        if len(logits):
            w = np.exp(logits / np.sqrt(K))
            o[b, l, h] = w @ values / w.sum()
    return o


def draw(B=2, L=7, H=4, G=2, K=3, M=5, S=None, segments=False, seed=0, dtype="float64"):
    """(q, k, v, memory), and the segments as keyword arguments."""
    rng = np.random.default_rng(seed)
    q, k, v = (rng.normal(size=(B, n, heads, K)) for n, heads in ((L, H), (S or L, G), (S or L, G)))
    memory = (rng.normal(size=(M, G, K)), rng.normal(size=(M, G, K))) if M else None
    named = {}
    if segments:
        ids = np.sort(rng.integers(0, 3, (B, L)), 1).astype(np.int32)
        named = {"q_segments_BL": ids, "k_segments_BS": ids}
    return jax.tree.map(lambda x: jnp.asarray(x, dtype), (q, k, v, memory)), named


def run(implementation, arguments, **named):
    q, k, v, memory = arguments
    return attention(q, k, v, memory=memory, implementation=implementation, **named)


def in_numpy(arguments, q_segments_BL=None, k_segments_BS=None, **named):
    arguments = jax.tree.map(lambda x: np.asarray(x, np.float64), arguments)
    return reference(*arguments, q_segments_BL, k_segments_BS, **named)


def value_and_gradients(function, arguments):
    def pulled_back(arguments):
        o, vjp = jax.vjp(function, arguments)
        cotangent = jnp.cos(jnp.arange(o.size)).astype("bfloat16")  # the same numbers in every dtype
        return o, vjp(cotangent.reshape(o.shape).astype(o.dtype))[0]

    return jax.jit(pulled_back)(arguments)


def gradients(function, arguments):
    return value_and_gradients(function, arguments)[1]


def assert_close(actual, expected, dtype):
    """Relative to the tree's largest value, because the gradients of a query and its key are 0 if it sees no other."""
    actual, expected = (np.concatenate([np.ravel(x) for x in jax.tree.leaves(tree)]) for tree in (actual, expected))
    assert actual.dtype == dtype
    assert relative_error(actual, expected) < TOLERANCE[dtype]


@pytest.fixture(autouse=True)
def x64():
    with jax.enable_x64(True):
        yield


shapes = st.fixed_dictionaries(
    {
        "B": st.sampled_from([1, 2, 3]),  # 4 is in test_a_query_that_sees_no_key_gets_zero
        "L": st.sampled_from([1, 2, 5, 8, 13]),
        "H": st.just(4),
        "G": st.sampled_from([1, 2, 4]),
        "K": st.sampled_from([1, 3, 8]),
        "M": st.sampled_from([0, 1, 6]),
        "segments": st.booleans(),
        "seed": st.integers(0, 99),
    }
)


@settings(max_examples=8, deadline=None)
@given(shapes)
def test_values_equal_numpy_and_gradients_agree(shape):
    arguments, segments = draw(**shape)
    expected = in_numpy(arguments, **segments)
    collected = {}
    for implementation in IMPLEMENTATIONS:
        o, collected[implementation] = value_and_gradients(partial(run, implementation, **segments), arguments)
        assert_close(o, expected, "float64")
    assert_close(collected["blocked"], collected["plain"], "float64")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_values_and_gradients_in_lower_precision(implementation, dtype):
    arguments, segments = draw(L=16, K=8, dtype=dtype, segments=True)
    output = run(implementation, arguments, **segments)
    assert output.dtype == dtype
    assert relative_error(output.astype(jnp.float32), in_numpy(arguments, **segments)) < TOLERANCE[dtype]
    wide = jax.tree.map(lambda x: x.astype("float64"), arguments)
    expected = gradients(partial(run, "plain", **segments), wide)
    actual = gradients(partial(run, implementation, **segments), arguments)
    for a, e in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        assert a.dtype == dtype
        assert relative_error(a.astype(jnp.float64), e) < TOLERANCE[dtype]


def test_gradient_equals_finite_differences():
    arguments, segments = draw(L=6, segments=True)
    for implementation in IMPLEMENTATIONS:
        function = jax.jit(lambda a, i=implementation: jnp.sin(run(i, a, **segments)).sum())
        gradient = jax.grad(function)(arguments)
        for leaf, (x, g) in enumerate(zip(jax.tree.leaves(arguments), jax.tree.leaves(gradient), strict=True)):
            step = np.random.default_rng(leaf).normal(size=x.shape) * 1e-5
            moved = [jax.tree.leaves(arguments) for _ in range(2)]
            moved[0][leaf] = x + step
            moved[1][leaf] = x - step
            difference = function(jax.tree.unflatten(jax.tree.structure(arguments), moved[0])) - function(
                jax.tree.unflatten(jax.tree.structure(arguments), moved[1])
            )
            np.testing.assert_allclose(difference, 2 * (g * step).sum(), rtol=1e-7)


@pytest.mark.parametrize("M", [0, 5])
def test_decoding_in_parts_equals_the_full_sequence(M):
    arguments, _ = draw(L=6, S=6, M=M)
    q, k, v, memory = arguments
    step = jax.jit(lambda q, offset: attention(q, k, v, memory=memory, q_offset=offset))
    parts = [step(q[:, l : l + 2], jnp.int32(l)) for l in (0, 2, 4)]
    assert_close(jnp.concatenate(parts, 1), run("blocked", arguments), "float64")


def test_attention_without_a_causal_mask():
    arguments, _ = draw(L=4, S=9)
    assert_close(run("auto", arguments, mask=Mask(causal=False)), in_numpy(arguments, causal=False), "float64")


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("B", [1, 4])
def test_a_query_that_sees_no_key_gets_zero(implementation, B):
    (q, k, v, _), _ = draw(B=B, M=0)
    segments = {"q_segments_BL": jnp.ones((B, 7), jnp.int32), "k_segments_BS": jnp.full((B, 7), 2, jnp.int32)}
    loss = lambda q, k, v: attention(q, k, v, implementation=implementation, **segments).sum()  # noqa: E731
    for x in jax.tree.leaves(jax.jit(jax.value_and_grad(loss, (0, 1, 2)))(q, k, v)):
        assert not jnp.any(x)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_gradients_are_finite_with_large_logits(implementation):
    (q, k, v, memory), _ = draw()
    for arguments in ((1e4 * q, k, v, memory), (q, k, v, (1e4 * memory[0], memory[1]))):
        assert all(jnp.isfinite(x).all() for x in jax.tree.leaves(gradients(partial(run, implementation), arguments)))


def test_transformations_of_blocked_equal_those_of_plain():
    """vmap, scan over layers, remat."""
    (q, k, v, memory), segments = draw(L=8, segments=True)

    def layers(implementation, wrap, q):
        def layer(x, _):
            return attention(x, k, v, memory=memory, implementation=implementation, **segments), None

        return jax.lax.scan(wrap(layer), q, None, length=3)[0]

    for wrap in (lambda f: f, jax.checkpoint):
        results = [
            jax.jit(jax.value_and_grad(lambda q, i=i, w=wrap: jnp.sin(layers(i, w, q)).sum()))(q)
            for i in IMPLEMENTATIONS
        ]
        assert_close(results[1], results[0], "float64")
    stacked = jax.tree.map(lambda x: jnp.stack([x, 2 * x, x - 1]), (q, k, v, memory))
    results = [gradients(jax.vmap(partial(run, i, **segments)), stacked) for i in IMPLEMENTATIONS]
    assert_close(results[1], results[0], "float64")


def test_dropout_follows_the_normalisation():
    """The mean over dropout keys is the output without dropout, and the weights do not sum to 1."""
    (q, k, v, memory), _ = draw(B=1, L=3)
    dropped = jax.vmap(lambda key: attention(q, k, v, memory=memory, dropout_rate=0.5, dropout_key=key))
    many = dropped(jax.random.split(jax.random.key(0), 4000))
    assert relative_error(many.mean(0), run("plain", (q, k, v, memory))) < 0.1
    ones = attention(
        q,
        k,
        jnp.ones_like(v),
        memory=(memory[0], jnp.ones_like(memory[1])),
        dropout_rate=0.5,
        dropout_key=jax.random.key(1),
    )
    assert jnp.unique(ones.round(6)).size > 10  # with dropout before the softmax every output would be 1


BIASED = {"altered": ("biases",), "platform": "gpu", "dtype": "bfloat16"}


def call(q, k, v, *rest, platform="cpu", capability=(9, 0), **named):
    return describe(q, k, v, *rest, **named)._replace(platform=platform, capability=capability)


def test_choice_on_cpu():
    name = lambda *a, **named: choose_attention(call(*a, **named)).name  # noqa: E731
    (q, k, v, memory), _ = draw(L=128)
    assert (name(q, k, v), name(q, k, v, memory)) == ("plain", "blocked")
    (q, k, v, memory), _ = draw(L=129)
    assert name(q, k, v) == name(q, k, v, memory) == "blocked"
    for unusual in (
        {"altered": ("dropout",)},
        {"mask": Mask(causal=False)},
        {"q_offset": 3},
        {"q_offset": jnp.int32(0)},
    ):
        assert name(q, k, v, **unusual) == "plain"
    assert name(q[:, :2], k, v) == name(q, k, v[:, :, :1]) == "plain"
    assert name(q, k, v, mask=Mask(window=9), altered=("biases",), platform="tpu") == "banded"


def test_choice_on_tpu():
    (q, k, v, memory), _ = draw(L=128, dtype="float32")
    name = lambda *a, **named: choose_attention(call(*a, platform="tpu", **named)).name  # noqa: E731
    ids = jnp.zeros((2, 128))
    for usual in (
        *({}, {"segments": (ids, ids)}, {"mask": Mask(window=9)}, {"mask": Mask(causal=False)}),
        {"altered": ("softcap",)},
    ):
        assert name(q, k, v, **usual) == name(q, k, v, memory, **usual) == "splash"
    assert name(q, k[:, :, :1], v[..., :2]) == name(q, k, v, memory, mask=Mask(nearest=1)) == "splash"
    assert name(q, k, v, mask=Mask(nearest=1)) == "plain"  # the first query sees no key
    assert name(q, k, v, segments=(ids, ids + 0)) == name(q, k, v, altered=("dropout",)) == "plain"


def test_choice_on_gpu():
    (q, k, v, memory), _ = draw(L=128, K=64, dtype="bfloat16")
    by_name = lambda asked, *a, **named: choose_attention(call(*a, platform="gpu", **named), asked).name  # noqa: E731
    name = partial(by_name, "auto")
    ids = jnp.zeros((2, 128))
    for usual in ({}, {"mask": Mask(window=9)}, {"mask": Mask(causal=False)}):
        assert name(q, k, v, **usual) == name(q, k, v, memory, **usual) == "cudnn"
    wide = [x.astype("float32") for x in (q, k, v)]
    for unusual, chosen in (  # cuDNN supports them, but not all of its tests passed on a GPU
        *(({"segments": (ids, ids)}, "chunked"), ({"altered": ("biases",)}, "plain"), ({"sink": True}, "chunked")),
        ({"segments": (ids, ids), "altered": ("biases",), "mask": Mask(window=100)}, "plain"),
    ):
        assert name(q, k, v, memory, **unusual) == chosen
        assert by_name("cudnn", q, k, v, memory, **unusual) == "cudnn"
        if "sink" not in unusual:
            with pytest.raises(UserError, match="multiple of 128"):
                by_name("cudnn", q[:, :96], k[:, :96], v[:, :96], **unusual)
    assert name(q, k, v[..., :32]) == name(q[..., :31], k[..., :31], v) == "cudnn"
    assert name(q, k, v, altered=("biases",), mask=Mask(window=16)) == "banded"
    assert name(q, k, v, altered=("biases", "softcap")) == "plain"
    assert name(*wide) == name(q, k, v, mask=Mask(nearest=1), memory=memory) == "chunked"
    assert name(*wide, mask=Mask(window=9)) == "banded"
    assert name(q, k, v, altered=("dropout",)) == "plain"
    assert name(q, k, v, memory, altered=("softcap",)) == "chunked"
    assert choose_attention(call(q, k, v, platform="gpu")._replace(context=2)).name == "chunked"


def test_choice_by_compute_capability():
    """cuDNN's backward pass supports heads above 128 only on Hopper, and no GPU before Ampere or from AMD."""
    for size, capability, name in (
        *((128, (8, 0), "cudnn"), (128, (12, 0), "cudnn"), (128, (7, 5), "chunked"), (64, (), "chunked")),
        *((256, (9, 0), "cudnn"), (264, (9, 0), "chunked"), (256, (8, 9), "chunked"), (256, (10, 0), "chunked")),
    ):
        (q, k, v, memory), _ = draw(L=128, K=size, dtype="bfloat16")
        assert choose_attention(call(q, k, v, memory, platform="gpu", capability=capability)).name == name


@pytest.mark.parametrize("attribute, capability", [("9.0", (9, 0)), ("12.1", (12, 1)), ("gfx942", ()), (None, ())])
def test_compute_capability_is_parsed_from_the_device(attribute, capability, monkeypatch):
    gpu = SimpleNamespace(platform="gpu", **({} if attribute is None else {"compute_capability": attribute}))
    monkeypatch.setattr(jax, "devices", lambda: [gpu])
    assert compute_capability() == capability


@pytest.mark.parametrize(
    "name, reason, named",
    [
        ("splash", "it needs a TPU, and the platform is cpu", {}),
        ("splash", "it does not support biases", {"platform": "tpu", "altered": ("biases",)}),
        ("splash", "it does not support float64", {"platform": "tpu"}),
        ("blocked", "without dropout", {"altered": ("dropout",)}),
        ("blocked", "without softcap", {"altered": ("softcap",)}),
        ("blocked", "without a learned sink", {"sink": True}),
        ("cudnn", "a length that is a multiple of 128", BIASED | {"L": 64}),
        ("splash", "it does not support float64", {"platform": "tpu", "altered": ("softcap",)}),
        ("blocked", "full causal attention", {"mask": Mask(window=3)}),
        ("cudnn", "it needs a GPU, and the platform is tpu", {"platform": "tpu"}),
        ("cudnn", "it does not support float64", {"platform": "gpu"}),
        ("ring", "a sequence sharded over mesh.context, which is 1", {}),
        ("chunked", "it does not support shaping", {"altered": ("shaping",)}),
        ("cudnn", "compute capability 8.0 or higher", {"platform": "gpu", "capability": (7, 0)}),
        ("banded", "a causal window shorter than half of the sequence", {"mask": Mask(window=70)}),
    ],
)
def test_a_kernel_that_does_not_support_the_call_is_refused_with_the_reason(name, reason, named):
    named = dict(named)
    (q, k, v, memory), _ = draw(L=named.pop("L", 128), dtype=named.pop("dtype", "float64"))
    with pytest.raises(UserError, match=rf"config.training.attention_kernel='{name}' is not allowed here: .*{reason}"):
        choose_attention(call(q, k, v, memory, **named), name)


def test_an_unknown_kernel_is_refused():
    (q, k, v, _), _ = draw()
    with pytest.raises(UserError, match="did you mean 'blocked'"):
        attention(q, k, v, implementation="bloked")


def test_memory_joined_to_the_keys_needs_the_right_offset():
    """With memory before the context, a square causal mask and a mask shifted by one position give wrong outputs."""
    arguments, _ = draw(L=7)
    q, k, v, memory = arguments
    expected = in_numpy(arguments)
    joined = [jnp.concatenate([jnp.broadcast_to(m, (2, *m.shape)), x], 1) for m, x in zip(memory, (k, v), strict=True)]
    right = attention(q, *joined, q_offset=5)  # keys 0 to 4 are the memory
    assert relative_error(right, expected) < TOLERANCE["float64"]
    for offset in (0, 4, 6):
        assert relative_error(attention(q, *joined, q_offset=offset), expected) > 1e-3


def test_memory_is_not_broadcast_over_the_batch():
    """The traced program has no array [B, M, ...] of keys or values."""
    arguments, _ = draw(B=3, L=7, H=4, G=4, K=2, M=11)
    text = str(jax.make_jaxpr(lambda a: gradients(partial(run, "blocked"), a))(arguments))
    assert "[11,4,2]" in text
    assert not any(f"[{shape}]" in text for shape in ("3,11,4,2", "4,3,11,2", "3,4,11,2", "3,18,4,2"))


@pytest.mark.parametrize("nearest", [0, 1])
def test_banded_equals_plain_under_a_window(nearest):
    """With a length that is no multiple of the band, packed documents, memory, grouped heads and a bias by distance."""
    (q, k, v, memory), _ = draw(L=75, H=4, G=2, M=3)
    segments = {
        name: jnp.asarray([[1] * 40 + [2] * 35, [1] * 70 + [0] * 5]) for name in ("q_segments_BL", "k_segments_BS")
    }
    mask = Mask(window=9, nearest=nearest)
    assert choose_attention(call(q, k, v, memory, mask=mask, platform="gpu")).name == "banded"

    def bias(q_BLHK, distance_LS):
        slopes = jnp.arange(1, 5)[:, None, None] / 8
        return q_BLHK.sum(-1).swapaxes(1, 2)[..., None] - slopes * jnp.abs(distance_LS)

    run_as = partial(run, mask=mask, bias=bias, **segments)
    outputs = {}
    gradient = {}
    for implementation in ("plain", "banded"):
        outputs[implementation] = run_as(implementation, (q, k, v, memory))
        gradient[implementation] = gradients(partial(run_as, implementation), (q, k, v, memory))
    assert_close(outputs["banded"], outputs["plain"], "float64")
    assert_close(gradient["banded"], gradient["plain"], "float64")
