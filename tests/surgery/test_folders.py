"""Conversions of models that other code made: a trained Llama of llama2.c, and Hugging Face folders."""

import numpy as np
import pytest

import xfresearch as xf
from tests.data.conftest import shared
from tests.surgery.comparing import apart, assert_exact, logits
from tests.tiny_runs import tiny_model
from xfresearch.surgery import CONVERSIONS, Refused, untie
from xfresearch.surgery.certificate import BOUND, CONTROL
from xfresearch.surgery.network import assemble, take_apart

# Conversions of a Llama; the others refuse it.
APPLY = {
    **{"absorb_value_output": {}, "expand_groups": {}, "fold_norm": {}, "stack": {}, "upcycle": {"experts": 4}},
    **{"untie": {}, "widen": {"hidden": 200}},
}
ROUND_TRIPS = [
    ("gpt2", {}, "untie", {}, "gpt2"),
    ("llama", {"model__blocks__main__attention__kv_heads": 2}, "expand_groups", {}, "llama"),
    ("llama", {}, "upcycle", {"experts": 4}, "mixtral"),
    ("mixtral_8x7b", {}, "expand_groups", {}, "mixtral"),
]


@pytest.fixture(scope="module")
def stories():
    return xf.load(shared("stories260K/stories260K.bin"))


@pytest.mark.parametrize("name", APPLY)
def test_a_trained_llama(stories, name):
    _, exact, control = apart(stories, name, **APPLY[name])
    assert exact <= BOUND and control >= CONTROL


def test_what_a_trained_llama_refuses(stories):
    network = take_apart(stories.config, stories.params)
    refused = {}
    for name in CONVERSIONS.keys() - APPLY.keys() - {"pool_groups"}:
        with pytest.raises(Refused) as error:
            CONVERSIONS[name](network)
        refused[name] = str(error.value)
    terms = {
        "merge_query_key": "x W_Q R(l - s) W_K^T y^T",
        "fuse_output": "W_1 reads norm(x + o W_O)",
        "drop_query": "x is also added to the output (skip)",
        "centre": "kind 'rms' reads the mean",
        "feed_forward_to_memory": "two keys per value",
    }
    assert {name: term for name, term in terms.items() if term not in refused[name]} == {}


def test_a_conversion_says_that_it_does_not_carry_the_record_of_the_folder(tmp_path, capsys):
    lm = tiny_model("gpt2")
    lm.export_hf(tmp_path / "first", dtype="float32")
    converted, _ = untie(xf.load(tmp_path / "first"))
    assert "warning: the converted model does not carry the record of its Hugging Face folder" in capsys.readouterr().err
    assert converted.source is None
    untie(lm)
    assert "warning" not in capsys.readouterr().err


@pytest.mark.parametrize(("name", "overrides", "conversion", "options", "family"), ROUND_TRIPS)
def test_a_converted_folder_can_be_exported(tmp_path, name, overrides, conversion, options, family):
    tiny_model(name, **overrides).export_hf(tmp_path / "first", dtype="float32")
    lm = xf.load(tmp_path / "first")
    model = assert_exact(lm, conversion, **options)
    network = CONVERSIONS[conversion](take_apart(lm.config, lm.params), **options)
    converted = xf.LanguageModel(model, assemble(network, "float32")[1], lm.tokenizer, lm.run)
    assert converted.export_hf(tmp_path / "second", dtype="float32") == family
    again = xf.load(tmp_path / "second")
    actual = logits(take_apart(again.config, again.params))
    expected = logits(take_apart(lm.config, lm.params))
    np.testing.assert_allclose(actual, expected, rtol=0, atol=1e-5 * abs(expected).max())
