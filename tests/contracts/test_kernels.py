"""Contract 6: every implementation a variant can choose gives what the plain one gives, gradients included."""

import itertools
import typing

import jax
import numpy as np
import pytest
from xfresearch.models.kernel_choices import attention_call, with_kernels

from tests.contracts.variants import (
    ALL,
    LENGTH,
    ROOT,
    VARIANTS,
    change,
    fields,
    forward,
    in_float64,
    plain,
    random_params,
    tokens_for,
    tree_error,
)
from tests.tolerances import TOLERANCE, relative_error
from xfresearch.kernels.attention import REFUSALS
from xfresearch.models.feed_forwards.activations import ACTIVATIONS

# Kernels that serve nothing here (longer sequences, a TPU), and the test that compares them with plain.
ELSEWHERE = {
    "banded": "tests/kernels/test_attention.py",
    "splash": "tests/kernels/test_splash_attention.py",
    "cudnn": "tests/kernels/test_merged_attention.py",
    "pallas": "tests/kernels/test_merged_attention.py",
    "ring": "tests/kernels/test_attention_on_mesh.py",
    "megablox": "tests/kernels/test_grouped_matmul.py",
}


def fast(path: str) -> list[str]:
    """What a field offers besides the plain implementation and the choice among all."""
    return [kind for kind in typing.get_args(fields()[path]) if kind not in ("auto", "plain", "ragged", *ELSEWHERE)]


def serves(kernel: str, config, block) -> bool:
    """Whether an attention kernel serves a block in these tests; where it does not, asking for it is an error."""
    if block.attention.kind != "softmax":
        return False
    return kernel == "auto" or not REFUSALS[kernel](attention_call(config, block, LENGTH, segments=True))


def attention_kernels(config, kernel: str):
    """`config` with `kernel` in those blocks that it serves."""
    served = [name for name, block in config.blocks.items() if serves(kernel, config, block)]
    for name in served:
        config = change(config, f"blocks.{name}.attention.kernel", kernel)
    return config


ATTENTION = fast("blocks.main.attention.kernel")
MOE = fast("blocks.main.feed_forward.moe.kernel")


# The first of each on every run; the others take as long again.
PAIRS = [
    pytest.param(*pair, marks=() if i == 0 else pytest.mark.long)
    for i, pair in enumerate(itertools.zip_longest(ATTENTION, MOE, fillvalue="auto"))
]


def work(block) -> tuple:
    """What a block asks of the kernels: shapes, and how many products an expert is."""
    a, moe = block.attention, block.feed_forward.moe
    sparse = block.feed_forward.kind == "moe" and (moe.experts, moe.top_k, ACTIVATIONS[moe.expert].gated)
    return a.heads, a.kv_heads, a.head_size, a.memory_slots, sparse


def _users() -> dict:
    """Variants with a block whose work no variant before them has."""
    found, seen = {}, set()
    for name, config in ALL.items():
        new = set(map(work, config.blocks.values())) - seen
        found |= {name: config} if new else {}
        seen |= new
    return found


USERS = _users()
SEGMENTS_BL = np.array([[1, 1, 1, 2, 2, 2, 2, 0], [1] * 8], np.int32)


def loss_and_gradients(config, params, tokens_BL):
    """A loss that every logit and auxiliary loss weighs in, and its gradients, over packed documents with padding."""
    weights_BLV = np.random.default_rng(3).standard_normal((*tokens_BL.shape, config.vocab_size))

    def loss(params):
        logits, losses = forward(config, params, tokens_BL, segments_BL=SEGMENTS_BL)
        return (weights_BLV * logits).sum() + sum(value.sum() for value in losses.values())

    return jax.jit(jax.value_and_grad(loss))(params)


def check(config, attention_kernel, moe_kernel):
    config, tokens_BL = in_float64(config), tokens_for(config)
    params = random_params(config)
    value, gradients = loss_and_gradients(plain(config), params, tokens_BL)
    config = attention_kernels(with_kernels(config, "auto", moe_kernel), attention_kernel)
    fast_value, fast_gradients = loss_and_gradients(config, params, tokens_BL)
    assert relative_error(fast_value, value) < TOLERANCE["float64"]
    assert tree_error(fast_gradients, gradients) < TOLERANCE["float64"]


@pytest.mark.parametrize("name", USERS)
@pytest.mark.parametrize("attention_kernel, moe_kernel", PAIRS)
def test_a_fast_kernel_equals_the_plain_one(name, attention_kernel, moe_kernel, x64):
    check(USERS[name], attention_kernel, moe_kernel)


def test_auto_equals_the_plain_one(x64):
    check(VARIANTS["pattern"], "auto", "auto")


def test_every_attention_kernel_is_compared_somewhere():
    for name in REFUSALS.keys() - {"plain"}:
        users = [c for c in ALL.values() for b in c.blocks.values() if serves(name, c, b)]
        assert users if name in ATTENTION else (ROOT / ELSEWHERE[name]).exists()
