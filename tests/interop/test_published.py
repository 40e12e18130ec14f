"""config.json of a published model of each family gives a model with the published number of parameters."""

import pytest

import xfresearch as xf
from tests.interop import published_2025, published_masked, published_seq2seq
from xfresearch.interop.config_json import read_model, write_config
from xfresearch.interop.differences import differences
from xfresearch.interop.exporting import choose
from xfresearch.interop.families import NAMES, get_family

PUBLISHED = published_2025.PUBLISHED | published_seq2seq.PUBLISHED | published_masked.PUBLISHED
CASES = [pytest.param(*case, id=name) for name, case in PUBLISHED.items()]


def test_every_family_has_a_published_model():
    assert {config["model_type"] for config, _ in PUBLISHED.values()} == set(NAMES)


@pytest.mark.parametrize("config, count", CASES)
def test_a_published_model_has_its_number_of_parameters(config, count):
    model = read_model(get_family(config["model_type"]), config)
    assert xf.costs(model).parameters == count


# Values that we write differently: another name of the same function, a default size as a number.
REWRITTEN = {
    "google/gemma-2b": {"hidden_act": "gelu"},
    "EleutherAI/gpt-j-6b": {"n_inner": None},
    "EleutherAI/gpt-neo-125m": {"intermediate_size": None},
    "facebook/bart-base": {"architectures": ["BartModel"]},
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_config_is_written_as_it_was_read(name):
    config, _ = PUBLISHED[name]
    family = get_family(config["model_type"])
    model = read_model(family, config)
    assert choose(model, family.name) is family
    written = write_config(family, model)
    assert not differences(read_model(family, config | written), model)
    changed = {key: value for key, value in config.items() if key in written and written[key] != value}
    assert changed == REWRITTEN.get(name, {})
