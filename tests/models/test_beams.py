"""Beam search against a search in plain Python that computes the whole text again for each token."""

import math
from dataclasses import replace
from functools import partial

import jax
import numpy as np
import pytest

from tests.contracts.two_stacks import MODELS
from tests.contracts.variants import in_float64, model, random_params
from tests.reference.rules import after_rules
from xfresearch.loading.generating import way
from xfresearch.models import beams, decoding
from xfresearch.models.context import Source
from xfresearch.models.forced import begun, with_forced
from xfresearch.models.inputs import forward
from xfresearch.models.model_config import resolve_model
from xfresearch.models.sampling import NO_RULES, Beams, Rules, Sampling
from xfresearch.runtime.errors import UserError

V, STOP, LONGEST = 6, 0, 10
PROMPTS = [[1, 2, 3], [4]]


def small(config):
    config = in_float64(resolve_model(replace(config, vocab_size=V)))
    return config, random_params(config, seed=2)


@partial(jax.jit, static_argnums=0)
def _logits(config, params, tokens_BL, source):
    lm, out = forward(config, params, tokens_BL, source=source)
    return lm.logits(out.hidden_BLD)


def logits(config, params, tokens, source):
    """Of the token after these, which are padded to one length: later ones change nothing."""
    tokens_BL = np.array([tokens + [0] * (LONGEST - len(tokens))])
    return np.asarray(_logits(config, params, tokens_BL, source))[0, len(tokens) - 1]


def log_p(config, params, tokens, source, rules=NO_RULES):
    """Of the next token, after the rules."""
    return after_rules(jax.nn.log_softmax(logits(config, params, tokens, source)), tokens, rules, (STOP,))


def plain(config, params, prompt, count, how, source=None, forced=(None, None)) -> tuple[list[int], float]:
    """Sutskever et al. 2014, sec. 3.2: the best K of all continuations go on; those of the best K that end are kept. The
    probability of a forced token is 1."""
    going, ended, only = [([], 0.0)], [], {1: forced[0], count: forced[1]}
    for length in range(1, count + 1):
        found = [
            (text + [token], total + each * (only.get(length) is None))
            for text, total in going
            for token, each in enumerate(log_p(config, params, prompt + text, source, how.rules))
            if only.get(length) in (None, token)
        ]
        found = sorted(found, key=lambda item: -item[1])
        last = length == count
        ended += [(t, total / length**how.length_penalty) for t, total in found[: how.beams] if last or t[-1] == STOP]
        ended = sorted(ended, key=lambda item: -item[1])[: how.beams]
        going = [] if last else [(t, total) for t, total in found if t[-1] != STOP][: how.beams]
        if not going or len(ended) == how.beams and done(how, going[0][1], length, count, ended[-1][1]):
            break
    text, score = ended[0]
    return [token for token in text if token != STOP], score


def done(how, total: float, length: int, count: int, worst: float) -> bool:
    """Whether a search ends that has enough texts, the `worst` of which has this score."""
    if how.early_stopping is True:
        return True
    greatest = count if how.early_stopping == "never" and how.length_penalty > 0 else length
    return total / greatest**how.length_penalty <= worst


@pytest.mark.parametrize("kind", ["one stack", "two stacks"])
def test_a_search_equals_a_plain_one(kind, x64):
    two = kind == "two stacks"
    config, params = small(MODELS["pre-norm"] if two else model({"blocks.main.attention.kv_heads": 2}))
    source = Source(np.array([[5, 4, 3], [2, 1, 0]]), np.array([[1, 1, 1], [1, 1, 0]])) if two else None
    own = [Source(source.tokens_BS[:1]), Source(source.tokens_BS[1:, :2])] if two else [None, None]
    for penalty in (1.0, -1.0):
        how = Beams(3, penalty)
        found = beams.search(config, params, PROMPTS, 6, how, (STOP,), source=source)
        expected = [plain(config, params, *each) for each in zip(PROMPTS, [6] * 2, [how] * 2, own, strict=True)]
        assert [each.tokens for each in found] == [text for text, _ in expected]
        assert [each.score for each in found] == pytest.approx([score for _, score in expected], rel=1e-5)


@pytest.mark.parametrize("penalty", [2.0, 1.0, 0.0, -1.0])
def test_a_search_ends_when_its_settings_say(penalty, x64):
    """By the three values of early_stopping, which find three texts if long texts score well."""
    config, _ = small(model({}))
    params, texts = random_params(config, seed=0), []
    for early in (True, False, "never"):
        how = Beams(2, penalty, early)
        found = beams.search(config, params, [[4]], 8, how, (STOP,))[0]
        text, score = plain(config, params, [4], 8, how)
        assert found.tokens == text and found.score == pytest.approx(score, rel=1e-5)
        texts += [text]
    assert penalty < 2 or texts == [[1], [1, 3], [1, 3, 1, 3, 1, 3, 1]]


@pytest.mark.parametrize(
    "rules",
    [Rules(2), Rules(3, 4), Rules(min_length=6), Rules(repetition_penalty=1.5), Rules(bad_words_ids=[[4], [2, 3], [STOP]])],
)
def test_a_search_obeys_rules(rules, x64):
    """Of two prompts of different lengths, whose beams change places."""
    config, params = small(model({}))
    how = Beams(3, rules=rules)
    found = beams.search(config, params, PROMPTS, 7, how, (STOP,))
    expected = [plain(config, params, prompt, 7, how) for prompt in PROMPTS]
    assert [each.tokens for each in found] == [text for text, _ in expected]
    assert [each.score for each in found] == pytest.approx([score for _, score in expected], rel=1e-5)


def test_a_search_in_which_the_rules_forbid_every_token_ends(x64):
    config, params = small(model({}))
    found = beams.search(config, params, [[1, 2, 3, 4]], 6, Beams(2, rules=Rules(1)), (STOP,))[0]
    assert set(found.tokens[:1]) <= {5} and beams.search(config, params, [[*range(V)]], 2, Beams(2, rules=Rules(1)))


@pytest.mark.parametrize("forced", [(None, STOP), (2, None), (2, STOP), (3, 4)])
def test_forced_tokens_have_the_probability_1(forced, x64):
    """As BART's folders ask for. The first one is forced after a single token, so not after a longer prompt."""
    config, params = small(model({"blocks.main.attention.kv_heads": 2}))
    for prompts, own in ((PROMPTS[1:], forced), (PROMPTS[:1], (None, forced[1]))):
        found = beams.search(config, params, prompts, 6, Beams(3, 0.5), (STOP,), forced=forced)[0]
        text, score = plain(config, params, prompts[0], 6, Beams(3, 0.5), forced=own)
        assert found.tokens == text and found.score == pytest.approx(score, rel=1e-5)


def test_a_text_of_one_token_is_the_forced_one(x64):
    config, params = small(model({}))
    assert beams.search(config, params, [[4], [5]], 1, Beams(3), (STOP,), forced=(2, 3)) == [([3], 0.0)] * 2


def test_a_diverged_model_is_an_error(x64):
    config, params = small(model({}))
    params["embed"]["table"] = params["embed"]["table"].at[PROMPTS[0][-1]].set(math.nan)  # of one prompt alone
    with pytest.raises(UserError, match="log-probabilities that are NaN: did its training diverge"):
        beams.search(config, params, PROMPTS, 3, Beams(2), (STOP,))


def test_a_sampled_text_has_no_more_tokens_than_it_may():
    assert begun((2, 3), [[4]], 1) == ([[4]], 0, [], 3) and begun((2, 3), [[4]], 3) == ([[4, 2]], 1, [2], 3)
    assert begun((2, None), [[4]], 1) == ([[4, 2]], 0, [2], None)


def test_sampled_texts_are_between_forced_tokens():
    chunks = [[[5, 6], [7]], [[8], []]]
    whole = list(with_forced(iter(chunks), [1], 2, (0,), 2, 3))
    assert [sum(text, []) for text in zip(*whole, strict=True)] == [[1, 5, 6, 8, 2], [1, 7]]
    assert list(with_forced(iter(chunks), [], 0, (0,), 2, 3)) == chunks  # a stop is not yielded


def test_one_beam_is_greedy(x64):
    config, params = small(MODELS["pre-norm"])
    source = Source(np.array([[5, 4, 3]]))
    greedy = decoding.generate(config, params, PROMPTS[:1], 5, Sampling(0.0), source=source)
    assert beams.search(config, params, PROMPTS[:1], 5, Beams(1), source=source)[0].tokens == next(greedy)[0]


@pytest.mark.parametrize(
    "how, words",
    [
        (lambda: Beams(0), "beams=0"),
        (lambda: Beams(2, math.inf), "length_penalty=inf"),
        (lambda: Beams(2, early_stopping="ever"), "early_stopping='ever' .* True, False or 'never'"),
        (lambda: way(None, Sampling(0.5), 2, {}), "temperature=0.5 is not allowed with beams=2"),
        (lambda: way(None, Sampling(0.0), 1, {"length_penalty": 2.0}), "length_penalty=2.0 is not allowed with beams=1"),
        (lambda: way(None, Sampling(0.0), 1, {"early_stopping": False}), "early_stopping=False is not allowed with beams=1"),
        (lambda: Rules(no_repeat_ngram_size=-1), "no_repeat_ngram_size=-1 .* an integer of at least 0"),
        (lambda: Rules(min_length=True), "min_length=True"),
        (lambda: Rules(repetition_penalty=0), "repetition_penalty=0 .* a number above 0"),
        (lambda: Rules(bad_words_ids=[[1], []]), "bad_words_ids=.* a list of lists of token ids"),
        (lambda: Rules(bad_words_ids=[["a"]]), "bad_words_ids=.* a list of lists of token ids"),
    ],
)
def test_errors_name_the_argument(how, words):
    with pytest.raises(UserError, match=words):
        how()
