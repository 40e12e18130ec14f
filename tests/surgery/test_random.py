"""No conversion changes a function: random models with random chains, and every variant with every conversion.

A conversion may refuse. If it does not, the logits are equal in float64.
"""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.contracts.test_grammar import COMMON, models
from tests.contracts.variants import ALL, DISTINCT, random_params
from tests.surgery.comparing import logits
from xfresearch.models.model_config import ModelConfig, resolve_model
from xfresearch.surgery import CONVERSIONS, Refused
from xfresearch.surgery.certificate import BOUND, difference
from xfresearch.surgery.network import Network, assemble, take_apart

EXACT = [name for name, conversion in CONVERSIONS.items() if not conversion.approximates({})]


def converted(network: Network, names) -> tuple[Network, list[str]]:
    """The network after those of the conversions that apply, and their names."""
    done = []
    for name in names:
        try:
            after = CONVERSIONS[name](network)
            assemble(after, "float32")  # computes all parameters: a matrix may have no inverse
        except Refused:
            continue
        network, done = after, [*done, name]
    return network, done


def check(config: ModelConfig, names) -> list[str]:
    config = resolve_model(replace(config, dtype="float32", param_dtype="float32"))
    before = take_apart(config, random_params(config))
    after, done = converted(before, names)
    if done:
        actual = difference(logits(before), logits(after))["relative"]
        assert actual <= BOUND, f"{done} change the logits by {actual:.1e}"
    return done


CHAINS = st.lists(st.sampled_from(EXACT), min_size=1, max_size=3)


@settings(max_examples=3, derandomize=True, **COMMON)
@given(models(), CHAINS)
def test_a_chain_changes_no_function(config, names):
    check(config, names)


@pytest.mark.long
@settings(max_examples=200, print_blob=True, **COMMON)
@given(models(), CHAINS)
def test_two_hundred_more_chains(config, names):
    check(config, names)


@pytest.mark.long
@pytest.mark.parametrize("variant", DISTINCT)
def test_every_conversion_of_a_variant(variant):
    for name in EXACT:
        check(ALL[variant], [name])
