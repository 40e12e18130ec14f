"""Classes of tokens, and the weight on them."""

import numpy as np
import pytest

from tests.analysis.test_attention import planted
from tests.tiny_runs import tiny_model
from xfresearch import analysis
from xfresearch.analysis.sequences import Sequences
from xfresearch.analysis.token_classes import CLASSES, by_class, class_of, classes, even, seen


@pytest.mark.parametrize(
    "text, name",
    [(" the", "word"), ("ing", "letters"), (" née", "word"), ("42", "digits"), (" 7", "digits"), (" ==", "punctuation")]
    + [("\n\n", "space"), ("", "special"), ("\ufffd", "other"), ("x1", "other"), ("e\u0301", "letters")],
)
def test_class_of_a_text(text, name):
    assert class_of(text) == name


def test_weights_of_classes_are_those_of_their_tokens():
    lm = tiny_model("all_attention")  # with slots: weights on tokens do not sum to 1
    tokens_NL = np.array([list(b"one 22, (3)"), list(b"x\n\ny = zzz;")])
    data = analysis.attention(lm, tokens_NL).data
    names = {"blocks.1.attention.weights"}
    (weights_BHLS,) = lm.capture(tokens_NL, names).values()
    of_byte = {name: [b for b in range(256) if class_of(chr(b)) == name and b < 128] for name in CLASSES}
    for head in range(weights_BHLS.shape[1]):
        for number, name in enumerate(CLASSES):
            total = 0.0
            for b, row in enumerate(tokens_NL):
                for s, token in enumerate(row):
                    if token in of_byte[name]:
                        total += float(np.asarray(weights_BHLS, np.float64)[b, head, 1:, s].sum())
            expected = total / (len(tokens_NL) * (tokens_NL.shape[1] - 1))
            assert data["by_class"][1, head, number] == pytest.approx(expected, rel=1e-4, abs=1e-6), name
    assert data["by_class"].sum(-1).max() < 1 and data["even_by_class"].sum() == pytest.approx(1)


@pytest.mark.parametrize("causal", [True, False])
def test_equal_weights(causal):
    tokens_NL = np.array([[0, 1, 1, 0]])
    weights = [[1 / 2, 1 / 2], [1 / 3, 2 / 3], [2 / 4, 2 / 4]] if causal else [[1 / 2, 1 / 2]] * 3
    class_V = np.array([CLASSES.index("space"), CLASSES.index("word")])
    result = even(tokens_NL, class_V, seen(Sequences(tokens_NL), causal))
    np.testing.assert_allclose(result[class_V], np.mean(weights, 0))
    assert result.sum() == pytest.approx(1)


def test_a_head_that_attends_to_spaces_is_found_and_no_other():
    tokens_NL = np.array([list(b"ab cd ef")])
    space_S = tokens_NL == ord(" ")
    received_BHS = np.stack([space_S / space_S.sum(), np.full(space_S.shape, 1 / space_S.size)], 1)
    result = by_class(received_BHS, tokens_NL, classes(tiny_model("gpt2").tokenizer, 257))
    assert result[0, CLASSES.index("space")] == 1 and result[1, CLASSES.index("space")] == pytest.approx(2 / 8)


def test_without_a_tokenizer_there_are_no_classes():
    assert "by_class" not in analysis.attention(planted(), np.zeros((2, 8), int)).data
