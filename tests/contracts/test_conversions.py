"""Contract 9 for conversions: each gives the parameters of a model that exists, or is refused in one line.

Daily every layout and every mixer; `long` has their cross product with the kinds of feed-forward layers, and all variants.
Whether the result computes the same function is tested in tests/surgery/test_random.py.
"""

from dataclasses import replace
from itertools import product

import jax
import numpy as np
import pytest

from tests.contracts.rooms import OF_CONVERSION
from tests.contracts.variants import ALL, BASE, DISTINCT, MAIN, NEEDS, ONE_STACK
from xfresearch.models import transformer
from xfresearch.models.block_config import BLOCKS
from xfresearch.models.feed_forwards.activations import ACTIVATIONS
from xfresearch.models.kinds import FEED_FORWARDS, MIXERS
from xfresearch.models.model_config import ModelConfig, resolve_model
from xfresearch.runtime.errors import UserError
from xfresearch.surgery.network import assemble, take_apart
from xfresearch.surgery.refused import Refused
from xfresearch.surgery.registry import CONVERSIONS

CASES = [(name, OF_CONVERSION.get(name, {})) for name in CONVERSIONS]
CASES += [("widen", {"heads": 8}), ("widen", {"slots": 64}), ("centre", {"width": "less_one"})]
CASES += [("feed_forward_to_memory", {"form": "softmax"}), ("absorb_value_output", {"gauge": "qr"})]
# One kind for each class of options, with or without a norm, elementwise or not: conversions ask for nothing else.
ALIKE = {
    (kind.options, name in ACTIVATIONS and (ACTIVATIONS[name].elementwise, ACTIVATIONS[name].norm)): name
    for name, kind in FEED_FORWARDS.items()
}


def model_of(layout: str, mixer: str = "softmax", feed_forward: str = "gelu") -> ModelConfig:
    """The base with another block. Raises UserError if there is no such model."""
    kinds = {"mixer": (MIXERS, mixer), "feed_forward": (FEED_FORWARDS, feed_forward)}
    options = {}
    for branch in ONE_STACK[layout].branches:
        table, kind = kinds[branch.role]
        needs = NEEDS.get((f"blocks.main.{branch.name}.kind", kind), {})
        own = {name.removeprefix(f"{branch.name}."): value for name, value in needs.items()}
        options[branch.name] = table[kind].options(kind=kind, **own)
    block = BLOCKS[layout](**options)
    final_norm = NEEDS["blocks.main.layout", layout].get("final_norm", BASE.final_norm)
    return resolve_model(replace(BASE, blocks={"main": block}, final_norm=final_norm))


def drawn(model: ModelConfig) -> dict:
    """Random parameters."""
    random = np.random.default_rng(0)
    return jax.tree.map(lambda leaf: random.normal(size=leaf.shape).astype(leaf.dtype), transformer.abstract(model))


def check(model: ModelConfig) -> int:
    """Tries every conversion on a model; the number of those that apply."""
    network = take_apart(model, drawn(model))
    applied = 0
    for name, options in CASES:
        try:
            assemble(CONVERSIONS[name](network, **options), "float32")
        except Refused as refused:
            assert "\n" not in str(refused) and str(refused), name
        except Exception as bug:
            raise AssertionError(f"{name} {options}: {bug!r}") from bug
        else:
            applied += 1
    return applied


@pytest.mark.parametrize("layout", [name for name in ONE_STACK if name != "sandwich_norm"])  # a name of peri_norm
def test_every_conversion_of_a_layout(layout):
    assert check(model_of(layout)) >= 2


@pytest.mark.parametrize("mixer", [kind for kind in MIXERS if kind != MAIN.attention.kind])
def test_every_conversion_of_a_mixer(mixer):
    assert check(model_of("pre_norm", mixer)) >= 2


@pytest.mark.long
@pytest.mark.parametrize("layout", ONE_STACK)
def test_every_conversion_of_the_cross_product(layout):
    for mixer, feed_forward in product(MIXERS, ALIKE.values()):
        try:
            model = model_of(layout, mixer, feed_forward)
        except UserError:  # there is no such model
            continue
        check(model)


@pytest.mark.long
@pytest.mark.parametrize("variant", DISTINCT)
def test_every_conversion_of_a_variant(variant):
    check(resolve_model(ALL[variant]))
