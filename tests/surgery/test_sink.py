"""A sink as a slot whose value is 0, and back."""

import pytest

from tests.surgery.comparing import assert_exact
from tests.surgery.test_merge_query_key import changed
from xfresearch import surgery
from xfresearch.surgery.network import assemble, take_apart

OFF_BY_ONE = {"sink": "off_by_one", "bias": "()"}
LEARNED = {"sink": "learned", "bias": "()"}


def name_of(value) -> str:
    return ",".join(str(each) for each in value.values()) if isinstance(value, dict) else ""


@pytest.mark.parametrize(
    "options",
    [
        OFF_BY_ONE | {"qk_norm": "rms", "position": "rope", "softcap": 2.0},
        OFF_BY_ONE | {"memory_slots": 6, "kv_heads": 2},
        OFF_BY_ONE | {"query": "merged", "value": "identity_whole", "memory_slots": 3, "memory_heads": "shared"},
    ],
    ids=name_of,
)
def test_the_zero_logit_is_a_slot(options):
    a = assert_exact(changed(**options), "sink_to_slot").blocks["main"].attention
    assert (a.sink, a.memory_slots) == ("none", options.get("memory_slots", 0) + 1)


@pytest.mark.parametrize(
    "options",
    [
        LEARNED | {"position": "alibi", "kv_heads": 2, "output_gate": "elementwise"},
        LEARNED | {"position": "rope", "bias": "('query','key')", "value": "key", "kv_heads": 1},
        LEARNED | {"value": "identity_whole", "softcap": 3.0, "scale": 0.2, "output_gate": "elementwise"},
    ],
    ids=name_of,
)
def test_the_learned_logit_is_one_more_dimension(options):
    a = assert_exact(changed(**options), "sink_to_slot").blocks["main"].attention
    assert (a.sink, a.memory_slots, a.head_size) == ("none", 1, 9)


@pytest.mark.parametrize("options", [OFF_BY_ONE, OFF_BY_ONE | {"memory_slots": 5, "kv_heads": 2}], ids=name_of)
def test_a_slot_of_zeros_is_a_sink(options):
    lm = changed(**options)
    slots = surgery.CONVERSIONS["sink_to_slot"](take_apart(lm.config, lm.params))
    old, lm.config = lm.config, slots.resolved
    lm.params = assemble(slots, "float32")[1]
    assert assert_exact(lm, "slot_to_sink").blocks["main"].attention == old.blocks["main"].attention


@pytest.mark.parametrize(
    ("options", "term"),
    [
        ({}, "there is no sink"),
        (
            OFF_BY_ONE | {"memory_slots": 4, "memory_activation": "relu"},
            "slots of the model's width, and only one kind",
        ),
        (LEARNED | {"query": "merged"}, "query='merged' has no matrix that one more dimension could join"),
        (LEARNED | {"value": "identity"}, "value='identity' has no matrix"),
        (LEARNED | {"output": "identity"}, "output='identity' has no matrix"),
        (LEARNED | {"qk_norm": "rms"}, "the norm of queries would divide by a length with b in it"),
        (LEARNED | {"clip": 1.0}, "clip would limit b"),
        (LEARNED | {"position": "relative_key"}, "the table of relative keys has the size of a query"),
        (LEARNED | {"softcap": 0.01}, r"c tanh\(z / c\) = b has no z: .b. = .* is not below softcap=0.01"),
    ],
    ids=name_of,
)
def test_a_refusal_names_the_term(options, term):
    lm = changed(**options)
    with pytest.raises(surgery.Refused, match=f"^sink_to_slot: layer 0: .*{term}"):
        surgery.CONVERSIONS["sink_to_slot"](take_apart(lm.config, lm.params))


@pytest.mark.parametrize(
    ("options", "term"),
    [
        ({}, "there are no slots in the softmax"),
        (OFF_BY_ONE | {"memory_slots": 4}, "there is a sink already: sink='off_by_one'"),
        ({"memory_slots": 4}, "no slot has key 0 and value 0 in every head"),
    ],
    ids=name_of,
)
def test_a_slot_that_is_no_sink(options, term):
    lm = changed(**options)
    with pytest.raises(surgery.Refused, match=f"^slot_to_sink: layer 0: {term}"):
        surgery.CONVERSIONS["slot_to_sink"](take_apart(lm.config, lm.params))


def test_the_certificate_is_exact():
    lm, certificate = surgery.sink_to_slot(changed(**LEARNED, position="rope"))
    assert certificate.exact and lm.config.blocks["main"].attention.rope.fraction == 8 / 9
