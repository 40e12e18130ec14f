"""config.json of a published model of each family reads as a model with the published parameters."""

import pytest

import xfresearch as xf
from tests.interop.published import PUBLISHED
from xfresearch.interop.config import read_model, write_config
from xfresearch.interop.exporting import choose
from xfresearch.interop.families import FAMILIES, family
from xfresearch.interop.matching import differences

CASES = [pytest.param(*case, id=name) for name, case in PUBLISHED.items()]


def test_every_family_has_a_published_model():
    assert {config["model_type"] for config, _ in PUBLISHED.values()} == set(FAMILIES)


@pytest.mark.parametrize("config, count", CASES)
def test_it_has_the_published_parameters(config, count):
    model = read_model(family(config["model_type"]), config)
    assert xf.costs(model).parameters == count


# What we say in other words: a name of the same function, a size as a number.
REWORDED = {
    "google/gemma-2b": {"hidden_act": "gelu"},
    "EleutherAI/gpt-j-6b": {"n_inner": None},
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_it_is_written_as_it_was_read(name):
    config, _ = PUBLISHED[name]
    kind = family(config["model_type"])
    model = read_model(kind, config)
    assert choose(model, kind.name) is kind
    written = write_config(kind, model)
    assert not differences(read_model(kind, config | written), model)
    changed = {key: value for key, value in config.items() if key in written and written[key] != value}
    assert changed == REWORDED.get(name, {})
