"""cuDNN's attention: lowered for CUDA, and computed here with other kernels in place of cuDNN's; on a GPU, for real."""

from functools import partial

import jax
import jax.numpy as jnp
import pytest

from tests.kernels import cudnn_stand_in
from tests.kernels.attention_cases import draw, error, value_and_gradients
from tests.tolerances import TOLERANCE
from xfresearch.kernels import attention as attention_module
from xfresearch.kernels.attention import attention
from xfresearch.kernels.choice import KernelChoice
from xfresearch.kernels.masks import CAUSAL, EVERYTHING, Mask


def of_table(trained, q_BLHK, distance_LS):
    """A bias [1, H, L, S] that all sequences share."""
    return trained["table"][None, :, jnp.abs(distance_LS)]


def of_query(trained, q_BLHK, distance_LS):
    """A bias [B, H, L, S] of each query."""
    products = jnp.einsum("blhk,hd->bhldk", q_BLHK, trained["table"]).sum(-1)
    index_BHLS = jnp.broadcast_to(jnp.abs(distance_LS), (*products.shape[:2], *distance_LS.shape))
    return jnp.take_along_axis(products, index_BHLS, -1)


def of_span(trained, q_BLHK, distance_LS):
    """A bias of a table that hides all keys more than two tokens away."""
    return jnp.where(jnp.abs(distance_LS) > 2, -jnp.inf, of_table(trained, q_BLHK, distance_LS))


CASES = {
    "memory": ({"M": 5}, CAUSAL, {}),
    "memory with its own queries, and a window": ({"M": 5, "own": True}, Mask(window=4), {}),
    "values of another size": ({"M": 5, "V": 3, "own": True}, CAUSAL, {}),
    "keys of another size": ({"V": 11}, Mask(window=4), {}),
    "a shared bias, not causal": ({}, EVERYTHING, {"bias": of_table, "scale": 0.7}),
    "a shared bias and memory": ({"M": 3}, CAUSAL, {"bias": of_table}),
    "a bias of each query and memory": ({"M": 3, "own": True}, CAUSAL, {"bias": of_query, "scale": 0.7}),
    "a shared bias and a window": ({}, Mask(window=4), {"bias": of_table}),
    "a span": ({"M": 3}, CAUSAL, {"bias": of_span}),
    "documents": ({"segments": True}, CAUSAL, {}),
    "documents, memory and a window": ({"segments": True, "M": 3}, Mask(window=4), {}),
    "documents and a shared bias": ({"segments": True}, CAUSAL, {"bias": of_table}),
    "a sink": ({"M": 1}, Mask(window=4), {"sink": True}),
    "a sink, documents and a bias": ({"M": 1, "segments": True}, CAUSAL, {"sink": True, "bias": of_table}),
}


def arguments(drawn: dict, features: dict, dtype: str, L=10):
    """The arrays to differentiate, (q, k, v, memory, trained), and the segments."""
    drawn = {"L": L, "K": 6} | drawn
    (q, k, v, memory), segments = draw(**drawn, dtype=dtype)
    keys = jax.random.split(jax.random.key(0))
    trained = {"table": jax.random.normal(keys[0], (q.shape[2], L), dtype)} if "bias" in features else {}
    if "sink" in features:
        trained["sink"] = jax.random.normal(keys[1], q.shape[2], dtype)
        memory = memory._replace(key=jnp.zeros_like(memory.key), value=jnp.zeros_like(memory.value))
    return (q, k, v, memory, trained), segments


def run(segments, mask: Mask, features: dict, arrays, implementation="auto"):
    q, k, v, memory, trained = arrays
    ids = segments or (None, None)
    named = {"q_segments_BL": ids[0], "k_segments_BS": ids[1], "mask": mask, "scale": features.get("scale")}
    if memory is not None:
        slots = memory.key, memory.value
        slots = jax.lax.stop_gradient(slots) if "sink" in trained else slots  # the zeros of a sink are not parameters
        named |= {"memory": slots, "memory_q_BLHK": memory.query, "sink_H": trained.get("sink")}
    if "bias" in features:
        named["bias"] = partial(features["bias"], trained)
    return attention(q, k, v, **named, implementation=implementation)


@pytest.fixture
def sdpa(monkeypatch):
    """JAX's module of cuDNN functions, without its check that cuDNN is installed. `auto` chooses cudnn."""
    from jax._src.cudnn import fused_attention_stablehlo as sdpa

    monkeypatch.setattr(sdpa, "check_cudnn_version", lambda: 91000)
    by_name = attention_module.choose_attention
    chosen = lambda call, name: KernelChoice("cudnn", "") if name == "auto" else by_name(call, name)  # noqa: E731
    monkeypatch.setattr(attention_module, "choose_attention", chosen)
    return sdpa


@pytest.mark.parametrize("name", CASES)
def test_cudnn_equals_plain_with_replaced_kernels(name, sdpa, monkeypatch, x64):
    """This tests the inputs of the kernels and the merge."""
    drawn, mask, features = CASES[name]
    arrays, segments = arguments(drawn, features, "float64")
    if not (features or segments or drawn.get("M")):  # the public function, whose private ones are replaced too late
        monkeypatch.setattr(jax.nn, "dot_product_attention", partial(library, mask))
    expected = value_and_gradients(partial(run, segments, mask, features, implementation="plain"), arrays)
    monkeypatch.setattr(sdpa, "_dot_product_attention_fwd_impl", cudnn_stand_in.forward)
    monkeypatch.setattr(sdpa, "_dot_product_attention_bwd_impl", cudnn_stand_in.backward)
    result = value_and_gradients(partial(run, segments, mask, features), arrays)
    assert error(result, expected) < TOLERANCE["float64"]


def library(mask: Mask, q, k, v, *, scale, is_causal, local_window_size, implementation):
    assert implementation == "cudnn" and is_causal and local_window_size == (mask.window - 1, 0) and scale == 1
    return attention(q, k, v, mask=mask, scale=1.0, implementation="plain")


def kernels_of(text: str) -> list[tuple[str, bool, int]]:
    """(name, whether it is causal, number of results) of each cuDNN call in a lowered program."""
    calls = [line for line in text.splitlines() if "__cudnn$" in line]
    results = [line.split("->")[-1].count("tensor<") for line in calls]
    names = [line.split("__cudnn$")[1].split("(")[0] for line in calls]
    return [(name, "22CAUSAL" in line, n) for name, line, n in zip(names, calls, results, strict=True)]


LOWERED = {  # the calls of the forward and the backward pass for tokens, and the sizes of their additive array
    "memory": ("fmhaSoftmax", 0, None),
    "memory with its own queries, and a window": ("fmhaSoftmax", 0, None),
    "a shared bias and memory": ("fmhaScaleBiasSoftmax", 1, "1x4x256x256"),
    "a bias of each query and memory": ("fmhaScaleBiasSoftmax", 1, "1x8x256x256"),
    "documents": ("fmhaScaleBiasSoftmax", 0, "2x1x256x256"),
    "a sink": ("fmhaSoftmax", 0, None),
}


@pytest.mark.parametrize("name", LOWERED)
def test_cudnn_lowers_to_fused_kernels(name, sdpa):
    """Lowered for CUDA: slots are a separate call without a mask, a sink is none, a mask has no gradient, and without a
    bias or documents there is no array of queries by keys."""
    drawn, mask, features = CASES[name]
    arrays, segments = arguments(drawn | {"K": 64}, features, "bfloat16", L=256)

    def loss(arrays):
        return run(segments, mask, features, arrays).astype(jnp.float32).sum()

    text = jax.jit(jax.grad(loss)).trace(arrays).lower(lowering_platforms=("cuda",)).as_text()
    kernel, trained, array = LOWERED[name]
    result = kernels_of(text)
    tokens = [(each, n) for each, causal, n in result if causal]
    slots = [each for each, causal, _ in result if not causal]
    assert sorted(tokens) == [(kernel, 3), (f"{kernel}Backward", 4 + trained)]
    assert sorted(slots) == (["fmhaSoftmax", "fmhaSoftmaxBackward"] if drawn.get("M") and not features.get("sink") else [])
    if array:
        causal = [line for line in text.splitlines() if "__cudnn$" in line and "22CAUSAL" in line]
        assert all(f"tensor<{array}xbf16>" in line for line in causal)
    else:
        assert "256x256x" not in text


def has_gpu() -> bool:
    return jax.default_backend() == "gpu"


@pytest.mark.gpu
@pytest.mark.skipif("not has_gpu()", reason="needs a GPU: cuDNN runs only there")
@pytest.mark.parametrize("name", CASES)
def test_cudnn_equals_plain_on_a_gpu(name):
    """In bfloat16, against `plain` in float32, with two query heads for a key-value head."""
    drawn, mask, features = CASES[name]
    arrays, segments = arguments(drawn | {"K": 64, "G": 2}, features, "bfloat16", L=256)
    wide = jax.tree.map(lambda x: x.astype(jnp.float32), arrays)
    with jax.default_matmul_precision("highest"):
        expected = value_and_gradients(partial(run, segments, mask, features, implementation="plain"), wide)
    result = value_and_gradients(partial(run, segments, mask, features, implementation="cudnn"), arrays)
    assert error(result, expected) < TOLERANCE["bfloat16"]
