"""The metrics of edits equal their definitions."""

import math
import time

import numpy as np
import pytest

from tests.editing.words import knowing
from xfresearch.analysis.recall import Scores
from xfresearch.data.facts import Fact
from xfresearch.data.records import Record, record_of
from xfresearch.editing import scores
from xfresearch.editing.scores import consistency, entropy, harmonic, measure, summary
from xfresearch.runtime.summaries import bootstrap_interval


def test_each_measure_of_a_network_that_is_known():
    lm = knowing(strength=2.0)
    prompts = {"paraphrases": (" Bea", "Bea Bea"), "neighbours": (("Cid", "blue"), (" Cid", "blue"), ("Ada", "blue"))}
    request = Record("Bea", "{}", "blue", "red", consequences=(("Ada", "red", "green"),), **prompts)
    values = measure(lm, [request, Record("Ada", "{}", "", "blue")], generate=False).values
    V = lm.config.vocab_size
    total = math.exp(2.0) + math.exp(1.0) + (V - 2)  # the object, the token itself, all others
    known, other = math.exp(2.0) / total, 1 / total
    assert values["efficacy, magnitude"][0] == pytest.approx(other - known, rel=1e-5)
    assert values["efficacy, score"][0] == 0 and values["paraphrase, score"][0] == 0
    assert values["neighbourhood, score"][0] == pytest.approx(2 / 3)  # blue after Cid, not after Ada
    assert values["neighbourhood, magnitude"][0] == pytest.approx((known - other) / 3, rel=1e-5)
    for name in ("teacher forced", "generated"):
        assert values[f"neighbourhood, {name}"][0] == pytest.approx(2 / 3)
    assert values["ripple, score"][0] == values["ripple, generated"][0] == 1.0
    assert values["efficacy, generated"][1] == 0 and np.isnan(values["efficacy, score"][1])  # no object before
    assert np.isnan(values["paraphrase, score"][1])


def test_every_prompt_of_a_request_counts():
    """Two of four paraphrases, and ten of twelve other prompts of each kind, have the new object."""
    neighbours = (("Cid", "blue"),) * 10 + (("Ada", "blue"),) * 2
    consequences = tuple((*each, "red") for each in neighbours)
    request = Record("Bea", "{}", "red", "blue", "", ("Bea", "Bea", "Ada", "Dov"), neighbours, consequences)
    lm = knowing(strength=2.0)
    values = measure(lm, [request], generate=False).values
    assert values["paraphrase, score"][0] == 0.5
    assert values["neighbourhood, generated"][0] == values["ripple, score"][0] == pytest.approx(10 / 12)
    assert measure(lm, [request], generate=False, prompts=2).values["paraphrase, score"][0] == 1.0


def test_the_cost_of_many_requests_is_linear(monkeypatch):
    def seconds(count: int) -> float:
        start = time.process_time()
        measure(None, [Record("Bea", "{}", "blue", "red")] * count, generate=False)
        return time.process_time() - start

    def scored(lm, prompts, *_) -> Scores:
        return Scores(*(np.ones(len(prompts)) for _ in Scores._fields))

    monkeypatch.setattr(scores, "score", scored)
    assert min(seconds(1000) for _ in range(3)) < 10 * min(seconds(250) for _ in range(3))  # 4 if linear, 16 if quadratic


def test_forced_and_generated_objects_differ():
    """Of two tokens the second is right after the right first one, which the model does not say."""
    lm = knowing()
    result = measure(lm, [Record("Bea", "{}", "blue", "Ada red")], generate=False)
    assert result.values["efficacy, teacher forced"][0] == 0.5 and result.values["efficacy, generated"][0] == 0
    assert result.new[0] < 0.01 < result.old[0]
    V, e = lm.config.vocab_size, math.exp
    first, second = 1 / (e(12) + e(1) + V - 2), e(12) / (e(12) + e(1) + V - 2)
    assert result.new[0] == pytest.approx(first * second, rel=1e-4)
    score = result.values["efficacy, magnitude"][0]
    assert score == pytest.approx(math.sqrt(first * second) - e(12) / (e(12) + e(1) + V - 2), rel=1e-4)


def test_entropy_of_words():
    assert entropy(["a a a a a"]) == 0
    text = "the cat sat on the mat"  # five bigrams, four trigrams, all different
    assert entropy([text]) == pytest.approx((2 / 3 * math.log2(5) + 4 / 3 * math.log2(4)) / 2)
    assert entropy([text, "a a a a a"]) == pytest.approx(entropy([text]) / 2)
    assert entropy(["b a b a b"]) == pytest.approx((2 / 3 * 1.0 + 4 / 3 * entropy_of(2 / 3)) / 2)
    assert math.isnan(entropy([]))


def entropy_of(p: float) -> float:
    return -(p * math.log2(p) + (1 - p) * math.log2(1 - p))


def test_consistency_is_the_cosine_of_tf_idf():
    references = (["red fox"], ["red dog dog"], [])
    result = consistency((["Red fox!"], ["red"], ["red"]), references)
    common, rare = math.log(4 / 3) + 1, math.log(4 / 2) + 1
    assert result[0] == pytest.approx(1.0) and math.isnan(result[2])
    assert result[1] == pytest.approx(common / math.hypot(common, 2 * rare))


def test_the_harmonic_mean_and_its_interval():
    assert harmonic([1.0, 1.0], [0.5, 0.5], [1.0, 1.0]) == pytest.approx(0.75)
    assert harmonic([1.0], [0.0], [1.0]) == 0.0 and math.isnan(harmonic([1.0], [np.nan], [1.0]))
    rng = np.random.default_rng(0)
    inside = 0
    for _ in range(200):
        _, low, high = bootstrap_interval(np.mean, rng.random(40), resamples=400)
        inside += low < 0.5 < high
    assert 0.89 < inside / 200 < 0.99  # of the 95 % intervals
    assert bootstrap_interval(np.mean, [1.0])[0] == 1.0 and math.isnan(bootstrap_interval(np.mean, [1.0])[1])
    rows = bootstrap_interval(lambda a, b: float((a == b).all()), np.arange(9.0), np.arange(9.0))
    assert rows == (1.0, 1.0, 1.0)  # columns are resampled together


def test_the_summary_has_S_of_the_three_scores():
    lm = knowing()
    request = Record("Bea", "{}", "blue", "green", paraphrases=(" Bea",), neighbours=(("Cid", "blue"),))
    result = summary(measure(lm, [request], generate=False))
    assert result["S"][0] == 0.0 and result["neighbourhood, score"][0] == 1.0


def test_what_follows_from_a_fact_and_who_shares_the_new_object():
    known = [
        Fact("Ada", "birth city", "Rome", ("Ada was born in",), ("The birth place of Ada is",)),
        Fact("Bea", "birth city", "Oslo", ("Bea was born in",), ()),
        Fact("Rome", "country", "Italy", ("Rome is in",), ()),
        Fact("Oslo", "country", "Norway", ("Oslo is in",), ()),
        Fact("Ada", "birth country", "Italy", ("Ada comes from",), ()),
    ]
    record = record_of(known[0], known, "Oslo")
    assert record.consequences == (("Ada comes from", "Norway", "Italy"),)
    assert record.references == ("Bea was born in Oslo.",) and record.target_new == "Oslo"
    moved = record_of(known[2], known, "Spain")
    assert moved.consequences == (("Ada comes from", "Spain", "Italy"),)
