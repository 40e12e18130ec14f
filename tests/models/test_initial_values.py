"""Initial values of every parameter in every variant: a standard deviation or a constant.

The cases in tests/variants/ are written by hand from the papers. test_initialisation.py tests the drawn numbers.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.contracts.variants import ALL
from tests.training.test_parameter_kinds import kind_of
from tests.variants import ACTIVATIONS, FEED_FORWARDS, LAYOUTS, MIXERS, MODEL, parameters
from tests.variants.case import Case, Parameter
from xfresearch.models import transformer
from xfresearch.models.layers import stacks
from xfresearch.models.layouts import LAYOUTS as CODE
from xfresearch.runtime.trees import by_path


def cases_of(block) -> list[Case]:
    """The cases of a block's layout and sublayers, and that of every model."""
    cases = [MODEL, LAYOUTS[block.layout]]
    for branch in CODE[block.layout].branches:
        tables = {"mixer": (MIXERS,), "feed_forward": (FEED_FORWARDS, ACTIVATIONS)}[branch.role]
        cases += [table[kind] for table in tables if (kind := getattr(block, branch.name).kind) in table]
    return cases


def known_of(cases: list[Case]) -> dict[str, Parameter]:
    return {path: parameter for case in cases for path, parameter in parameters(case).items()}


@pytest.fixture
def ones(monkeypatch):
    """Makes every normal random number 1, so that a parameter equals its standard deviation."""
    monkeypatch.setattr(jax.random, "normal", lambda key, shape, dtype: jnp.ones(shape, dtype))
    monkeypatch.setattr(jax.random, "truncated_normal", lambda key, low, high, shape, dtype: jnp.ones(shape, dtype))


@pytest.mark.parametrize("name", ALL)
def test_initial_values_equal_the_table(name, ones):
    model = ALL[name]
    blocks = {stack.name: stack.block for stack in stacks(model)}
    of_blocks = {name: known_of(cases_of(block)) for name, block in model.blocks.items()}
    of_model = {path: parameter for known in of_blocks.values() for path, parameter in known.items()}
    for path, leaf in by_path(transformer.init(model, jax.random.key(0))).items():
        stacked = path.startswith("blocks/")
        name = blocks[path.split("/")[1]] if stacked else stacks(model)[0].block
        known = of_blocks[name] if stacked else of_model
        assert kind_of(path) in known, f"{kind_of(path)} is no parameter of its case in tests/variants/"
        initial = known[kind_of(path)].initial
        expected = initial(leaf.shape[stacked:], model, model.blocks[name]) if callable(initial) else initial
        np.testing.assert_allclose(leaf, np.broadcast_to(expected, leaf.shape), rtol=1e-6, err_msg=path)
