"""A sink as a slot whose value is 0, and back."""

import jax.numpy as jnp
import numpy as np
import pytest

from tests.surgery.comparing import assert_exact, assert_refused, changed
from xfresearch import surgery
from xfresearch.runtime.trees import by_path
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
    assert_refused(changed(**options), "sink_to_slot", f"layer 0: .*{term}")


@pytest.mark.parametrize(
    "options",
    [
        LEARNED | {"position": "rope", "rope__fraction": 0.5, "bias": "('query','key')", "kv_heads": 2},
        LEARNED | {"value": "identity_whole", "softcap": 3.0, "scale": 0.2, "output_gate": "elementwise"},
        OFF_BY_ONE | {"memory_slots": 3, "position": "rope"},
    ],
    ids=name_of,
)
def test_there_and_back_restores_every_bit(options):
    lm = changed(**options)
    network = take_apart(lm.config, lm.params)
    for name in ("sink_to_slot", "slot_to_sink"):
        network = surgery.CONVERSIONS[name](network)
    model, params = assemble(network, "float32")
    assert model == lm.config
    old, new = by_path(lm.params), by_path(params)
    assert old.keys() == new.keys() and all(np.array_equal(old[path], new[path]) for path in old)


def constant_slot(lm):
    """A model whose slots have value 0 and a constant logit: W_Q is 0 in the one dimension of their key."""
    attention = lm.params["blocks"]["main"]["attention"]
    attention["query"]["kernel"] = attention["query"]["kernel"].at[..., 3].set(0)
    attention["memory"]["key"] = jnp.zeros_like(attention["memory"]["key"]).at[..., 3].set(0.7)
    attention["memory"]["value"] = jnp.zeros_like(attention["memory"]["value"])
    return lm


SLOT = {"memory_slots": 1, "bias": "('query',)"}


@pytest.mark.parametrize(
    "options", [SLOT | {"kv_heads": 2, "softcap": 2.0}, SLOT | {"memory_heads": "shared"}], ids=name_of
)
def test_a_constant_logit_is_a_learned_sink(options):
    a = assert_exact(constant_slot(changed(**options)), "slot_to_sink").blocks["main"].attention
    assert (a.sink, a.memory_slots, a.head_size) == ("learned", 0, 8)


@pytest.mark.parametrize(
    ("options", "term"),
    [
        ({}, "there are no slots in the softmax"),
        (OFF_BY_ONE | {"memory_slots": 4}, "there is a sink already: sink='off_by_one'"),
        ({"memory_slots": 4}, "no slot has the value 0 in every head"),
    ],
    ids=name_of,
)
def test_a_slot_that_is_no_sink(options, term):
    assert_refused(changed(**options), "slot_to_sink", f"layer 0: {term}")


@pytest.mark.parametrize(
    ("options", "term"),
    [
        ({"qk_norm": "rms"}, "the norm of queries divides b_Q k by a length"),
        ({"clip": 1.0}, "clip would limit b_Q"),
        ({"memory_slots": 2}, "a learned sink has no slots beside it, and 1 stay"),
    ],
    ids=name_of,
)
def test_a_logit_that_is_no_sink(options, term):
    assert_refused(constant_slot(changed(**SLOT | options)), "slot_to_sink", f"layer 0: {term}")


def test_a_logit_that_depends_on_the_token():
    lm = constant_slot(changed(**SLOT))
    kernel = lm.params["blocks"]["main"]["attention"]["query"]["kernel"]
    lm.params["blocks"]["main"]["attention"]["query"]["kernel"] = kernel.at[1, 0, 0, 3].set(0.1)
    with pytest.raises(surgery.Refused, match="layer 1: no slot with value 0 has W_Q k = 0 in every head"):
        surgery.CONVERSIONS["slot_to_sink"](take_apart(lm.config, lm.params))


def test_the_certificate_is_exact():
    lm, certificate = surgery.sink_to_slot(changed(**LEARNED, position="rope"))
    assert certificate.exact and lm.config.blocks["main"].attention.rope.fraction == 8 / 9
