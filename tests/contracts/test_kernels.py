"""Contract 6: every kernel that supports a variant gives the results of the plain one, including gradients."""

import itertools
import typing

import jax
import numpy as np
import pytest

from tests.contracts.passes import forward
from tests.contracts.variants import (
    ALL,
    LENGTH,
    ROOT,
    VARIANTS,
    in_float64,
    marked,
    random_params,
    tokens_for,
    tree_error,
)
from tests.daily import daily
from tests.tolerances import TOLERANCE, relative_error
from xfresearch.kernels.attention import REFUSALS
from xfresearch.models.context import Execution
from xfresearch.models.feed_forwards.activations import ACTIVATIONS
from xfresearch.models.mixers.softmax.attention import training_call
from xfresearch.models.mixers.softmax.config import SoftmaxConfig
from xfresearch.models.place import Rows
from xfresearch.options.run_options import TrainingConfig

# Kernels that support no variant here (they need longer sequences or another device), and the tests that cover them.
ELSEWHERE = {
    "banded": "tests/kernels/test_attention.py",
    "splash": "tests/kernels/test_splash_attention.py",
    "cudnn": "tests/kernels/test_cudnn_attention.py",
    "tokamax": "tests/kernels/test_tokamax.py",
    "ring": "tests/kernels/test_attention_on_mesh.py",
    "megablox": "tests/kernels/test_grouped_matmul.py",
}


def fast(option: str) -> list[str]:
    """Values of an option of training, without the plain kernel and 'auto'."""
    names = typing.get_args(typing.get_type_hints(TrainingConfig)[option])
    return [name for name in names if name not in ("auto", "plain", "ragged", *ELSEWHERE)]


def supports(kernel: str, config) -> bool:
    """Whether an attention kernel supports a model in these tests. If not, selecting it is an error."""
    places = [place for _, _, place in config.places() if isinstance(place.options, SoftmaxConfig)]
    calls = [training_call(place, LENGTH, Rows(segments=True)) for place in places]
    return bool(calls) and (kernel == "auto" or not any(map(REFUSALS[kernel], calls)))


ATTENTION = fast("attention_kernel")
MOE = fast("expert_kernel")

# The default run has the first pair; each other pair takes as long again.
PAIRS = [*itertools.zip_longest(ATTENTION, MOE, fillvalue="auto")]


def work(block) -> tuple:
    """What a block needs of the kernels: shapes, and whether its experts are gated."""
    a = block.attention
    moe = getattr(block.sublayers.get("feed_forward"), "moe", None)
    sparse = moe and (moe.experts, moe.top_k, ACTIVATIONS[moe.expert].gated)
    return *(getattr(a, name, None) for name in ("kind", "heads", "kv_heads", "head_size", "memory_slots")), sparse


def _users() -> dict:
    """Variants with a block whose work no earlier variant has."""
    collected = {}
    seen = set()
    for name, config in ALL.items():
        new = set(map(work, config.blocks.values())) - seen
        collected |= {name: config} if new else {}
        seen |= new
    return collected


USERS = _users()
SEGMENTS_BL = np.array([[1, 1, 1, 2, 2, 2, 2, 0], [1] * 8], np.int32)


def loss_and_gradients(config, params, tokens_BL, **execution):
    """A loss that depends on every logit and auxiliary loss, and its gradients, for packed documents with padding."""
    weights_BLV = np.random.default_rng(3).standard_normal((*tokens_BL.shape, config.vocab_size))

    def loss(params):
        logits, losses = forward(config, params, tokens_BL, segments_BL=SEGMENTS_BL, **execution)
        return (weights_BLV * logits).sum() + sum(value.sum() for value in losses.values())

    return jax.jit(jax.value_and_grad(loss))(params)


def check(config, attention_kernel, expert_kernel):
    config = in_float64(config)
    tokens_BL = tokens_for(config)
    params = random_params(config)
    value, gradients = loss_and_gradients(config, params, tokens_BL)
    execution = Execution(attention_kernel if supports(attention_kernel, config) else "auto", expert_kernel)
    fast_value, fast_gradients = loss_and_gradients(config, params, tokens_BL, execution=execution)
    assert relative_error(fast_value, value) < TOLERANCE["float64"]
    assert tree_error(fast_gradients, gradients) < TOLERANCE["float64"]


# Sizes of heads, positions, numbers of key-value heads of the mixers besides softmax, and other experts are the same code.
ALIKE = ("configs/", "attention[", "feed_forward[", "attention.query=", "attention.qk_norm_over")
ALIKE += ("attention.head_size", "attention.position=")
DEFAULT_RUN = [name for name in USERS if not name.startswith(ALIKE)]


@pytest.mark.parametrize("name", marked(DEFAULT_RUN, USERS))
@pytest.mark.parametrize("attention_kernel, expert_kernel", daily(PAIRS[:1], PAIRS))
def test_a_fast_kernel_equals_the_plain_one(name, attention_kernel, expert_kernel, x64):
    check(USERS[name], attention_kernel, expert_kernel)


def test_auto_equals_plain(x64):
    check(VARIANTS["pattern"], "auto", "auto")


def test_every_attention_kernel_is_compared_somewhere():
    for name in REFUSALS.keys() - {"plain"}:
        users = [config for config in ALL.values() if supports(name, config)]
        assert users if name in ATTENTION else (ROOT / ELSEWHERE[name]).exists()
