"""Several sets of keys under one softmax: the merge and its gradients, and two wrong ways to merge."""

import re
from functools import partial

import jax
import jax.numpy as jnp
import pytest

from tests.kernels import attention_cases
from tests.kernels.attention_cases import draw, error, plain, value_and_gradients
from tests.tolerances import TOLERANCE, relative_error
from xfresearch.kernels import chunked_attention
from xfresearch.kernels.chunked_attention import chunked
from xfresearch.kernels.masks import CAUSAL, EVERYTHING, Mask
from xfresearch.kernels.merged_attention import merge

CASES = {
    "memory": ({"L": 9, "M": 5}, CAUSAL),
    "documents and memory": ({"L": 9, "M": 2, "segments": True, "V": 3}, CAUSAL),
    "documents and a window": ({"L": 11, "segments": True, "G": 1}, Mask(window=4)),
    "memory and a window that excludes the token itself": ({"L": 9, "M": 1, "G": 4}, Mask(nearest=1, window=4)),
    "a query that sees no key": ({"L": 9}, Mask(nearest=1)),
    "not causal": ({"L": 9, "M": 5, "segments": True}, EVERYTHING),
    "memory with its own queries": ({"L": 9, "M": 5, "own": True, "segments": True}, CAUSAL),
}


def scaled(function, arrays, segments, mask):
    q, k, v, memory = arrays
    q, memory = attention_cases.scaled(q, memory)
    return function(q, k, v, memory, segments, mask)


@pytest.mark.parametrize("name", CASES)
def test_chunked_equals_plain(name, x64, monkeypatch):
    """With chunk sizes that divide the length and that do not, without a softcap and with one."""
    drawn, mask = CASES[name]
    arrays, segments = draw(**drawn, K=6, dtype="float64")
    for size, cap in ((3, 0.0), (4, 1.5)):
        monkeypatch.setattr(chunked_attention, "CHUNK", size)
        capped = partial(chunked, softcap=cap)
        expected = value_and_gradients(lambda arrays, cap=cap: plain(arrays, segments, mask, softcap=cap), arrays)
        result = value_and_gradients(lambda arrays, f=capped: scaled(f, arrays, segments, mask), arrays)
        assert error(result, expected) < TOLERANCE["float64"]


def test_chunked_holds_no_array_of_queries_by_keys():
    arrays, segments = draw(B=1, L=2048, M=700, H=1, G=1, K=8, segments=True)

    def shapes(function) -> set[tuple[int, ...]]:
        step = jax.grad(lambda arrays: function(arrays, segments, CAUSAL).sum())
        found = re.findall(r"\[([\d,]+)\]", str(jax.make_jaxpr(step)(arrays)))
        return {tuple(int(n) for n in shape.split(",")) for shape in found}

    def squares(function) -> set:
        return {shape for shape in shapes(function) if sum(n > 512 for n in shape) > 1}

    assert not squares(partial(scaled, chunked))
    assert (1, 1, 2048, 2748) in squares(plain)


# Wrong ways to merge


def library(q, k, v, **named):
    """(o, lse_BHL) of jax.nn.dot_product_attention."""
    o, lse_BLH = jax.nn.dot_product_attention(q, k, v, implementation="xla", return_residual=True, **named)
    return o, lse_BLH.swapaxes(1, 2)


def merged_by_autodiff(arrays):
    q, k, v, memory = arrays
    slots = [jnp.broadcast_to(m, (q.shape[0], *m.shape)) for m in (memory.key, memory.value)]
    return merge([library(q, k, v, is_causal=True), library(q, *slots)])[0]


def test_merging_the_results_of_a_library_by_autodiff_gives_wrong_gradients(x64):
    """The outputs are right, so a test of outputs does not find the error."""
    arrays, _ = draw(L=9, M=5, dtype="float64")
    right = value_and_gradients(plain, arrays)
    wrong = value_and_gradients(merged_by_autodiff, arrays)
    assert relative_error(wrong[0], right[0]) < TOLERANCE["float32"]  # the dtype of the library's softmax
    assert error(wrong[1], right[1]) > 0.05
    ours = value_and_gradients(lambda arrays: scaled(chunked, arrays, None, CAUSAL), arrays)
    assert error(ours, right) < TOLERANCE["float64"]


@pytest.mark.parametrize("memory_first", [True, False])
def test_a_causal_mask_of_a_library_over_joined_keys_is_wrong(memory_first, x64):
    """The mask is top-left: it silently hides slots, or tokens, from the first queries."""
    arrays, _ = draw(L=9, M=5, dtype="float64")
    q, k, v, memory = arrays
    joined = [
        jnp.concatenate([jnp.broadcast_to(m, (2, *m.shape)), x][:: 1 if memory_first else -1], 1)
        for m, x in ((memory.key, k), (memory.value, v))
    ]
    right = plain(arrays)
    assert relative_error(jax.nn.dot_product_attention(q, *joined, is_causal=True), right) > 0.05
    assert relative_error(scaled(chunked, arrays, None, CAUSAL), right) < TOLERANCE["float64"]
