"""Conversions of an encoder, of a decoder and of cross-attention. What joins the stacks is W_Q W_K^T alone."""

from dataclasses import replace

import numpy as np
import pytest

from tests.contracts.two_stacks import MODELS, NARROW, POST_NORM, SOURCE, made, options
from tests.contracts.variants import random_params
from tests.editing.words import WORDS, WordTokenizer
from tests.surgery.comparing import assert_exact, logits
from tests.tiny_runs import tiny_config, tiny_model
from xfresearch import surgery
from xfresearch.loading.language_model import LanguageModel
from xfresearch.models.model_config import ModelConfig
from xfresearch.runtime.errors import UserError
from xfresearch.surgery.certificate import BOUND, Domain, difference
from xfresearch.surgery.network import Network, take_apart

ENCODER, CROSS = {"stack": "encoder"}, {"role": "cross"}
GROUPED = NARROW | options(kv_heads=2, bias=("query", "key", "value"), memory_slots=6)
BIASED = NARROW | {"blocks.main.norm_bias": True, "stacks.encoder.blocks.main.norm_bias": True} | options(bias=("value",))
SKIPLESS = {"stacks.encoder.blocks.main.layout": "no_skip"} | {
    f"stacks.encoder.blocks.main.norms.{name}_in.kind": "none" for name in ("attention", "feed_forward")
}
MERGED = NARROW | options(query="merged", bias=("query",))
SINK = options(sink="learned", softcap=9.0)


def lm_of(model: ModelConfig) -> LanguageModel:
    """A model with the tokenizer of a few words."""
    model = replace(model, vocab_size=len(WORDS))
    run = replace(tiny_config("gpt2"), model=model, source_length=SOURCE)
    return LanguageModel(model, random_params(model, seed=5), WordTokenizer(), run)


def lm_with(changes: dict) -> LanguageModel:
    return lm_of(made(changes))


@pytest.mark.parametrize(
    ("name", "changes", "arguments"),
    [
        ("merge_query_key", GROUPED, CROSS),
        ("merge_query_key", {"blocks.main.attention.kv_heads": 2} | options(value="key"), {}),
        ("merge_query_key", {}, {"layers": (1,)}),
        ("factor_query_key", MERGED | options(memory_slots=3, memory_heads="shared"), {"rank": 24} | CROSS),
        ("drop_query", NARROW | options(kv_heads=2, bias=("key", "value"), memory_slots=6), CROSS),
        ("drop_query", options(heads=1, head_size=32, value="key", memory_slots=6, memory_heads="shared"), CROSS),
        ("drop_query", SKIPLESS, ENCODER),
        ("absorb_value_output", GROUPED, CROSS),
        ("absorb_value_output", {}, {"gauge": "balanced"}),
        ("fold_norm", BIASED, {}),
        ("fold_norm", BIASED | options(bias=()), ENCODER),
        ("fold_norm", BIASED | options(query="merged", bias=("query",)), {}),
        ("centre", NARROW, ENCODER),
        ("centre", {}, {}),
        ("expand_groups", GROUPED, CROSS),
        ("sink_to_slot", SINK, CROSS),
        ("sink_to_slot", options(sink="off_by_one", memory_slots=3), CROSS),
        ("slot_to_sink", options(memory_slots=3), CROSS),
        ("stack", {}, {"copies": 2}),
        ("untie", {}, {}),
        ("upcycle", {}, {}),
        ("widen", {}, {"heads": 8, "hidden": 64}),
        ("widen", {"blocks.main.attention.position": "t5"}, {"heads": 8} | CROSS),
        ("fuse_output", {"stacks.encoder.blocks.main.layout": "no_residual_between"}, ENCODER),
        ("feed_forward_to_memory", {}, ENCODER),
        ("feed_forward_to_memory", POST_NORM, {"stack": "decoder"}),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_conversion_computes_the_same(name, changes, arguments):
    lm = lm_with(changes)
    if name == "slot_to_sink":
        memory = lm.params["blocks"]["main"]["cross_attention"]["memory"]
        memory |= {part: value.at[:, 1].set(0) for part, value in memory.items()}
    assert_exact(lm, name, **arguments)


@pytest.mark.parametrize("width", ["less_one"])
def test_a_chain_makes_a_stream_of_the_encoder_smaller(width):
    """The encoder's basis is its own: the decoder's stream keeps its width."""
    lm = lm_with(NARROW)
    network = surgery.CONVERSIONS["fold_norm"](take_apart(lm.config, lm.params), stack="encoder")
    narrower = surgery.CONVERSIONS["centre"](network, stack="encoder", width=width)
    assert (narrower.resolved.encoder.width, narrower.resolved.width) == (23, 32)
    assert_exact_networks(take_apart(lm.config, lm.params), narrower)


def assert_exact_networks(before: Network, after: Network) -> None:
    assert difference(logits(before), logits(after))["relative"] <= BOUND


def test_the_merged_model_decodes_the_same_with_the_cache():
    """W_Q and W_K of cross-attention as one matrix: certified, and greedy decoding of a source writes the same text."""
    lm = tiny_model("tasks/reverse", model__blocks__main__cross_attention__bias="('query','key')")
    merged, certificate = surgery.merge_query_key(lm, role="cross")
    assert certificate.exact and certificate.relative < 1e-12 and certificate.gradient < 1e-10
    assert {"all tokens", "text", "with the cache", "packed documents"} == {*certificate.differences}
    assert "control: merge_query_key of the decoder" in str(certificate) and "of sources 0 to" in certificate.domain
    assert merged.config.blocks["main"].cross_attention.query == "merged"
    asked = {"source": ["abcd", "xyz"], "max_new_tokens": 12, "temperature": 0.0}
    first, second = lm.generate(**asked), merged.generate(**asked)
    assert first == second and len({*first}) == 2


@pytest.mark.parametrize(
    ("name", "changes", "arguments", "term"),
    [
        ("merge_query_key", options(qk_norm="rms"), CROSS, "layer 0, cross_attention: the norm of queries and keys divides"),
        ("merge_query_key", {"blocks.main.attention.position": "rope"}, {}, "layer 0, attention: x W_Q R"),
        ("drop_query", {}, {"stack": "decoder"}, "x Q for this layer alone.*role='cross' is for cross-attention alone"),
        ("drop_query", options(bias=("query",)), CROSS, "b_Q .s W_K.*merge_query_key has one"),
        ("drop_query", options(query="merged"), CROSS, "query='merged' and key='identity_whole' are not both matrices"),
        ("drop_key", {}, CROSS, "cross_attention: W_K reads the encoder's output.*merge_query_key"),
        ("drop_value", {}, CROSS, "cross_attention: W_V reads the encoder's output.*absorb_value_output"),
        ("drop_output", {}, CROSS, "cross_attention: W_1 reads norm.x . o W_O.: x is added after W_O"),
        ("fold_norm", options(value="identity"), ENCODER, "layer 0, cross_attention: value='identity' is the encoder's"),
        ("fold_norm", BIASED | options(query="merged", sink="learned", bias=()), ENCODER, "slots or a sink do not have it"),
        ("fold_norm", BIASED | options(query="merged", softcap=2.0, bias=()), ENCODER, "softcap=2.0 it does not cancel"),
        ("fold_norm", NARROW | options(query="merged", memory_slots=3), ENCODER, "those of slots are trained"),
        ("untie", NARROW, ENCODER, "encoder, the table is its own already"),
        ("upcycle", {"blocks.main.layout": "cross_all_attention", "final_norm": "none"}, {}, "has no feed-forward layer"),
        ("feed_forward_to_memory", {}, {"stack": "decoder"}, "layout='cross_pre_norm'"),
        ("widen", {}, {"hidden": 64} | CROSS, "role leaves out feed_forward"),
        ("stack", {}, {"layers": (5,)}, "layers=5 is not allowed: this model has layers 0 to 1"),
        ("stack", {}, CROSS, "role='cross' is not allowed with stack: it must be left out: it changes whole layers"),
        ("upcycle", {}, CROSS, "role='cross' is not allowed with upcycle: it must be one of feed_forward"),
        ("stack", {}, {"stack": "other"}, "stack='other' is not allowed: this model has the stack encoder or decoder"),
    ],
    ids=lambda value: value if isinstance(value, str) and " " not in value else "",
)
def test_a_refusal_names_the_stack_or_the_sublayer(name, changes, arguments, term):
    lm = lm_with(changes)
    with pytest.raises(UserError, match=term):
        surgery.CONVERSIONS[name](take_apart(lm.config, lm.params), **arguments)


@pytest.mark.long
def test_a_decoder_of_three_sublayers_as_attention_and_slots_and_back():
    lm = lm_with(POST_NORM)
    before = take_apart(lm.config, lm.params)
    slots = surgery.CONVERSIONS["feed_forward_to_memory"](before, stack="decoder")
    assert [at.block.layout for at in slots.layers] == ["cross_all_attention", "all_attention"] * 2
    back = surgery.CONVERSIONS["memory_to_feed_forward"](slots, stack="decoder")
    assert {at.block.layout for at in back.layers} == {"cross_post_norm"}
    assert_exact_networks(before, back)


def test_a_model_of_one_stack_has_no_encoder_to_convert_which_is_a_mistake():
    with pytest.raises(UserError, match="stack='encoder' is not allowed: this model has the stack decoder"):
        surgery.untie(tiny_model(), stack="encoder")
    with pytest.raises(surgery.Refused, match="merge_query_key: no layer has a sublayer of role 'cross'"):
        surgery.merge_query_key(tiny_model(), role="cross")


def test_the_table_is_shared_until_one_stack_changes_it_without_mistake():
    lm = lm_of(MODELS["pre-norm"])
    network = take_apart(lm.config, lm.params)
    assert network.shares_table and network.resolved.encoder.embedding == "shared"
    other = surgery.CONVERSIONS["centre"](network, stack="encoder")
    assert not other.shares_table and other.resolved.encoder.embedding == "own"
    np.testing.assert_array_equal(other.outside["embed/table"], network.outside["embed/table"])


def network_of(changes: dict) -> Network:
    lm = lm_with(changes)
    return take_apart(lm.config, lm.params)


def test_layers_without_a_stack_are_the_decoder_s_without_mistake():
    before = network_of({})
    after = surgery.CONVERSIONS["merge_query_key"](before, (1,), role="cross")
    kinds = [at.block.cross_attention.query for at in after.layers]
    assert kinds == ["learned", "merged"] and after.encoder.layers == before.encoder.layers
    both = surgery.CONVERSIONS["merge_query_key"](before)
    assert [at.block.attention.query for each in both.stacks for at in each.layers] == ["merged"] * 4


@pytest.mark.parametrize("broken", ["encoder", "decoder"])
def test_a_control_is_of_one_stack_without_mistake(broken):
    after = surgery.CONVERSIONS["stack"](network_of({}), broken=broken)
    zero = {each.stack or "decoder": not each.params(1)["attention/output/kernel"].any() for each in after.stacks}
    assert zero == {"encoder": broken != "encoder", "decoder": broken != "decoder"}


def test_sources_have_every_token_without_mistake(monkeypatch):
    monkeypatch.setattr("xfresearch.surgery.certificate.LONGEST", 4)
    network = network_of({})
    domain = Domain.of(network, network, None)
    for tokens in zip(*(each[:2] for each in domain.batches), strict=True):
        assert {*np.concatenate(tokens).ravel()} == set(range(len(WORDS)))
    assert "positions 0 to 3 (of sources 0 to 3)" in str(domain)
