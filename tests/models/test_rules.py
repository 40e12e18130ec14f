"""Rules of a text, on the device, against plain Python that computes the whole text again for each token."""

import numpy as np
import pytest

from tests.contracts.two_stacks import MODELS
from tests.contracts.variants import model
from tests.models.test_beams import LONGEST, PROMPTS, STOP, V, logits, small
from tests.models.test_decoding import new_tokens
from tests.reference.rules import after_rules
from xfresearch.models.context import Source
from xfresearch.models.rules import ruled, tokens_of
from xfresearch.models.sampling import NO_RULES, Rules, Sampling

RULES = {
    "none": NO_RULES,
    "no token twice": Rules(no_repeat_ngram_size=1),
    "no pair twice": Rules(no_repeat_ngram_size=2),
    "no triple twice": Rules(no_repeat_ngram_size=3),
    "longer than any text": Rules(no_repeat_ngram_size=LONGEST + 1),
    "longer than the cache": Rules(no_repeat_ngram_size=100, bad_words_ids=[[1] * 100]),
    "a least length": Rules(min_length=7),
    "a penalty": Rules(repetition_penalty=1.7),
    "a reward": Rules(repetition_penalty=0.6),
    "words": Rules(bad_words_ids=[[STOP], [5], [2, 2], [3, 1], [4, 1], [1, 2, 3], [9, 9, 9, 9, 9]]),
    "all": Rules(3, 6, 1.3, [[STOP, 1], [2]]),
}


@pytest.mark.parametrize("rules", RULES.values(), ids=RULES)
def test_scores_are_those_of_the_definition(rules):
    """Of texts of all lengths, padded on the left, with room for tokens to come; V is small, so that much is repeated."""
    random = np.random.default_rng(0)
    texts = [random.integers(0, V, length).tolist() for length in (1, 2, 3, 5, 8, 13, 16)]
    scores_BV = random.normal(size=(len(texts), V))
    segments_BP = np.array([[0] * (16 - len(text)) + [1] * len(text) for text in texts])
    tokens_BP = np.array([[STOP] * (16 - len(text)) + text for text in texts])
    actual = np.asarray(ruled(scores_BV, rules, (STOP, 4), tokens_of(tokens_BP, segments_BP, 24), 16))
    for row, text in enumerate(texts):
        np.testing.assert_allclose(actual[row], after_rules(scores_BV[row], text, rules, (STOP, 4)), rtol=1e-6)


@pytest.mark.parametrize("kind", ["one stack", "two stacks"])
@pytest.mark.parametrize("rules", RULES.values(), ids=RULES)
def test_greedy_decoding_obeys_them_at_every_token(kind, rules, x64):
    two, count = kind == "two stacks", LONGEST - max(map(len, PROMPTS))
    config, params = small(MODELS["pre-norm"] if two else model({"blocks.main.attention.kv_heads": 2}))
    source = Source(np.array([[5, 4, 3], [2, 1, 0]])) if two else None
    stops = (STOP,)
    found = new_tokens(config, params, PROMPTS, count, Sampling(0.0, rules=rules), stops=stops, source=source)
    for row, prompt in enumerate(PROMPTS):
        text, own = list(prompt), source and Source(source.tokens_BS[row : row + 1])
        while len(text) < len(prompt) + count:
            scores_V = after_rules(logits(config, params, text, own), text, rules, stops)
            if (token := int(scores_V.argmax())) in stops:
                break
            text.append(token)
        assert found[row] == text[len(prompt) :]


def test_a_sampled_text_obeys_them(x64):
    """Each of its tokens is one that the rules allow after those before it, and all that they allow are drawn."""
    config, params = small(model({}))
    rules = Rules(no_repeat_ngram_size=2, bad_words_ids=[[3]])
    texts = new_tokens(config, params, [[1, 2, 1]] * 64, 5, Sampling(3.0, top_p=1.0, rules=rules))
    firsts = {text[0] for text in texts}
    assert firsts == {0, 1, 4, 5}
    for text in texts:
        whole = [1, 2, 1, *text]
        assert 3 not in text and len({*zip(whole, whole[1:], strict=False)}) == len(whole) - 1
