"""The rows that analyses read of a model with an encoder: one pair in each, as in training, with padding at the end."""

import numpy as np
import pytest

from tests.tiny_runs import tiny_model
from xfresearch.analysis.passes import half_of
from xfresearch.analysis.prompts import Prompt, read
from xfresearch.analysis.sequences import Sequences, batches, concatenated, first_of_rows, mean_of_tokens, sequences
from xfresearch.data.pipeline import prepare
from xfresearch.runtime.errors import UserError


@pytest.fixture(scope="module")
def lm():
    return tiny_model("tasks/reverse", source_length=24, sequence_length=24)


def pair(lm, rows: Sequences, number: int) -> tuple[list[int], list[int]]:
    """The ids of a source and of a target, without padding."""
    sides = rows.of_source, rows
    return tuple(np.asarray(side.tokens_NL)[number][np.asarray(side.real_NL)[number]].tolist() for side in sides)


def test_rows_of_a_corpus_are_its_pairs(lm):
    rows, ends, start = sequences(lm, None, 5), lm.tokenizer.end_of_text, lm.tokenizer.decoder_start
    assert len(rows) == 5 and rows.tokens_NL.shape[1] == max(len(pair(lm, rows, n)[1]) for n in range(5))
    assert not np.asarray(rows.real_NL).all() and not np.asarray(rows.of_source.real_NL).all()
    for number in range(5):
        source, target = pair(lm, rows, number)
        assert target[0] == start and source[-1] == target[-1] == ends and target[1:-1] == source[:-1][::-1]
    assert (sequences(lm, None, 3, split="train").tokens_NL[0] != rows.tokens_NL[0][:1]).any()


def test_given_texts_are_encoded_as_in_training(lm):
    rows = sequences(lm, ["cba", "yx"], source=["abc", "xy"])
    again = sequences(lm, None, 2)
    assert [pair(lm, rows, n)[1] for n in (0, 1)] == [[256, 99, 98, 97, 256], [256, 121, 120, 256]]
    assert pair(lm, rows, 1)[0] == [120, 121, 256] and pair(lm, again, 0)[1][0] == 256
    both = concatenated([rows, again])
    assert len(both) == 4 and pair(lm, both, 1) == pair(lm, rows, 1) and pair(lm, both, 3) == pair(lm, again, 1)


def test_the_last_token_is_predicted_and_not_read(lm):
    rows = sequences(lm, ["cba", "yx"], source=["abc", "xy"])
    np.testing.assert_array_equal(rows.inputs.tokens_NL, [[256, 99, 98, 97], [256, 121, 120, 256]])
    np.testing.assert_array_equal(rows.inputs.real_NL, [[1, 1, 1, 1], [1, 1, 1, 0]])
    np.testing.assert_array_equal(np.where(rows.has_next_NL, rows.next_NL, 0), [[99, 98, 97, 256], [121, 120, 256, 0]])
    alone = Sequences(np.array([[1, 2, 3]]))  # of a model of a single stack: all tokens are read
    np.testing.assert_array_equal(alone.inputs.tokens_NL, [[1, 2, 3]])
    np.testing.assert_array_equal(alone.has_next_NL, [[True, True, False]])
    np.testing.assert_array_equal(alone.next_NL, [[2, 3, 0]])
    assert [real for _, real in batches(concatenated([alone] * 5), 2)] == [2, 2, 1]
    assert float(mean_of_tokens(np.array([[1.0, 5.0, 9.0]]), np.array([[True, True, False]]))[0]) == 3.0


def test_the_first_pair_of_a_packed_row(lm):
    packed = prepare(lm.run, "train", None, lm.tokenizer).read(range(4))
    assert packed["segments"].max() > 1
    rows = first_of_rows(packed)
    for number in range(4):
        source, target = pair(lm, rows, number)
        assert target[1:-1] == source[:-1][::-1] and target[-1] == source[-1] == 256


def test_padding_and_repeated_tokens_end_with_the_tables_of_positions():
    lm = tiny_model("tasks/reverse", source_length=6, sequence_length=24)
    rows, last = read(lm, [Prompt((1, 2, 3), 0, 0, ())])
    assert rows.of_source.tokens_NL.shape == (1, 6) and list(last) == [0]
    assert half_of(lm.config, 20, 64) == 3 and half_of(tiny_model("gpt2").config, 20, 64) == 10


def test_a_model_of_a_single_stack_has_no_source():
    with pytest.raises(UserError, match="^source is not allowed: this model has no encoder"):
        sequences(tiny_model("gpt2"), [[1, 2]], source="a")
    with pytest.raises(UserError, match="the run of this model needs data.objective.kind one of"):
        run = tiny_model("tasks/reverse")
        run.run = tiny_model("gpt2").run
        sequences(run)
