"""Setting an option changes what the model computes or raises an error. No option is silently ignored.

Each value of each option is set alone in a model of the kind that has it, without the other options that it needs. If
the `needs` of an option are wrong, setting it changes nothing and raises no error, so the test fails. It is also set
with the options that it needs, in the first variant that reads it. An option that a kind inherits is tried like an
option of its own. An option that only adds parameters changes nothing: something has to be computed from them.
"""

import functools
import re
from dataclasses import dataclass, replace
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.interpreters.partial_eval import dce_jaxpr

from tests.contracts import variants
from tests.contracts.variants import ALL, VARIANTS, change, choices, fields, inherited, model, needed, single
from tests.covers import plain_path
from xfresearch.models import kinds, transformer
from xfresearch.models.block_config import BLOCKS
from xfresearch.models.context import Context
from xfresearch.models.mixers.softmax.attention import Attention
from xfresearch.models.mixers.softmax.config import SoftmaxConfig
from xfresearch.models.model_config import resolve_model
from xfresearch.options.fields import leaves, option
from xfresearch.options.groups import to_config_dict
from xfresearch.run_config.resolving import model_from
from xfresearch.runtime.errors import UserError

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
SIZES = variants.SIZES - MORE.keys()
CHOICES = choices()
VALUES = {path: MORE.get(path) or CHOICES.get(path) for path in fields() if path not in SIZES | NOT_IN_THE_LOSS.keys()}
INHERITED = inherited()
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
VALUES |= {path: VALUES[first] for path, first in INHERITED.items() if first in VALUES}


class Computed(NamedTuple):
    shapes: list  # of the parameters
    initial: list  # values of the parameters, or the program that computes them
    outputs: list  # logits and auxiliary losses, or their program


def init(config):
    return transformer.init(config, jax.random.key(0))


def outputs(config, params):
    """Logits and auxiliary losses. In bfloat16, so that differences in rounding show."""
    config = replace(config, dtype="bfloat16") if config.dtype == "float32" else config
    tokens_BL = np.random.default_rng(7).integers(0, config.vocab_size, (2, 8)).astype(np.int32)
    positions_BL = np.broadcast_to(np.arange(8), (2, 8))
    # Change all initial values: a gain of 1 or a bias of 0 would hide how it is used.
    moved = jax.tree.map(lambda x: x * 1.3 + 0.1 * jnp.cos(jnp.arange(x.size, dtype=x.dtype)).reshape(x.shape), params)
    model = transformer.bind(config, moved)
    out = model(tokens_BL, Context(positions_BL, key=jax.random.key(1)), layers="unroll")
    return model.logits(out.hidden_BLD), out.losses


@functools.cache
def numbers(config) -> Computed:
    params = init(config)
    actual = ([np.asarray(leaf, np.float64) for leaf in jax.tree.leaves(each)] for each in (params, outputs(config, params)))
    return Computed(shapes_of(params), *actual)


@functools.cache
def program(config) -> Computed:
    """The programs that compute these numbers, and their constants. Tracing takes a fifth of the time of running them."""
    params = transformer.abstract(config)
    initial = jax.make_jaxpr(functools.partial(init, config))()
    logits = jax.make_jaxpr(functools.partial(outputs, config))(params)
    needed, _ = dce_jaxpr(logits.jaxpr, True)  # without parameters that nothing is computed from
    return Computed(shapes_of(params), text(initial.jaxpr, initial.consts), text(needed, logits.consts))


def shapes_of(params) -> list:
    return [leaf.shape for leaf in jax.tree.leaves(params)]


def text(jaxpr, consts) -> list:
    without_addresses = re.sub(r"0x[0-9a-f]+", "", str(jaxpr))
    return [np.array(without_addresses), *map(np.asarray, consts)]


def differ(ours: Computed, others: Computed) -> bool:
    return unequal(ours.outputs, others.outputs) or (
        ours.shapes == others.shapes and unequal(ours.initial, others.initial)
    )


def unequal(ours: list, others: list) -> bool:
    same = len(ours) == len(others) and all(a.shape == b.shape for a, b in zip(ours, others, strict=True))
    return not same or any(not np.array_equal(a, b) for a, b in zip(ours, others, strict=True))


def check(path: str, value, base, name: str, computed) -> None:
    """Asserts that the value of the option changes `computed(model)` of the model `base`, if it is valid there."""
    try:
        changed = model_from(to_config_dict(change(base, path, value)))  # read as a user's, so that values are checked
    except UserError:
        return
    if changed != base and (path, value, name) not in EQUAL:
        assert differ(computed(changed), computed(base)), f"{path}={value!r} changes nothing in {name}"


@functools.cache
def readers() -> dict:
    """{(plain path, dataclass field) of an option: the changes of the first variant that reads it}"""
    collected = {}
    for name, changes in single().items():
        for leaf in leaves(VARIANTS[name]) if name in VARIANTS else ():
            if not leaf.unread:
                collected.setdefault((leaf.path, id(leaf.field)), changes)
    return collected


def starts(path: str, value):
    """(name, model) of models in which the option is set: one of the kind that has it, with the options of the kind
    alone, with those that the value needs, and with those of the first variant that reads it."""
    first = INHERITED.get(path, path)
    own = needed(path, None)
    field = {leaf.path: id(leaf.field) for leaf in leaves(model(own))}.get(plain_path(path))
    seen = []
    for changes in ({**own}, needed(first, value), {**readers().get((plain_path(path), field), {})}):
        changes |= needed(path, value)
        changes = {name: each for name, each in changes.items() if plain_path(name) != plain_path(path)}
        try:
            base = model(changes)
        except UserError:  # this kind lacks an option that others need
            continue
        if base not in seen:
            seen.append(base)
            yield ", ".join(f"{plain_path(name)}={each}" for name, each in changes.items()) or "base", base


@pytest.mark.parametrize("path", VALUES)
def test_an_option_changes_the_model_or_is_refused(path, x64):
    assert VALUES[path], "an option without values: add some to MORE or to its case in tests/variants/"
    for value in VALUES[path]:
        for name, base in starts(path, value):
            check(path, value, base, name.removeprefix("blocks.main."), program)
        for name, group in WITHOUT_A_PART.items():
            if group in path:
                check(path, value, VARIANTS[name], name, program)


@pytest.mark.long
@pytest.mark.parametrize("name", CONTEXTS)
@pytest.mark.parametrize("path", VALUES)
def test_an_option_changes_models_of_every_kind_or_is_refused(path, name, x64):
    for value in VALUES[path]:
        check(path, value, VARIANTS[name], name, numbers)


@dataclass(frozen=True)
class ForgetfulConfig(SoftmaxConfig):
    kind: str = option("forgetful", "kind of mixer")


class Forgetful(Attention):
    """It inherits the steps and their marks, but leaves the slots out of the softmax."""

    def slots(self, dtype):
        return None


def test_a_new_kind_that_ignores_an_option_it_inherits_is_found(monkeypatch, x64):
    monkeypatch.setitem(kinds.MIXERS, "forgetful", kinds.Kind(ForgetfulConfig, Forgetful, "0"))
    for block in BLOCKS.values():
        chosen = block.__dataclass_fields__["attention"].metadata["choice"]
        monkeypatch.setitem(chosen.classes, "forgetful", ForgetfulConfig)
    monkeypatch.setitem(variants.KINDS, "attention", variants.kinds_of("attention"))
    path, same = (f"blocks.main.attention{kind}.memory_slots" for kind in ("[forgetful]", ""))
    assert inherited()[path] == same
    monkeypatch.setitem(INHERITED, path, same)
    monkeypatch.setitem(VALUES, path, VALUES[same])
    with pytest.raises(AssertionError, match=r"\[forgetful\].memory_slots=32 changes nothing in attention.kind=forgetful"):
        test_an_option_changes_the_model_or_is_refused(path, None)


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
        (
            {"blocks": {"a": BLOCKS["pre_norm"](), "b": BLOCKS["hyper_connections"]()}, "pattern": ("a", "b")},
            "model.blocks.a.layout='pre_norm' .* the same streams as 'hyper_connections' in the last layer",
        ),
        (
            {"blocks": {"a": BLOCKS["hyper_connections"](), "b": BLOCKS["resi_dual"]()}, "pattern": ("a", "b")},
            "model.blocks.a.layout='hyper_connections' .* the same streams as 'resi_dual' in the last layer",
        ),
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


@pytest.mark.parametrize("name, value", [("norm_epsilon", 1e-3), ("norm_cast", "before_gain")])
def test_the_norm_of_differential_heads_reads_the_options_of_norms(name, value):
    """Where no other norm does: the block's are of kind 'dyt', or there are none."""
    kind = "dyt" if name == "norm_epsilon" else "none"
    config = model({A + "kind": "differential", B + "norm": kind, "final_norm": kind, B + name: value})
    (place,) = (place for _, branch, place in config.places() if branch.name == "attention")
    assert getattr(place.norm, name.removeprefix("norm_")) == value


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
