"""Decoded texts against their targets, and pseudo-perplexity against a plain loop."""

import importlib.util
import math
from dataclasses import replace

import jax
import numpy as np
import pytest

from tests.tiny_runs import make_run, rough_params, tiny_config
from xfresearch import evaluate
from xfresearch.data.pipeline import prepare
from xfresearch.data.tokenizers import ByteTokenizer
from xfresearch.evaluation import decoded, pseudo
from xfresearch.evaluation.decoded import Decoded
from xfresearch.evaluation.losses import make_scorer
from xfresearch.evaluation.whole_rows import read_rows
from xfresearch.loading.language_model import LanguageModel
from xfresearch.runtime.errors import UserError

OUTPUTS = ["the cat sat on the mat", "a dog barked at me", "no", ""]
TARGETS = ["the cat sat on the mat", "a dog barked at him", "yes", "nothing"]


def test_exact_match_is_of_whole_texts():
    results = decoded.score(Decoded(["", "", "", ""], TARGETS, OUTPUTS), ["exact_match"])
    assert results == {"pairs": 4, "exact_match": 0.25, "exact_match_standard_error": math.sqrt(0.25 * 0.75 / 4)}
    assert decoded.score(Decoded([""], ["a"], ["a "]), ["exact_match"])["exact_match"] == 0


def test_names_of_metrics_are_checked_and_sacrebleu_is_asked_for(monkeypatch):
    assert decoded.metrics_of("exact_match, exact_match") == ["exact_match"]
    with pytest.raises(UserError, match="--decode=exact is not allowed: it must be names .* of exact_match, bleu, chrf"):
        decoded.metrics_of("exact")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert decoded.metrics_of("exact_match") == ["exact_match"]
    with pytest.raises(UserError, match="--decode=bleu needs sacrebleu, which is not installed: pip install 'xfresearch"):
        decoded.metrics_of("bleu")


@pytest.mark.parametrize("flag", [["--decode", "exact_match"], ["--pseudo-perplexity"]])
def test_flags_of_one_checkpoint_are_refused_with_others(flag):
    with pytest.raises(UserError, match=f"{flag[0]} is not allowed with --all-steps: it measures one checkpoint"):
        evaluate.parse(["--workdir", "runs/a", "--all-steps", *flag])


def test_bleu_and_chrf_are_those_of_sacrebleu():
    """The figures are those of the formulas by hand: of one sentence with 5 tokens of which 4 match, and of equal ones."""
    pytest.importorskip("sacrebleu")
    same = decoded.score(Decoded(["", ""], TARGETS[:2], TARGETS[:2]), ["bleu", "chrf"])
    assert same["bleu"] == pytest.approx(100) and same["chrf"] == pytest.approx(100)
    assert "version" in same["bleu_signature"] and "nc:6" in same["chrf_signature"]
    found = decoded.score(Decoded([""], TARGETS[1:2], OUTPUTS[1:2]), ["bleu"])
    precisions = [4 / 5, 3 / 4, 2 / 3, 1 / 2]
    assert found["bleu"] == pytest.approx(100 * math.exp(sum(map(math.log, precisions)) / 4))


@pytest.fixture
def masked(tmp_path):
    """A masked model with random parameters, and its run on a short text."""
    corpus = tmp_path / "a.txt"
    corpus.write_text("".join(f"{i * i}, " for i in range(800)))
    overrides = {"model__causal": False, "data__objective__kind": "masked", "sequence_length": 12}
    config = tiny_config(**overrides, data__corpus=f"('{corpus}',)", data__cache_dir=str(tmp_path / "cache"))
    config = replace(config, model=replace(config.model, vocab_size=258))
    return LanguageModel(config.model, rough_params(config.model), ByteTokenizer(), config)


def test_pseudo_perplexity_is_that_of_a_plain_loop(masked):
    data = read_rows(masked, "run", limit=5)
    results = pseudo.pseudo_perplexity(make_scorer(masked.config), masked.params, data, 5, 3)
    split = prepare(masked.run, "validation", tokenizer=masked.tokenizer).split
    assert len(split) >= 15
    texts = split.read([number * len(split) // 5 for number in (0, 5 // 3, 10 // 3)])["tokens"]
    losses = []
    for text_L in texts:
        for place in np.flatnonzero(text_L != 256):
            seen_L = text_L.copy()
            seen_L[place] = 257
            logits_V = np.asarray(masked(seen_L[None])[0, place], np.float64)
            losses.append(np.log(np.exp(logits_V).sum()) - logits_V[text_L[place]])
    assert results["pseudo_tokens"] == len(losses) and results["pseudo_sequences"] == 3
    assert results["pseudo_loss"] == pytest.approx(np.mean(losses), rel=1e-5)
    assert results["pseudo_perplexity"] == pytest.approx(np.exp(np.mean(losses)), rel=1e-4)


def test_what_a_model_was_not_trained_for_is_refused(masked):
    with pytest.raises(UserError, match="--decode is not allowed: .* not trained with data.objective.kind='seq2seq'"):
        decoded.decode(masked)
    data = read_rows(masked, "run", limit=2)._replace(sequences=object())
    with pytest.raises(UserError, match="--pseudo-perplexity is not allowed: the model was not trained"):
        pseudo.pseudo_perplexity(jax.jit, {}, data, 2)


@pytest.mark.parametrize("flag", [["--decode", "exact_match"], ["--pseudo-perplexity"]])
def test_what_a_model_was_not_trained_for_is_refused_before_the_evaluation(flag, tmp_path, monkeypatch):
    (tmp_path / "a.txt").write_text("the cat sat on the mat. " * 40)
    run = make_run(tmp_path / "run", steps=(1,), data__corpus=f"('{tmp_path / 'a.txt'}',)")
    monkeypatch.setattr(evaluate, "evaluate_steps", lambda *_: pytest.fail("it has measured the held-out loss"))
    with pytest.raises(UserError, match=f"{flag[0]} is not allowed: the model was not trained with"):
        evaluate.main(["--workdir", str(run), *flag])


@pytest.mark.parametrize("rows, expected", [(0, 300), (300, 299)])
def test_a_decoded_text_may_be_as_long_as_the_longest_target(rows, expected, monkeypatch):
    """The first row of a position table is that of the decoder's start."""
    config = tiny_config("tasks/sort", sequence_length=300)
    lm = LanguageModel(config.model, {}, ByteTokenizer(), config)
    asked = []
    monkeypatch.setattr(decoded, "longest_sequence", lambda model: rows)
    monkeypatch.setattr(lm, "generate", lambda **given: asked.append(given["max_new_tokens"]) or ["a"] * 2)
    decoded.decode(lm, limit=2)
    assert asked == [expected]


def test_pairs_with_an_empty_side_are_not_decoded(tmp_path, monkeypatch):
    for name in ("train", "dev"):
        (tmp_path / f"{name}.tsv").write_text("source\ttarget\na\t\n\tb\nc\td\n")
    config = tiny_config("tasks/sort", data__corpus=f"('{tmp_path}',)", data__objective__source_field="source")
    lm = LanguageModel(config.model, {}, ByteTokenizer(), config)
    monkeypatch.setattr(lm, "generate", lambda **given: ["e"] * len(given["source"].tokens_BS))
    assert decoded.decode(lm) == Decoded(["c"], ["d"], ["e"])
