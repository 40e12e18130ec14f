"""An option that is set and that nothing reads is an error: setting one changes what the model computes, or is refused.

Each value of each option is set alone in models of every kind, without what it needs beside it. A field that
models/options.py forgets is found here, since it then changes nothing and is not refused.
"""

import functools
import re
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.contracts.variants import ALL, VARIANTS, change, choices, fields, model
from xfresearch.errors import UserError
from xfresearch.models import transformer
from xfresearch.models.context import Context
from xfresearch.resolving import resolve_model

# Options whose effect is not on first values or on the training loss, and what they change.
NOT_IN_THE_LOSS = {
    "blocks.main.attention.kernel": "the implementation",
    "blocks.main.feed_forward.moe.kernel": "the implementation",
    "blocks.main.feed_forward.moe.bias_speed": "the step of the router's bias after an update",
    "blocks.main.attention.trimmed": "set by evaluation, refused in training",
    "max_length": "tables of positions; sequence_length fills it",
    "dtype": "the precision; everything here is computed in bfloat16",
}
MORE = {
    "dropout": [0.1],
    "init_std": [0.1],
    "embedding_std": [0.5],
    "blocks.main.dropout": [0.1],
    "blocks.main.branch_gain": [0.7],
    "blocks.main.norm_alpha": [0.8],
    "blocks.main.norm_alpha_attention": [0.8],
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
    "blocks.main.feed_forward.hidden": [40],
    "blocks.main.feed_forward.moe.experts": [4],
    "blocks.main.feed_forward.moe.jitter": [0.1],
    "blocks.main.feed_forward.moe.balance_loss": [0.5],
    "blocks.main.feed_forward.moe.z_loss": [0.5],
    "blocks.main.feed_forward.moe.routing": ["expert_choice"],
    "init": ["normal"],
    "causal": [False],
    "param_dtype": ["float64"],
}
SIZES = {"width", "depth", "vocab_size", "pattern", "blocks", "blocks.main.attention.heads"}
VALUES = {path: MORE.get(path) or choices().get(path) for path in fields() if path not in SIZES | NOT_IN_THE_LOSS.keys()}
# (option, value, model) that compute the same, and why.
EQUAL = {
    ("causal", False, "attention.kind=slots"): "nothing mixes positions",
    ("blocks.main.layout", "no_residual_between", "layout=fused_output"): "resolved, that model has no W_O to differ by",
}
# Models without a part, and the options of that part.
DAILY = {"layout=all_attention": ".feed_forward.", "attention.kind=lambda": ".attention."}
CONTEXTS = ("base", *DAILY, "feed_forward.kind=moe", "layout=skipless", "norm=dyt", "attention.position=rope")
CONTEXTS += ("attention.rank=6", "attention.span=adaptive", "attention.kind=slots", "attention.rope.scaling=yarn")
CONTEXTS += ("layout=fused_output",)
VALUES |= {path: ["rms"] for path in VALUES if ".norms." in path}


def start_and_loss(config):
    """First values and the loss of a training step; in bfloat16, where every rounding shows."""
    config = replace(config, dtype="bfloat16") if config.dtype == "float32" else config
    params = transformer.init(config, jax.random.key(0))
    tokens_BL = np.random.default_rng(7).integers(0, config.vocab_size, (2, 8)).astype(np.int32)
    positions_BL = np.broadcast_to(np.arange(8), (2, 8))
    # Nothing at its first value: a gain of 1 or a bias of 0 would hide what is done with it.
    moved = jax.tree.map(lambda x: x * 1.3 + 0.1 * jnp.cos(jnp.arange(x.size, dtype=x.dtype)).reshape(x.shape), params)
    model = transformer.bind(config, moved)
    out = model(tokens_BL, Context(positions_BL, key=jax.random.key(1)), layers="unroll")
    return params, model.logits(out.hidden_BLD), out.losses


@functools.cache
def numbers(config) -> list:
    return [np.asarray(leaf, np.float64) for leaf in jax.tree.leaves(start_and_loss(config))]


@functools.cache
def program(config) -> list:
    """The program that computes these numbers and its constants, at a fifth of the cost of running it."""
    traced = jax.make_jaxpr(lambda: start_and_loss(config))()
    text = re.sub(r"0x[0-9a-f]+", "", str(traced.jaxpr))  # where a function lies in memory
    return [np.array(text), *map(np.asarray, traced.consts)]


def differ(ours: list, others: list) -> bool:
    same = len(ours) == len(others) and all(a.shape == b.shape for a, b in zip(ours, others, strict=True))
    return not same or any(not np.array_equal(a, b) for a, b in zip(ours, others, strict=True))


def check(path: str, name: str, computed) -> None:
    """Every value of an option that a model may have changes it."""
    base = VARIANTS[name]
    for value in VALUES[path]:
        try:
            changed = resolve_model(change(base, path, value))
        except UserError:
            continue
        if changed != base and (path, value, name) not in EQUAL:
            assert differ(computed(changed), computed(base)), f"{path}={value!r} changes nothing in {name}"


@pytest.mark.parametrize("path", VALUES)
def test_an_option_changes_the_model_or_is_refused(path, x64):
    assert VALUES[path], "a field without values: name some in MORE or in variants.NUMBERS"
    check(path, "base", program)
    for name, group in DAILY.items():
        if group in path:
            check(path, name, program)


@pytest.mark.long
@pytest.mark.parametrize("name", CONTEXTS)
@pytest.mark.parametrize("path", VALUES)
def test_in_models_of_every_kind(path, name, x64):
    check(path, name, numbers)


B = "blocks.main."
A, F = B + "attention.", B + "feed_forward."


@pytest.mark.parametrize(
    "changes, words",
    [
        ({B + "layout": "all_attention", F + "hidden": 64}, "feed_forward.hidden=64 .* 0, its default, since only a layout"),
        ({A + "query": "merged", A + "clip": 1.0}, "attention.clip=1.0 .* only query other than 'merged' reads it"),
        ({B + "branch_gain": 0.5}, "branch_gain=0.5 .* only a skipless layout"),
        ({A + "span_loss": 0.1}, "span_loss=0.1 .* only span='adaptive'"),
        ({A + "memory_heads": "shared"}, "memory_heads='shared' .* only memory_slots in the softmax"),
        ({F + "gated_hidden": "matched", F + "hidden": 0}, "gated_hidden='matched' .* only a gated kind"),
        ({F + "hidden": 50, F + "hidden_factor": 3.0}, "hidden_factor=3.0 .* its default, where hidden=50 is given"),
        ({A + "rope.theta": 100.0}, "rope.theta=100.0 .* only position='rope'"),
        ({A + "rank": 33, A + "query": "merged"}, "rank=33 .* at most model.width=32"),
        ({B + "layout": "post_norm"}, "final_norm='layer' .* 'none' where the last block, of layout='post_norm'"),
        ({B + "layout": "resi_dual", "final_norm": "none"}, "final_norm='none' .* a norm under layout='resi_dual'"),
        ({F + "kind": "moe", F + "moe.top_k": 1}, "top_k=1 .* at least 2 with renormalise=True"),
        ({A + "kind": "slots"}, "memory_slots=0 .* at least 1 under kind='slots'"),
        (
            {B + "layout": "fused_output", A + "memory_slots": 4, A + "memory_activation": "relu"},
            "memory_activation='relu' .* 'softmax' under layout='fused_output'",
        ),
    ],
)
def test_refusals_say_who_reads_the_option(changes, words):
    with pytest.raises(UserError, match=words):
        model(changes)


def test_a_resolved_config_resolves_to_itself():
    for name, config in ALL.items():
        assert resolve_model(config) == config, name
