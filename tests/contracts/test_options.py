"""Setting an option changes what the model computes or raises an error. No option is silently ignored.

Each value of each option is set alone in models of every kind, without the other options that it needs. If the `needs`
of an option are wrong, setting it changes nothing and raises no error, so the test fails.
"""

import functools
import re
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.contracts.variants import ALL, VARIANTS, change, choices, fields, model
from xfresearch.config.groups import to_config_dict
from xfresearch.config.resolving import model_from
from xfresearch.errors import UserError
from xfresearch.models import transformer
from xfresearch.models.context import Context
from xfresearch.models.model_config import resolve_model

# Options that change neither initial values nor the training loss, and what they change.
NOT_IN_THE_LOSS = {
    "blocks.main.feed_forward[moe].moe.bias_speed": "the step of the router's bias after an update",
    "max_length": "tables of positions; sequence_length sets it",
    "dtype": "the precision; these tests compute in bfloat16",
}
MORE = {
    "dropout": [0.1],
    "init_std": [0.1],
    "embedding_std": [0.5],
    "blocks.main.dropout": [0.1],
    "blocks.main.branch_gain": [0.7],
    "blocks.main.norm_alpha": [0.8],
    "blocks.main.norm_cast": ["before_gain"],
    "blocks.main.attention.dropout": [0.1],
    "blocks.main.attention.span_ramp": [4],
    "blocks.main.attention.span_loss": [0.1],
    "blocks.main.attention.t5_buckets": [8],
    "blocks.main.attention.t5_distance": [17],
    "blocks.main.attention.rope.theta": [100.0],
    "blocks.main.attention.rope.factor": [2.0],
    # Far enough from the defaults that YaRN's blend, which ends at whole dimensions, moves in a head of 8.
    "blocks.main.attention.rope.low_frequency": [0.1],
    "blocks.main.attention.rope.high_frequency": [1.001],
    "blocks.main.attention.rope.original_length": [16],
    "blocks.main.attention.rope.attention_factor": [2.0],
    "blocks.main.attention.clip": [0.1],
    "blocks.main.attention[slots].dropout": [0.1],
    "blocks.main.attention[differential].dropout": [0.1],
    "blocks.main.attention[slots].memory_slots": [8],
    "blocks.main.feed_forward.hidden": [40],
    "blocks.main.feed_forward[moe].moe.experts": [4],
    "blocks.main.feed_forward[moe].moe.jitter": [0.1],
    "blocks.main.feed_forward[moe].moe.balance_loss": [0.5],
    "blocks.main.feed_forward[moe].moe.z_loss": [0.5],
    "blocks.main.feed_forward[moe].moe.routing": ["expert_choice"],
    "init": ["normal"],
    "causal": [False],
    "param_dtype": ["float64"],
}
SIZES = {"width", "depth", "vocab_size", "pattern", "segments", "blocks.main.attention.heads"}
SIZES |= {"blocks.main.attention[slots].heads", "blocks.main.attention[lambda].heads"}
SIZES |= {"blocks.main.attention[differential].heads"}
VALUES = {path: MORE.get(path) or choices().get(path) for path in fields() if path not in SIZES | NOT_IN_THE_LOSS.keys()}
# (option, value, model) that compute the same, and the reason.
EQUAL = {
    ("causal", False, "attention.kind=slots"): "slots do not mix positions",
    ("blocks.main.layout", "no_residual_between", "layout=fused_output"): "after resolving, that model has no W_O",
}
# Models that lack a part, and the options of this part.
WITHOUT_A_PART = {"layout=all_attention": ".feed_forward.", "attention.kind=lambda": ".attention."}
CONTEXTS = ("base", *WITHOUT_A_PART, "feed_forward.kind=moe", "layout=skipless", "norm=dyt", "attention.position=rope")
CONTEXTS += ("attention.rank=6", "attention.span=adaptive", "attention.kind=slots", "attention.rope.scaling=yarn")
CONTEXTS += ("layout=fused_output",)
OF_A_SITE = {"kind": ["rms"], "gain": [False], "bias": [True], "epsilon": [0.1], "alpha": [0.8]}
VALUES |= {path: OF_A_SITE[path.rsplit(".", 1)[-1]] for path in VALUES if ".norms." in path}


def init_and_loss(config):
    """Initial values, logits and auxiliary losses. In bfloat16, so that differences in rounding show."""
    config = replace(config, dtype="bfloat16") if config.dtype == "float32" else config
    params = transformer.init(config, jax.random.key(0))
    tokens_BL = np.random.default_rng(7).integers(0, config.vocab_size, (2, 8)).astype(np.int32)
    positions_BL = np.broadcast_to(np.arange(8), (2, 8))
    # Change all initial values: a gain of 1 or a bias of 0 would hide how it is used.
    moved = jax.tree.map(lambda x: x * 1.3 + 0.1 * jnp.cos(jnp.arange(x.size, dtype=x.dtype)).reshape(x.shape), params)
    model = transformer.bind(config, moved)
    out = model(tokens_BL, Context(positions_BL, key=jax.random.key(1)), layers="unroll")
    return params, model.logits(out.hidden_BLD), out.losses


@functools.cache
def numbers(config) -> list:
    return [np.asarray(leaf, np.float64) for leaf in jax.tree.leaves(init_and_loss(config))]


@functools.cache
def program(config) -> list:
    """The program that computes these numbers, and its constants. Tracing takes a fifth of the time of running it."""
    traced = jax.make_jaxpr(lambda: init_and_loss(config))()
    text = re.sub(r"0x[0-9a-f]+", "", str(traced.jaxpr))  # addresses of functions
    return [np.array(text), *map(np.asarray, traced.consts)]


def differ(ours: list, others: list) -> bool:
    same = len(ours) == len(others) and all(a.shape == b.shape for a, b in zip(ours, others, strict=True))
    return not same or any(not np.array_equal(a, b) for a, b in zip(ours, others, strict=True))


def check(path: str, name: str, computed) -> None:
    """Asserts that every value of the option that is valid in variant `name` changes `computed(model)`."""
    base = VARIANTS[name]
    for value in VALUES[path]:
        try:
            changed = model_from(to_config_dict(change(base, path, value)))  # read as a user's, so that values are checked
        except UserError:
            continue
        if changed != base and (path, value, name) not in EQUAL:
            assert differ(computed(changed), computed(base)), f"{path}={value!r} changes nothing in {name}"


@pytest.mark.parametrize("path", VALUES)
def test_an_option_changes_the_model_or_is_refused(path, x64):
    assert VALUES[path], "an option without values: add some to MORE or to variants.NUMBERS"
    check(path, "base", program)
    for name, group in WITHOUT_A_PART.items():
        if group in path:
            check(path, name, program)


@pytest.mark.long
@pytest.mark.parametrize("name", CONTEXTS)
@pytest.mark.parametrize("path", VALUES)
def test_an_option_changes_models_of_every_kind_or_is_refused(path, name, x64):
    check(path, name, numbers)


B = "blocks.main."
A, F = B + "attention.", B + "feed_forward."


@pytest.mark.parametrize(
    "changes, words",
    [
        ({A + "query": "merged", A + "clip": 1.0}, "attention.clip=1.0 .* read only with query other than 'merged'"),
        ({A + "span_loss": 0.1}, "span_loss=0.1 .* read only with span='adaptive'"),
        ({A + "memory_heads": "shared"}, "memory_heads='shared' .* read only with memory_slots above 0"),
        ({F + "hidden": 50, F + "hidden_factor": 3.0}, "hidden_factor=3.0 .* its default, with hidden=50"),
        ({A + "rope.theta": 100.0}, "rope.theta=100.0 .* read only with position='rope'"),
        ({A + "rank": 33, A + "query": "merged"}, "rank=33 .* at most model.width=32"),
        ({B + "layout": "post_norm"}, "final_norm='layer' .* 'none' if the last block, with layout='post_norm'"),
        ({B + "layout": "resi_dual", "final_norm": "none"}, "final_norm='none' .* a norm with layout='resi_dual'"),
        ({F + "kind": "moe", F + "moe.top_k": 1}, "top_k=1 .* at least 2 with renormalise=True"),
        (
            {B + "layout": "fused_output", A + "memory_slots": 4, A + "memory_activation": "relu"},
            "memory_activation='relu' .* 'softmax' with a layout whose feed-forward reads the heads",
        ),
        ({B + "norms.attention_in.kind": "none", B + "norms.attention_in.gain": False}, "attention_in.gain=False .* unset"),
        ({B + "norms.attention_in.alpha": 1.0}, "attention_in.alpha=1.0 .* a norm of kind 'layer' does not have it"),
    ],
)
def test_errors_say_which_setting_the_option_needs(changes, words):
    with pytest.raises(UserError, match=words):
        model(changes)


@pytest.mark.parametrize(
    "changes, words",
    [
        ({B + "layout": "all_attention", F + "hidden": 64}, "feed_forward"),
        ({B + "branch_gain": 0.5}, "branch_gain"),
        ({F + "gated_hidden": "matched"}, "gated_hidden"),
        ({A + "kind": "lambda", A + "window": 3}, "window"),
    ],
)
def test_an_option_that_a_kind_does_not_have_is_an_error(changes, words):
    with pytest.raises(UserError, match=f"{words}.*there is no such option"):
        model(changes)


def test_a_resolved_config_resolves_to_itself():
    for name, config in ALL.items():
        assert resolve_model(config) == config, name
