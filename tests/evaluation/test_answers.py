"""Whole answers: which are right, by difficulty, and which of those that a model generates are accepted."""

import math
from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
import pytest

from xfresearch.data.labelled import LabelledSplit
from xfresearch.data.pipeline import evaluation_batches, spread
from xfresearch.data.tasks.task import ENDLESS
from xfresearch.evaluation import answers, losses, whole_rows
from xfresearch.run_config.config_files import parse
from xfresearch.runtime.errors import UserError
from xfresearch.studies.measurement import blocks
from xfresearch.training import budget, outline

CORPUS = "depo:nodes=3,hops=3,queries=3,symbols=3,shortest_word=1,longest_word=2"


def test_an_answer_is_right_if_all_its_labels_are():
    answers_BL = np.array([[0, 1, 1, 2, 0, 3], [0, 0, 1, 1, 1, 0]])
    correct_BL = np.array([[1, 1, 0, 1, 1, 1], [0, 1, 1, 1, 1, 0]])
    right_BA, count_B = losses.right_answers(correct_BL, answers_BL)
    np.testing.assert_array_equal(right_BA, [[0, 1, 1, 0, 0, 0], [1, 0, 0, 0, 0, 0]])
    np.testing.assert_array_equal(count_B, [3, 1])


def measured(corpus: str, length: int, is_right, count: int = 20):
    """whole_rows.row_sums of a scorer whose labels are right where is_right(tokens, targets, positions) says so."""
    data = whole_rows.Rows(corpus, "validation", LabelledSplit(corpus, "validation", length), range(count), length, "label")

    def scorer(params, batch):
        correct_BL = is_right(batch["tokens"], batch["targets"], batch["positions"]) & (batch["weights"] > 0)
        return [jnp.where(correct_BL, 0.0, batch["weights"]), jnp.asarray(correct_BL, float)]

    return data, whole_rows.row_sums(scorer, {}, data, 8)


def test_accuracy_is_that_of_answers_of_each_difficulty():
    """A model that knows the first letters alone is right where the answer is a word of one token."""
    length = 1 + 2 * 3 * 2 + 3 * 6

    def first_letters(tokens_BL, targets_BL, positions_BL):
        return tokens_BL == 1 + 2 * 3 + 3  # the answer mark: the label is the first token of an answer

    data, sums = measured(CORPUS, length, first_letters)
    result = whole_rows.metrics(sums)
    examples = data.sequences.examples(spread(4096, 20))
    lengths = {}  # of the answers, by difficulty
    for row in range(20):
        for number in range(1, examples.answers[row].max() + 1):
            here = examples.answers[row] == number
            lengths.setdefault(str(examples.difficulty[row][here][0]), []).append(here.sum())
    assert sum(map(len, lengths.values())) == 60 and lengths.keys() == {"1", "2", "3"}
    expected = {k: {"accuracy": np.mean(np.array(each) == 1), "answers": len(each)} for k, each in lengths.items()}
    assert result["by_difficulty"] == {k: pytest.approx(expected[k]) for k in expected}
    right = sum(each["accuracy"] * each["answers"] for each in expected.values())
    assert result["accuracy"] == pytest.approx(right / 60) and 0.1 < right / 60 < 0.9
    labels = sum(map(sum, lengths.values()))
    assert result["tokens"] == labels and result["loss"] == pytest.approx((labels - 60) / labels)  # the second letters
    # The blocks of a study have the same ratio.
    parts = blocks(sums, "accuracy")
    assert sum(parts["values"]) / sum(parts["sizes"]) == pytest.approx(result["accuracy"], abs=1e-3)


def test_training_measures_whole_answers_too():
    """The evaluator of a run sums what evaluate sums."""
    split = LabelledSplit(CORPUS, "validation", 31)

    def evaluator(params, batch, byte_lengths):
        right_BA, answers_B = losses.right_answers(batch["weights"] > 0, batch["answers"])
        labels_B = jnp.asarray(batch["weights"].sum(-1))
        return {"nll": labels_B, "correct": right_BA.sum(-1), "tokens": labels_B, "answers": answers_B}

    sums = losses.sums_of_batches(evaluator, {}, evaluation_batches(split, 8, 20), None)
    assert losses.summary(sums)["accuracy"] == 1 and sums["answers"].sum() == 60


class Generated:
    """In place of decoding: the answers of the data for even rows, and wrong ones for odd rows."""

    def __init__(self, monkeypatch, right, end: int):
        self.right, self.end, self.asked = right, end, []
        monkeypatch.setattr(answers, "generate", self)

    def __call__(self, model, params, prompts, room, sampling, seed, stops, vocab_size, mesh):
        assert stops == (self.end,)
        texts = [self.right(prompt) if (seed + row) % 2 == 0 else [1] * room for row, prompt in enumerate(prompts)]
        self.asked.append((sampling, len(prompts)))
        yield [text[:3] for text in texts]
        yield [text[3:] for text in texts]


def figures(corpus: str, length: int, count: int) -> dict[str, float]:
    overrides = f"--config.data.corpus=('{corpus}',)", f"--config.sequence_length={length}"
    config = parse(["--config", "playground:tiny", *overrides])
    data = whole_rows.Rows(corpus, "validation", LabelledSplit(corpus, "validation", length), range(count), length, "label")
    return answers.figures(config.model, {}, data, {"loss": 1.0})


@pytest.mark.parametrize("corpus, length", [("brevo:nodes=5", 40), ("lano:depth=2", 12)])
def test_generated_answers_are_accepted(monkeypatch, corpus, length):
    split = LabelledSplit(corpus, "validation", length)
    tokens_NL = split.examples(spread(len(split), 70)).tokens.tolist()
    answer_of = {}
    for tokens in tokens_NL:
        prompt = split.data_set.prompt(tokens)
        answer_of[tuple(prompt)] = tokens[len(prompt) : tokens.index(split.data_set.end)]
    generated = Generated(monkeypatch, lambda prompt: answer_of[tuple(prompt)], split.data_set.end)
    result = figures(corpus, length, 70)
    assert result["accepted"] == 0.5 and ("divergence" in result) == corpus.startswith("lano")
    assert [rows for _, rows in generated.asked] == [64, 64]
    assert {sampling.temperature for sampling, _ in generated.asked} == {split.data_set.temperature}
    # The wrong answers never end, which is enough.
    monkeypatch.setattr(type(split.data_set), "accepts", lambda *_: True)
    assert figures(corpus, length, 70)["accepted"] == 0.5


def test_own_figures_need_the_data_set():
    assert figures("mano:operations=2", 24, 10) == {}
    bits = figures("capo:people=10", 36, 10)
    assert bits["bits_per_person"] == pytest.approx(73.8 - 11 / math.log(2), abs=0.1)


def test_a_split_without_end_is_read_with_a_limit_alone():
    split = LabelledSplit("mano:operations=2", "train", 24)
    assert len(split) == ENDLESS and len(list(evaluation_batches(split, 4, 8))) == 2
    with pytest.raises(UserError, match="split 'train' does not end: give a number of sequences"):
        list(evaluation_batches(split, 4))
    config = parse(["--config", "playground:tiny"])
    lm = SimpleNamespace(config=config.model, run=config, tokenizer=None)
    with pytest.raises(UserError, match="--limit=0 is not allowed with split 'train' of .*, which does not end"):
        whole_rows.read_rows(lm, "a", split="train")
    tokens = budget.of(config, [split])
    assert budget.line(config, tokens).endswith("all of them new") and not budget.warnings(config, tokens)
    assert outline.data_line(config, [split], split) == f"{config.data.corpus[0]}: sequences without end to train on; " + (
        "validation sequences without end"
    )
