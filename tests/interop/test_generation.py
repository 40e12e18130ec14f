"""The generation settings of a folder: where they are, what is said of those that are not read, and that they stay."""

import json
from dataclasses import replace

import pytest

import xfresearch as xf
from tests.contracts.variants import random_params
from tests.tiny_runs import tiny_config
from xfresearch.data.tokenizers import ByteTokenizer
from xfresearch.harness.generating import rules_of
from xfresearch.interop import generation
from xfresearch.interop.generation import FILE, settings
from xfresearch.interop.source import Source
from xfresearch.loading.generating import way
from xfresearch.models.sampling import Beams, Rules, Sampling

SHIPPED = {"no_repeat_ngram_size": 3, "min_length": 10, "early_stopping": True, "length_penalty": 2.0}
GREEDY = Sampling(0.0)


def source(config: dict | None = None, **files) -> Source:
    return Source(config or {}, "float32", {}, False, "", {FILE: json.dumps(files).encode()} if files else {})


def test_settings_are_those_of_the_file_or_else_of_the_config():
    """Not key by key: `transformers` reads config.json only without the file."""
    old = {"model_type": "bart", "min_length": 56, "d_model": 16}
    assert settings(None) == settings(source()) == settings(source({"model_type": "bart"})) == {}
    assert settings(source(old)) == {"min_length": 56}
    assert settings(source(old, **SHIPPED, repetition_penalty=None)) == SHIPPED
    assert settings(source(old, eos_token_id=2)) == {}


def test_what_is_given_counts_first():
    assert way(source(**SHIPPED), GREEDY, 4, {"early_stopping": None}) == Beams(4, 2.0, True, Rules(3, 10))
    given = {"early_stopping": False, "min_length": 0, "bad_words_ids": [[1, 2]]}
    assert way(source(**SHIPPED), GREEDY, 4, given) == Beams(4, 2.0, False, Rules(3, 0, bad_words_ids=((1, 2),)))
    assert way(source(**SHIPPED), GREEDY, 1, {}) == Sampling(0.0, rules=Rules(3, 10))
    assert way(None, GREEDY, 1, {}) == GREEDY
    with pytest.raises(TypeError, match="unexpected keyword argument 'min_lenght'"):
        way(None, GREEDY, 1, {"min_lenght": 3})


@pytest.mark.parametrize(
    "config, file, line",
    [
        ({}, {"num_beams": 4, "max_length": 20}, "max_length=20, num_beams=4: not read; see beams, max_new_tokens"),
        ({}, {"do_sample": True, "temperature": 0.6}, "do_sample=true, temperature=0.6: not read; see temperature"),
        ({}, {"suppress_tokens": [1, 2], "a_new_one": "x"}, 'a_new_one="x", suppress_tokens=[1, 2]: not read'),
        ({"a_new_one": "x", "top_p": 0.5, "d_model": 8}, {}, "top_p=0.5: not read; see top_p"),
        ({"top_p": 0.5}, {"num_beams": 1, "do_sample": False, "use_cache": True, "eos_token_id": 2, "min_length": 3}, ""),
    ],
)
def test_settings_that_are_not_read_are_named_once(config, file, line, capsys):
    generation._warn.cache_clear()  # another test of this process may have read the same settings
    for _ in range(2):
        settings(source(config, **file))
    assert capsys.readouterr().err == (f"warning: {FILE if file else 'config.json'}: {line}\n" if line else "")


@pytest.mark.parametrize(
    "made, error",
    [
        (lambda: source(no_repeat_ngram_size="3"), "generation_config.json: no_repeat_ngram_size='3' is not allowed"),
        (lambda: source({"early_stopping": "always"}), "config.json: early_stopping='always' is not allowed"),
        (lambda: source(length_penalty=[1]), "generation_config.json: length_penalty=\\[1\\] is not allowed"),
        (lambda: replace(source(), files={FILE: b"{"}), "generation_config.json: not valid JSON"),
    ],
)
def test_values_that_are_not_allowed_are_named(made, error):
    with pytest.raises(xf.UserError, match=error) as caught:
        settings(made())
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("place", [FILE, "config.json"])
def test_settings_stay_through_import_save_and_export(place, tmp_path, capsys):
    run = tiny_config("bart")
    xf.LanguageModel(run.model, random_params(run.model), ByteTokenizer(), run).export_hf(tmp_path / "in")
    file = tmp_path / "in" / place
    before = json.loads(file.read_text()) if file.exists() else {}
    file.write_text(json.dumps(before | SHIPPED | {"num_beams": 4}))
    xf.load(tmp_path / "in").save(tmp_path / "saved")
    xf.load(tmp_path / "saved").export_hf(tmp_path / "out")
    texts, free = set(), {"no_repeat_ngram_size": 0, "min_length": 0, "early_stopping": False, "length_penalty": 1.0}
    how = {"source": "abcab", "beams": 3, "temperature": 0.0, "max_new_tokens": 12}
    for folder in ("in", "saved", "out"):
        lm = xf.load(tmp_path / folder)
        texts.add(lm.generate(**how))
        assert rules_of(lm) == Rules(3, 10) and lm.generate(**how, **SHIPPED) in texts
    assert len(texts) == 1 and lm.generate(**how, **free) not in texts
    error = capsys.readouterr().err
    assert "no_repeat_ngram_size" not in error and "num_beams=4: not read; see beams" in error


def test_token_ids_of_words_are_those_of_the_model():
    run = tiny_config("gpt2")
    lm = xf.LanguageModel(run.model, random_params(run.model), ByteTokenizer(), run)
    top = run.model.vocab_size - 1
    with pytest.raises(xf.UserError, match=f"bad_words_ids: {top + 1} is not allowed: the model's token ids are 0 to {top}"):
        lm.generate("a", bad_words_ids=[[1, top + 1]])
