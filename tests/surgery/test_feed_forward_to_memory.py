"""Elementwise feed-forward layers as slots of the model's width, and back."""

import numpy as np
import pytest

from tests.surgery.comparing import assert_exact, assert_refused
from tests.tiny_runs import tiny_model
from xfresearch import surgery
from xfresearch.surgery.network import assemble, take_apart

BLOCK = "model__blocks__main__"
TO, BACK = "feed_forward_to_memory", "memory_to_feed_forward"


def changed(name: str = "gpt2", **options):
    outside = {key: value for key, value in options.items() if key.startswith("model__")}
    return tiny_model(name, **{BLOCK + key: value for key, value in options.items() if key not in outside}, **outside)


VARIANTS = [
    ("gptj", {}),
    ("gptj", {"attention__bias": "('output',)", "feed_forward__bias": False}),
    ("gptj", {"attention__output": "identity", "feed_forward__kind": "relu2", "feed_forward__bias": False}),
    ("gpt2", {}),
    ("gpt2", {"feed_forward__bias": False, "feed_forward__kind": "swish", "norms__feed_forward_in__kind": "rms"}),
    ("gpt2", {"layout": "post_norm", "model__final_norm": "none"}),
]


def name_of(value) -> str:
    return ",".join(str(each) for each in value.values()) if isinstance(value, dict) else value


@pytest.mark.parametrize(("name", "options"), VARIANTS, ids=name_of)
def test_slots_compute_the_same(name, options):
    model = assert_exact(changed(name, **options), TO)
    assert {block.layout for block in model.blocks.values()} <= {"attention_only", "all_attention"}
    assert model.depth == (2 if name == "gptj" else 4)


@pytest.mark.parametrize(("name", "options"), [*VARIANTS, ("gpt2", {"layout": "no_norm_between"})], ids=name_of)
def test_there_and_back_restores_every_bit(name, options):
    lm = changed(name, **options)
    before = take_apart(lm.config, lm.params)
    slots = take_apart(*assemble(surgery.CONVERSIONS[TO](before), "float64"))
    after = surgery.CONVERSIONS[BACK](slots)
    assert after.resolved.depth == before.resolved.depth
    for number, at in enumerate(after.layers):
        old, new = before.params(number), after.params(number)
        assert old.keys() == new.keys()
        assert all(np.array_equal(old[path], new[path]) for path in old)
        same = at.block.layout == before.layers[number].block.layout
        assert same or options["layout"] == "no_norm_between" and at.block.layout == "pre_norm"


def test_the_way_back_computes_the_same():
    for lm in (changed("gptj"), changed("gpt2")):
        slots = surgery.CONVERSIONS[TO](take_apart(lm.config, lm.params))
        model, params = assemble(slots, "float32")
        lm.config, lm.params = model, params
        assert "feed_forward" in assert_exact(lm, BACK).blocks["main"].sublayers


def test_one_layer_of_two():
    model = assert_exact(changed("gpt2"), TO, layers=(1,))
    assert model.depth == 3 and [block.layout for block in model.blocks.values()][0] == "pre_norm"


@pytest.mark.parametrize(
    ("name", "options", "term"),
    [
        ("llama", {}, r"'swiglu': f\(x W_gate\) \* \(x W_up\) has two keys per value"),
        ("gpt2", {"feed_forward__kind": "solu"}, "'solu' is not elementwise"),
        ("gpt2", {"feed_forward__kind": "softmax"}, "'softmax' is not elementwise"),
        ("moe", {}, "'moe': a router chooses experts, and slots have none"),
        (
            "gpt2",
            {"layout": "peri_norm"},
            r"layout='peri_norm', x \+ norm\(f\(x\)\): no layout of one sublayer has a norm",
        ),
        ("gpt2", {"layout": "no_skip"}, "no layout of one sublayer is without a skip"),
        ("gpt2", {"layout": "parallel_two_norms"}, r"read the same norm\(x\), and W_up reads another"),
        ("gptj", {"attention__memory_slots": 4}, "attention has 4 slots already"),
        ("gptj", {"attention__sink": "learned"}, "attention with sink='learned' has no slots in this project"),
        ("gptj", {"attention__output": "identity"}, "c has no place: output='identity' has no bias"),
        ("gptj", {"attention__kind": "slots", "attention__memory_slots": 4}, "a mixer of kind 'slots' has no slots of"),
    ],
)
def test_a_refusal_names_the_term(name, options, term):
    assert_refused(changed(name, **options), TO, f"layer 0: .*{term}")


SLOTS = {"attention__memory_slots": 4, "attention__bias": "()"}
WIDE = SLOTS | {"attention__memory_activation": "relu"}


@pytest.mark.parametrize(
    ("options", "term"),
    [
        ({}, "there are no slots"),
        (SLOTS | {"layout": "attention_only"}, "slots in the softmax share its denominator with the context"),
        (WIDE, "layout='pre_norm' has a feed-forward layer already"),
        (WIDE | {"layout": "all_attention", "model__final_norm": "none"}, "no layout with a feed-forward layer has it"),
        (
            WIDE | {"layout": "attention_only", "attention__kind": "slots"},
            "layer 0: there is no layer before the slots",
        ),
    ],
)
def test_slots_that_stay(options, term):
    assert_refused(changed("gpt2", **options), BACK, f".*{term}")


def test_the_numbers_of_differential_layers_are_a_part_of_their_function():
    lm = changed("variants", attention__kind="differential", attention__heads=2)
    with pytest.raises(surgery.Refused, match="lambda_0 of a differential layer depends on its number"):
        surgery.CONVERSIONS[TO](take_apart(lm.config, lm.params))


def test_both_ways_have_a_certificate():
    lm, certificate = surgery.convert(changed("gptj"), surgery.chain(TO))
    assert certificate.exact and lm.config.blocks["main"].attention.memory_activation == "gelu_tanh"


SOFTMAX = {"form": "softmax"}


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("gpt2", {}),
        ("gptj", {"attention__value": "identity_whole"}),
        ("gpt2", {"layout": "post_norm", "model__final_norm": "none"}),
    ],
    ids=name_of,
)
def test_softmax_slots_have_the_keys_and_values_of_the_hidden_units(name, options):
    """In float64, from the equations: with heads of the model's width, scale W_Q k is W_up and v W_O is W_down."""
    wide = {"attention__heads": 1, "attention__kv_heads": 1, "attention__head_size": 32}
    lm = changed(name, **wide, **options)
    before = take_apart(lm.config, lm.params)
    after = surgery.CONVERSIONS[TO](before, **SOFTMAX)
    a = after.resolved.blocks["main"].attention
    assert (a.memory_activation, after.resolved.depth) == ("softmax", before.resolved.depth)
    for number in range(len(before.layers)):
        old, new = before.params(number), after.params(number)
        keys_MK = np.sqrt(32) * new["attention/memory/key"][:, 0]
        values_MV = np.sqrt(a.memory_slots) * new["attention/memory/value"][:, 0]
        np.testing.assert_allclose(
            keys_MK @ new["attention/query/kernel"][:, 0].T / np.sqrt(32), old["feed_forward/up/kernel"].T, atol=1e-9
        )
        np.testing.assert_allclose(
            values_MV @ new["attention/output/kernel"][0], old["feed_forward/down/kernel"], atol=1e-9
        )
        bias = old["feed_forward/down/bias"] + old.get("attention/output/bias", 0.0)
        np.testing.assert_array_equal(new["attention/output/bias"], bias)


def test_the_softmax_form_is_labelled_approximate():
    _, certificate = surgery.feed_forward_to_memory(changed("gpt2"), **SOFTMAX)
    assert certificate.approximate and not certificate.exact and certificate.relative > 1e-3
    assert "approximate" in str(certificate)


@pytest.mark.parametrize(
    ("options", "term"),
    [
        ({"attention__query": "merged", "attention__bias": "()"}, "query='merged' is no matrix for which a slot"),
        ({"attention__kv_heads": 2}, "heads of a group share their slots"),
        ({"feed_forward__hidden": 30}, "30 hidden units do not divide among 4 heads"),
        (
            {"attention__kind": "slots", "attention__memory_slots": 4, "attention__bias": "()"},
            "a mixer of kind 'slots' has no softmax with slots",
        ),
    ],
)
def test_a_refusal_of_the_softmax_form_names_the_term(options, term):
    assert_refused(changed("gpt2", **options), TO, f"layer 0: {term}", **SOFTMAX)
