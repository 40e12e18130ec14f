"""Conversions of some layers, and chains of two: every subset of the layers has a config, and computes the same function."""

from dataclasses import replace
from itertools import combinations, product

import pytest

from tests.surgery.comparing import assert_exact, logits
from tests.tiny_runs import tiny_model
from xfresearch import surgery
from xfresearch.models import layers
from xfresearch.runtime.errors import UserError
from xfresearch.surgery.certificate import BOUND, difference
from xfresearch.surgery.layer_blocks import LayerBlock
from xfresearch.surgery.network import take_apart

DEPTH = 4
SUBSETS = [chosen for count in range(1, DEPTH + 1) for chosen in combinations((1, 0, 2, 3), count)]
BARE = {"model__depth": DEPTH, "model__blocks__main__attention__bias": "()"}
# Of some layers: the others convert the whole model, or depend on all layers.
NAMES = ("absorb_value_output", "merge_query_key", "fold_norm", "feed_forward_to_memory", "stack", "upcycle", "widen")
OPTIONS = {"widen": {"hidden": 160}}


@pytest.mark.parametrize("depth", [3, 5])
def test_every_subset_of_the_layers_has_a_config(depth):
    lm = tiny_model(**BARE | {"model__depth": depth})
    network = take_apart(lm.config, lm.params)
    for count in range(1, depth + 1):
        for chosen in combinations(range(depth), count):
            actual = surgery.CONVERSIONS["absorb_value_output"](network, chosen).resolved
            kinds = [actual.blocks[at.block].attention.value for at in layers.layers(actual)]
            assert [number for number, kind in enumerate(kinds) if kind == "identity_whole"] == list(chosen)


def test_a_block_that_has_the_name_of_a_stack_gets_another():
    """The blocks of a model may be named like the stacks that a conversion makes."""
    lm = tiny_model(**BARE)
    network = take_apart(lm.config, lm.params)
    other = replace(network.layers[0].block, norm_epsilon=0.1)
    named = [LayerBlock("main_3", other), LayerBlock("main_v3", replace(other, norm_epsilon=0.2))]
    network = replace(network, layers=(network.layers[0], *named, network.layers[0]))
    actual = network.resolved
    assert [actual.blocks[at.block].norm_epsilon for at in layers.layers(actual)][1:3] == [0.1, 0.2]


@pytest.mark.parametrize("chosen", SUBSETS, ids=lambda chosen: "".join(map(str, chosen)))
@pytest.mark.parametrize("name", NAMES)
def test_some_layers_are_converted(name, chosen):
    assert_exact(tiny_model(**BARE), name, chosen, **OPTIONS.get(name, {}))


@pytest.mark.parametrize("first", NAMES)
def test_a_chain_of_two_that_applies_is_exact(first):
    """The second conversion changes other layers than the first one, or the same."""
    lm = tiny_model(**BARE)
    before = take_apart(lm.config, lm.params)
    applied = 0
    for second, chosen in product(NAMES, [(1,), (0, 2), None]):
        try:
            middle = surgery.CONVERSIONS[first](before, (1, 3), **OPTIONS.get(first, {}))
            after = surgery.CONVERSIONS[second](middle, chosen, **OPTIONS.get(second, {}))
            actual = difference(logits(before), logits(after))["relative"]
        except (UserError, surgery.Refused):
            continue
        applied += 1
        assert actual <= BOUND, (second, chosen)
    assert applied >= len(NAMES)
