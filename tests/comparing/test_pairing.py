"""The paired comparison: worked examples, coverage of its intervals and level of its tests."""

import math

import numpy as np
import pytest

from xfresearch.harness import pairing


def outcomes(both: int, only_first: int, only_second: int, neither: int) -> tuple[list, list]:
    first = [1.0] * (both + only_first) + [0.0] * (only_second + neither)
    second = [1.0] * both + [0.0] * only_first + [1.0] * only_second + [0.0] * neither
    return first, second


def test_a_worked_example_with_values_of_0_and_1():
    """Only the first model gets 15 of 100 items, only the second gets 5: the sample variance is
    (0.20 - 0.10^2) 100/99. Half an item more for each outcome makes 15.5 and 5.5 of 102."""
    found = pairing.pair(*outcomes(60, 15, 5, 20))
    assert (found["first"], found["second"], found["items"]) == (0.75, 0.65, 100)
    assert (found["first_higher"], found["second_higher"], found["test"]) == (15, 5, "McNemar, exact")
    error = math.sqrt(0.19 * 100 / 99 / 100)
    assert found["difference"] == pytest.approx(0.10) and found["standard_error"] == pytest.approx(error)
    margin = 1.95996 * math.sqrt(15.5 + 5.5 - 10**2 / 102) / 102
    assert found["interval"] == pytest.approx([10 / 102 - margin, 10 / 102 + margin], rel=1e-4)
    exact = 2 * sum(math.comb(20, k) for k in range(15, 21)) / 2**20  # 0.0414
    assert found["p"] == pytest.approx(exact)


def test_the_paired_interval_detects_a_difference_that_two_error_bars_miss():
    """If two models agree on most items, the paired interval excludes 0; one from two separate errors includes it."""
    first, second = outcomes(480, 25, 5, 490)
    found = pairing.pair(first, second)
    separate = math.sqrt(sum(np.var(values, ddof=1) / 1000 for values in (first, second)))
    assert found["interval"][0] > 0 > found["difference"] - 1.96 * separate


def test_a_worked_example_with_real_values():
    """Student's own example (1908): the extra sleep of ten patients with two drugs, t = 4.0621, p = 0.00283."""
    first = [1.9, 0.8, 1.1, 0.1, -0.1, 4.4, 5.5, 1.6, 4.6, 3.4]
    second = [0.7, -1.6, -0.2, -1.2, -0.1, 3.4, 3.7, 0.8, 0.0, 2.0]
    found = pairing.pair(first, second)
    assert found["test"] == "Student, paired" and found["difference"] == pytest.approx(1.58)
    assert found["p"] == pytest.approx(0.00283, abs=1e-5)
    assert found["interval"] == pytest.approx([0.7001, 2.4599], abs=1e-4)


def test_models_with_equal_answers():
    """Three items on which two models agree do not show that they agree on all items."""
    found = pairing.pair([1, 0, 1], [1, 0, 1])
    assert found["interval"] == pytest.approx([-0.392, 0.392], abs=1e-3) and found["p"] == 1
    same = pairing.pair([0.5, 0.25], [0.5, 0.25])
    assert same["interval"] == [0, 0] and same["p"] == 1
    assert pairing.pair([0.5, 0.25], [0.5, 0.25])["p"] == 1
    assert pairing.pair([1.5, 0.5], [1.0, 0.0])["p"] == 0  # the same difference for every item


def test_a_single_item_shows_nothing():
    found = pairing.pair([1.0], [0.0])
    assert found["interval"][0] < 0 and found["interval"][1] == 1 and found["p"] == 1  # a difference is at most 1
    measured = pairing.pair([0.7], [0.1])
    assert math.isnan(measured["interval"][0]) and math.isnan(measured["p"])


def test_intervals_cover_the_truth_and_tests_keep_their_level():
    """Correlated pairs, as models' values are. The true difference is 0.1, or 0."""
    random = np.random.default_rng(0)
    covered, rejected, rounds = 0, 0, 600
    for _ in range(rounds):
        ease = random.random(200)  # of the items; it is the same for all models
        first, second, same = (
            (random.random(200) < np.clip(0.8 * ease + shift, 0, 1)).astype(float) for shift in (0.1, 0.0, 0.0)
        )
        low, high = pairing.pair(first.tolist(), second.tolist())["interval"]
        covered += low <= 0.1 <= high
        rejected += pairing.pair(second.tolist(), same.tolist())["p"] < 0.05
    assert 0.92 < covered / rounds < 0.98
    assert 0.01 < rejected / rounds < 0.06  # the exact test is conservative


@pytest.mark.parametrize("items, first, second", [(20, 0.05, 0.02), (50, 0.02, 0.01), (100, 0.02, 0.01)])
def test_intervals_cover_the_truth_if_models_differ_on_few_items(items, first, second):
    """Student's intervals of the mean difference cover it in 76, 77 and 86 % of the cases."""
    random = np.random.default_rng(0)
    counts = random.multinomial(items, [first, second, 1 - first - second], 2000)
    intervals = [pairing.agresti_min(*row[:2].tolist(), items) for row in counts]
    assert np.mean([low <= first - second <= high for low, high in intervals]) > 0.925


def test_holm_by_hand():
    """The smallest of four is multiplied by 4, the next by 3, and a later one is never below an earlier one."""
    assert pairing.holm([0.04, 0.01, 0.03, 0.005]) == pytest.approx([0.06, 0.03, 0.06, 0.02])
    assert pairing.holm([0.9, 0.6]) == [1.0, 1.0]
    assert pairing.holm([0.02]) == [0.02] and pairing.holm([]) == []
    unknown, *known = pairing.holm([math.nan, 0.01, 0.03])  # NaN is p of a task with one item
    assert math.isnan(unknown) and known == [0.02, 0.03]


def test_holm_bounds_the_chance_of_any_false_alarm():
    random = np.random.default_rng(0)
    alarms = [min(pairing.holm(random.random(6).tolist())) < 0.05 for _ in range(4000)]
    assert 0.035 < np.mean(alarms) < 0.06


@pytest.mark.parametrize(
    "counts, text",
    [
        ((60, 15, 5, 20), "a is 10.0 points better than b on piqa (95 % interval 1.2 to 18.4, 100 items, p 0.041)"),
        ((60, 5, 15, 20), "b is 10.0 points better than a on piqa (95 % interval 1.2 to 18.4, 100 items, p 0.041)"),
        (
            (60, 15, 5, 20, 0.08),  # p is corrected for several tasks
            "a is 10.0 points ahead of b on piqa, which may be chance (95 % interval 1.2 to 18.4, 100 items, p 0.08)",
        ),
        (
            (60, 8, 5, 27),
            "a is 3.0 points ahead of b on piqa, which may be chance (95 % interval -4.2 to 10.1, 100 items, p 0.58)",
        ),
        ((60, 5, 5, 30), "a and b are equal on piqa (95 % interval -6.4 to 6.4, 100 items, p 1)"),
        ((600, 0, 0, 600), "a and b do not differ on any of 1,200 items of piqa"),
    ],
)
def test_sentences(counts, text):
    found = pairing.pair(*outcomes(*counts[:4])) | ({"p_holm": counts[4]} if counts[4:] else {})
    assert pairing.sentence("a", "b", "piqa", "acc", found) == text


def test_a_sentence_about_real_values_has_no_percentage_points():
    found = pairing.pair([1.5, 2.5, 3.0], [1.0, 2.0, 2.6])
    text = pairing.sentence("a", "b", "lambada", "log_likelihood", found)
    assert text.startswith("a is 0.4667 of log_likelihood better than b on lambada (95 % interval 0.3")


def test_a_sentence_respects_that_lower_is_better():
    found = pairing.pair([1.5, 2.5, 3.0], [1.0, 2.0, 2.6]) | {"lower_is_better": True}
    text = pairing.sentence("a", "b", "crows_pairs", "likelihood_diff", found)
    assert text.startswith("b is 0.4667 of likelihood_diff better than a on crows_pairs (95 % interval 0.3")
