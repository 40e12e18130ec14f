"""Splash attention in Pallas's interpreter on CPU, values and gradients, against `plain`."""

from itertools import combinations, product

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.daily import daily
from tests.kernels.attention_cases import draw, error, plain, scaled, value_and_gradients
from tests.tolerances import TOLERANCE
from xfresearch.kernels import attention as attention_module
from xfresearch.kernels import splash_attention
from xfresearch.kernels.attention import attention
from xfresearch.kernels.masks import Mask, Slots
from xfresearch.kernels.splash_attention import LazyMask, splash


@pytest.fixture(autouse=True)
def interpreted(monkeypatch):
    monkeypatch.setattr(splash_attention, "INTERPRET", True)
    splash_attention.make_kernel.cache_clear()


# Lengths and slots are mostly no multiples of 128. Heads are grouped; some values differ in size from keys.
CASES = {
    "memory": ({"L": 150, "M": 5, "V": 8}, Mask(), 0.0),
    "memory under a softcap": ({"L": 150, "M": 5, "V": 8}, Mask(), 1.5),
    "documents and memory": ({"L": 128, "M": 130, "segments": True}, Mask(), 0.0),
    "documents and memory under a softcap": ({"L": 128, "M": 130, "segments": True}, Mask(), 1.5),
    "documents and a window": ({"L": 140, "segments": True}, Mask(window=30), 0.0),
    "memory with its own queries": ({"L": 150, "M": 5, "own": True}, Mask(), 0.0),
    "memory and a window that excludes the token itself": ({"L": 150, "M": 5, "G": 1}, Mask(nearest=1, window=30), 0.0),
    "not causal": ({"L": 150, "M": 5, "B": 1}, Mask(causal=False), 0.0),
}


# Documents and memory under a softcap are in the next test.
DAILY = ("documents and memory", "memory with its own queries", "memory and a window that excludes the token itself")


@pytest.mark.parametrize("name", daily(DAILY, CASES))
def test_splash_equals_plain(name):
    drawn, mask, softcap = CASES[name]
    arrays, segments = draw(**drawn)

    def fast(arrays):
        q, k, v, memory = arrays
        q, memory = scaled(q, memory)
        return splash(q, k, v, memory, segments, mask, softcap=softcap)

    expected = value_and_gradients(lambda arrays: plain(arrays, segments, mask, softcap=softcap), arrays)
    assert error(value_and_gradients(fast, arrays), expected) < TOLERANCE["float32"]


def test_attention_passes_all_arguments_to_splash(monkeypatch):
    """Scale, softcap, segments, memory shared by all heads, window: called as on a TPU, and under remat."""
    monkeypatch.setattr(attention_module, "platform", lambda mesh=None: "tpu")
    (q, k, v, _), segments = draw(L=140, segments=True)
    memory = Slots(0.5 * q, *(x[0, :6, :1] for x in (k, v)))
    named = {
        "q_segments_BL": segments[0],
        "k_segments_BS": segments[1],
        "scale": 0.4,
        "mask": Mask(window=50),
        "softcap": 1.5,
    }

    @jax.checkpoint
    def fast(arrays):
        q, k, v, memory = arrays
        return attention(q, k, v, memory=(memory.key, memory.value), memory_q_BLHK=memory.query, **named)

    assert "splash" in str(jax.make_jaxpr(fast)((q, k, v, memory)))
    expected = value_and_gradients(
        lambda a: plain(a, segments, Mask(window=50), scale=0.4, softcap=1.5), (q, k, v, memory)
    )
    assert error(value_and_gradients(fast, (q, k, v, memory)), expected) < TOLERANCE["float32"]


def test_a_sink_beside_splash(monkeypatch):
    """A learned sink is merged with the kernel's result, and no slot is among the keys."""
    (q, k, v, _), _ = draw(B=1, L=128, H=2, G=1)
    slot = tuple(jnp.zeros((1, 1, 16)) for _ in range(2))

    def run(platform, arrays):
        monkeypatch.setattr(attention_module, "platform", lambda mesh=None: platform)
        q, k, v, sink_H = arrays
        return attention(q, k, v, memory=slot, sink_H=sink_H)

    arrays = q, k, v, jnp.asarray([0.5, -1.0])
    result = value_and_gradients(lambda arrays: run("tpu", arrays), arrays)
    assert error(result, value_and_gradients(lambda arrays: run("cpu", arrays), arrays)) < TOLERANCE["float32"]


MASKS = (Mask(), Mask(window=3), Mask(nearest=1, window=2), Mask(causal=False))


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("slots", [0, 1, 4])
@pytest.mark.parametrize("offset", [0, 6, 12])
def test_every_block_of_a_lazy_mask_equals_that_block_of_the_full_mask(mask, slots, offset):
    """Blocks with one value are computed only at their edges, and shared."""
    mask = LazyMask(6, 10, mask, seen=6, slots=slots, offset=offset)
    shared = 0
    whole_LS = np.broadcast_to(mask.mask_function(np.arange(6)[:, None], np.arange(10)[None]), (6, 10))
    for block in product(*([slice(*ends) for ends in combinations(range(size + 1), 2)] for size in (6, 10))):
        np.testing.assert_array_equal(mask[block], whole_LS[block])
        shared += mask[block] is mask[block]
    assert shared > 300


def test_no_array_of_queries_by_keys():
    """With a window, memory and many blocks: the traced program has no mask or logits [L, S]."""
    (q, k, v, memory), _ = draw(B=1, L=2048, M=256, H=1, G=1)
    mask = Mask(window=100)
    text = str(jax.make_jaxpr(lambda q: splash(q, k, v, memory, None, mask))(q))
    assert "[1,2048,16]" in text.replace("f32", "")
    assert not any(f"{rows},{columns}]" in text for rows in (2048, 2304) for columns in (2048, 2304))
    assert jnp.isfinite(splash(q, k, v, memory, None, mask)).all()
