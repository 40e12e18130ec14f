"""The paired comparison: worked examples, coverage of its intervals and level of its tests."""

import math

import numpy as np
import pytest

from xfresearch.comparing import pairing
from xfresearch.evaluation import losses


def outcomes(both: int, only_first: int, only_second: int, neither: int) -> tuple[list, list]:
    """Values of a model and of the reference on items of which so many are right for both, one or none of them."""
    first = [1.0] * (both + only_first) + [0.0] * (only_second + neither)
    second = [1.0] * both + [0.0] * only_first + [1.0] * only_second + [0.0] * neither
    return first, second


def test_a_worked_example_with_values_of_0_and_1():
    """Only the model gets 15 of 100 items, only the reference gets 5: the sample variance is
    (0.20 - 0.10^2) 100/99. Half an item more for each outcome makes 15.5 and 5.5 of 102."""
    result = pairing.pair(*outcomes(60, 15, 5, 20))
    assert (result["value"], result["reference"], result["items"]) == (0.75, 0.65, 100)
    assert (result["higher"], result["lower"], result["test"]) == (15, 5, "McNemar, exact")
    error = math.sqrt(0.19 * 100 / 99 / 100)
    assert result["difference"] == pytest.approx(0.10) and result["standard_error"] == pytest.approx(error)
    margin = 1.95996 * math.sqrt(15.5 + 5.5 - 10**2 / 102) / 102
    assert result["interval"] == pytest.approx([10 / 102 - margin, 10 / 102 + margin], rel=1e-4)
    exact = 2 * sum(math.comb(20, k) for k in range(15, 21)) / 2**20  # 0.0414
    assert result["p"] == pytest.approx(exact)


def test_the_paired_interval_detects_a_difference_that_two_error_bars_miss():
    """If two models agree on most items, the paired interval excludes 0; one from two separate errors includes it."""
    first, second = outcomes(480, 25, 5, 490)
    result = pairing.pair(first, second)
    separate = math.sqrt(sum(np.var(values, ddof=1) / 1000 for values in (first, second)))
    assert result["interval"][0] > 0 > result["difference"] - 1.96 * separate


def test_a_worked_example_with_real_values():
    """Student's own example (1908): the extra sleep of ten patients with two drugs, t = 4.0621, p = 0.00283."""
    first = [1.9, 0.8, 1.1, 0.1, -0.1, 4.4, 5.5, 1.6, 4.6, 3.4]
    second = [0.7, -1.6, -0.2, -1.2, -0.1, 3.4, 3.7, 0.8, 0.0, 2.0]
    result = pairing.pair(first, second)
    assert result["test"] == "Student, paired" and result["difference"] == pytest.approx(1.58)
    assert result["p"] == pytest.approx(0.00283, abs=1e-5)
    assert result["interval"] == pytest.approx([0.7001, 2.4599], abs=1e-4)


def test_models_with_equal_answers():
    """Three items on which two models agree do not show that they agree on all items."""
    result = pairing.pair([1, 0, 1], [1, 0, 1])
    assert result["interval"] == pytest.approx([-0.392, 0.392], abs=1e-3) and result["p"] == 1
    same = pairing.pair([0.5, 0.25], [0.5, 0.25])
    assert same["interval"] == [0, 0] and same["p"] == 1
    assert pairing.pair([0.5, 0.25], [0.5, 0.25])["p"] == 1
    assert pairing.pair([1.5, 0.5], [1.0, 0.0])["p"] == 0  # the same difference for every item


def test_a_single_item_shows_nothing():
    result = pairing.pair([1.0], [0.0])
    assert result["interval"][0] < 0 and result["interval"][1] == 1 and result["p"] == 1  # a difference is at most 1
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


def judged(counts, lower_is_better=False, p_holm=None, margin=0.0) -> str:
    actual = pairing.pair(*outcomes(*counts)) | {"lower_is_better": lower_is_better}
    return pairing.verdict(actual | {"p_holm": actual["p"] if p_holm is None else p_holm}, margin)


@pytest.mark.parametrize(
    "counts, options, text",
    [
        ((60, 15, 5, 20), {}, "better"),  # the interval is 0.012 to 0.184, p is 0.041
        ((60, 5, 15, 20), {}, "worse"),
        ((60, 15, 5, 20), {"lower_is_better": True}, "worse"),
        ((60, 5, 15, 20), {"lower_is_better": True}, "better"),
        ((60, 15, 5, 20), {"p_holm": 0.08}, "no difference shown"),  # p is corrected for several tasks
        ((60, 8, 5, 27), {}, "no difference shown"),  # the interval is -0.042 to 0.101
        ((60, 5, 5, 30), {}, "no difference shown"),  # the same share, but the interval is -0.064 to 0.064
        ((60, 5, 5, 30), {"margin": 0.06}, "no difference shown"),
        ((60, 5, 5, 30), {"margin": 0.07}, "equal within 0.07"),
        ((60, 8, 5, 27), {"margin": 0.1}, "no difference shown"),
        ((600, 0, 0, 600), {}, "no difference shown"),
        ((600, 0, 0, 600), {"margin": 0.01}, "equal within 0.01"),
        ((60, 15, 5, 20), {"margin": 0.2}, "equal within 0.2"),  # the user says that 0.184 is no difference
    ],
)
def test_verdicts(counts, options, text):
    assert judged(counts, **options) == text


def test_a_difference_of_rounding_is_not_shown():
    """Two ways to compute one model: every unit differs by about 2e-7 of its loss, in one direction."""
    random = np.random.default_rng(0)
    tokens_U, nll_U = np.full(50, 10.0), random.normal(30, 3, 50)
    for part, text in ((2e-7, "no difference shown"), (2e-5, "worse")):
        result = pairing.pair_ratios((nll_U * (1 + part * random.random(50)), tokens_U), (nll_U, tokens_U))
        assert result["p"] < 1e-6 and pairing.verdict(result | {"p_holm": result["p"]}) == text


def test_without_an_interval_nothing_is_shown():
    single = pairing.pair_ratios(sums([2.0], [4]), sums([3.0], [4])) | {"p_holm": math.nan}
    assert math.isnan(single["interval"][0]) and pairing.verdict(single, 100.0) == "no difference shown"
    diverged = pairing.pair_ratios(sums([math.nan, 1], [4, 4]), sums([3.0, 1], [4, 4])) | {"p_holm": math.nan}
    assert pairing.verdict(diverged, 100.0) == "not finite"


def sums(values, sizes) -> tuple[np.ndarray, np.ndarray]:
    return np.array(values, float), np.array(sizes, float)


def test_a_worked_example_of_two_losses():
    """Two units of 1 and 3 tokens: the losses are 8/4 and 7/4. The residuals of the differences are
    (2 - 1 - 1/4) / 4 and (6 - 6 - 3/4) / 4."""
    result = pairing.pair_ratios(sums([2, 6], [1, 3]), sums([1, 6], [1, 3]))
    assert (result["value"], result["reference"], result["difference"], result["units"]) == (2, 1.75, 0.25, 2)
    error = math.sqrt(2 * 2 * (0.75 / 4) ** 2)
    assert result["standard_error"] == pytest.approx(error)
    assert result["interval"] == pytest.approx([0.25 - 12.7062 * error, 0.25 + 12.7062 * error], rel=1e-5)


def test_the_error_of_one_loss_is_that_of_the_evaluation():
    random = np.random.default_rng(0)
    tokens_U = random.integers(1, 50, 30)
    nll_U = tokens_U * random.normal(3, 0.5, 30)
    own = pairing.ratio(nll_U, tokens_U)
    known = losses.summary({"nll": nll_U, "correct": 0 * nll_U, "tokens": tokens_U})
    assert own["value"] == pytest.approx(known["loss"]) and own["units"] == known["units"] == 30
    assert own["standard_error"] == pytest.approx(known["standard_error"])


def test_units_that_nobody_read_do_not_count():
    result = pairing.pair_ratios(sums([2, 0, 6], [1, 0, 3]), sums([1, 0, 6], [1, 0, 3]))
    assert result == pairing.pair_ratios(sums([2, 6], [1, 3]), sums([1, 6], [1, 3]))


@pytest.mark.parametrize("same_sizes", [True, False])
def test_intervals_of_losses_cover_the_truth(same_sizes):
    """Units of unequal sizes whose difficulty is the same for both models. Unpaired intervals would be far wider. With
    other tokenizers, a unit has other sizes for the two models."""
    random = np.random.default_rng(0)
    covered, rejected, widths, rounds = 0, 0, [], 1000
    for _ in range(rounds):
        sizes_U = random.integers(20, 80, 60).astype(float)
        others_U = sizes_U if same_sizes else sizes_U + random.integers(-2, 3, 60)
        ease_U = random.normal(3, 0.5, 60)
        losses = [size_U * (ease_U + shift + random.normal(0, 0.1, 60))
                  for size_U, shift in ((sizes_U, 0.05), (others_U, 0.0), (others_U, 0.0))]  # fmt: skip
        result = pairing.pair_ratios((losses[0], sizes_U), (losses[1], others_U))
        covered += result["interval"][0] <= 0.05 <= result["interval"][1]
        widths.append(result["interval"][1] - result["interval"][0])
        rejected += pairing.pair_ratios((losses[1], others_U), (losses[2], others_U))["p"] < 0.05
    assert 0.93 < covered / rounds < 0.97 and 0.03 < rejected / rounds < 0.07
    assert np.mean(widths) < 0.2  # two separate error bars of 0.07 would give 0.39
