"""What a run says of its tokens, parameters and warm-up before it trains."""

import re
from types import SimpleNamespace

import pytest

from xfresearch.run_config.closed_form import costs
from xfresearch.run_config.config_files import parse
from xfresearch.training import budget


def corpus(tokens: int, sequences: int):
    return SimpleNamespace(meta={"n_tokens": tokens, "n_sequences": sequences})


def config_of(*overrides: str, name: str = "gpt2:tiny"):
    given = ["model.vocab_size=264", *overrides]
    return parse(["--config", name, *(f"--config.{each}" for each in given)])


def test_tokens_epochs_and_tokens_per_parameter():
    config = config_of("steps=100", "batch_size=8", "sequence_length=64")
    result = budget.of(config, [corpus(tokens=25_600, sequences=400)])
    assert result == (51_200, costs(config.model, 64).parameters, 25_600, 2.0)
    words = f"51.2 k tokens: {51_200 / result.parameters:.2g} per parameter (usual for new parameters: 20), 2 epochs (up to"
    assert budget.line(config, result).startswith(words)


def test_the_corpus_that_is_repeated_most_counts():
    config = config_of("data.corpus=('a','b')", "data.weights=(3.0,1.0)", "steps=100", "batch_size=8")
    result = budget.of(config, [corpus(1000, 300), corpus(9000, 2000)])
    assert result.epochs == pytest.approx(600 / 300) and result.available == 10_000
    equal = budget.of(config_of("data.corpus=('a','b')", "steps=100", "batch_size=8"), [corpus(1, 100), corpus(1, 800)])
    assert equal.epochs == pytest.approx(4)


def test_active_parameters_count():
    config = config_of(name="moe:tiny")
    counted = costs(config.model, config.sequence_length)
    assert budget.of(config, [corpus(1, 1)]).parameters == counted.active_parameters < counted.parameters


def test_a_large_model_on_a_small_text_is_said():
    """6.7 B parameters on 12 MB of text."""
    config = config_of("model.vocab_size=32000", "steps=20000", name="llama")
    result = budget.of(config, [corpus(3_500_000, 1709)])
    (warning,) = budget.warnings(config, result)
    assert warning.startswith("6.74 B parameters and 3.5 M tokens of text do not fit: 4 epochs are 0.0021 tokens per ")
    assert budget.warnings(config, result._replace(available=2_000_000_000)) == []
    trained = config_of("start.path=runs/a", "steps=20000", "model.vocab_size=32000", name="llama")
    assert budget.warnings(trained, result) == [] and "usual" not in budget.line(trained, result)


def test_labels_have_no_usual_number_of_tokens():
    config = parse(["--config", "brody_majority:tiny"])
    result = budget.of(config, [corpus(10, 10)])
    assert budget.warnings(config, result) == [] and "usual" not in budget.line(config, result)


@pytest.mark.parametrize("steps, words", [(20, []), (5, ["longer than the run of 5 updates: .* ends at 25% of its peak"])])
def test_a_warm_up_that_does_not_end_is_said_and_allowed(steps, words):
    config = config_of("optimizer.warmup=20", f"steps={steps}")
    result = budget.warnings(config, budget.of(config, [corpus(10**9, 10**6)]))
    assert len(result) == len(words)
    for warning, word in zip(result, words, strict=True):
        assert warning.startswith("config.optimizer.warmup=20 ")
        assert re.search(word, warning)
