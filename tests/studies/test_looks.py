"""Looks before the end: levels, which arms get more runs, and false verdicts of simulated studies that stop."""

import numpy as np
import pytest

from tests.studies.simulated import BUDGETS, GRID, MARGIN, PAIRS, PLACES_RF, SIZES, TUNED, World, world
from xfresearch.runtime.errors import UserError
from xfresearch.studies import rates, simultaneous, study_plan, verdicts
from xfresearch.studies.allocation import Cell, Ladder
from xfresearch.studies.design import Study, described, rungs

ARMS = ("base", "a", "b", "c")
LARGE = np.array([[0.0], [10 * MARGIN], [10 * MARGIN], [10 * MARGIN]]) * np.ones(6)  # of the baseline and three arms
LARGE[3, 3:] = 0.6 * MARGIN


def ladder(**options) -> Ladder:
    sizes = {f"s{number}": () for number in range(len(SIZES))}
    named = Study(sizes=sizes, budgets=BUDGETS, arms={arm: () for arm in ARMS}, baseline="base", rates=GRID, **options)
    study = Study(**(vars(named) | {"tune_at": tuple(rungs(named)[at].name for at in TUNED)}))
    return Ladder(study, rates.carry(PLACES_RF, TUNED))


def made(ladder: Ladder, world: World, rng, noise_ARN=None) -> dict:
    """The runs that a study makes, in the order in which it can, of a known truth."""
    names, results = [rung.name for rung in rungs(ladder.study)], {}
    noise_ARN = rng.standard_normal((len(ARMS), len(names), ladder.study.seeds)) if noise_ARN is None else noise_ARN
    while ready := ladder.ready(results, verdicts.pairs_of_arms(ladder, results)):
        for trial in ready:
            arm, rung = ARMS.index(trial.cell.arm), names.index(trial.cell.rung)
            noise = rng.standard_normal() if trial.tunes else noise_ARN[arm, rung, trial.seed]
            results[trial] = world.run(arm, rung, trial.rate, noise)
    return results


def found(ladder: Ladder, results: dict) -> tuple[dict[str, int], np.ndarray]:
    """Pairs and verdicts [A, R] of the arms, each of the look at which it was settled."""
    pairs, words = verdicts.pairs_of_arms(ladder, results), {}
    for look in verdicts.looks(ladder.study):
        if look.pairs <= pairs["base"]:
            estimates = verdicts.evidence(ladder, results, pairs, look).intervals(look)
            words[look.pairs] = verdicts.verdicts_of(estimates, ladder.study.margin, look.level)
    return pairs, np.array([words[pairs[arm]][at] for at, arm in enumerate(ARMS[1:])])


def false(words_AR, true_AR) -> bool:
    wrong = (words_AR == "better") & (true_AR >= 0) | (words_AR == "worse") & (true_AR <= 0)
    return bool((wrong | (words_AR == "equivalent") & (np.abs(true_AR) >= MARGIN)).any())


def test_levels_spend_little_at_first_and_sum_to_the_whole():
    """Five equal looks, 5 % two-sided: 1.08e-6, 7.88e-4, 7.62e-3 and so on are spent (Lan & DeMets 1983, table 1, has 4.8769
    and 3.3569 as the first bounds)."""
    assert verdicts.levels([1, 2, 3, 4, 5]) == pytest.approx([1.08e-6, 7.87e-4, 6.83e-3, 0.0168, 0.0256], rel=0.02)
    assert sum(verdicts.levels([3, 5, 8])) == pytest.approx(0.05) and verdicts.levels([5]) == pytest.approx([0.05])


def test_a_study_without_looks_is_the_one_that_it_was():
    plain = ladder(margin=MARGIN).study
    assert "looks" not in described(plain) and "looks" in described(ladder(looks=(3,)).study)  # so its ledger is the same
    assert verdicts.looks(plain) == [verdicts.Look(5, pytest.approx(0.05), simultaneous.DRAWS)]
    assert set(verdicts.pairs_of_arms(ladder(margin=MARGIN), {}).values()) == {5}


def test_a_look_that_is_too_early_is_refused():
    with pytest.raises(UserError, match=r"looks=\(2,\) is not allowed: it must be a later first look"):
        verdicts.looks(ladder(looks=(2,), seeds=20).study)


def test_an_arm_that_is_settled_gets_no_more_runs_and_the_others_do():
    rng, tested = np.random.default_rng(3), ladder(looks=(3,), margin=MARGIN)
    noise_ARN = 0.2 * rng.standard_normal((4, 6, PAIRS))
    noise_ARN[3] *= 5  # so the last arm is settled where its effect is large, and not at the other rungs
    results = made(tested, world()._replace(effect_AR=LARGE), rng, noise_ARN)
    pairs, words_AR = found(tested, results)
    assert pairs == {"base": 5, "a": 3, "b": 3, "c": 5}
    decide = [trial for trial in results if not trial.tunes]
    assert len(decide) == 6 * sum(pairs.values()) and not tested.ready(results, pairs)
    assert (words_AR[:2] == "worse").all() and (words_AR[2, :3] == "worse").all()
    seen = verdicts.evidence(tested, results, pairs, verdicts.looks(tested.study)[1])
    assert np.isfinite(seen.differences_ARN).all()  # of all arms, as the critical values are
    assert seen.differences_ARN[0, 0, 3:] == pytest.approx(seen.differences_ARN[0, 0, :2])


def test_the_level_of_a_look_makes_its_intervals_wider():
    differences_ARN = np.random.default_rng(0).standard_normal((3, 6, 3))
    seen = verdicts.Evidence(differences_ARN, np.zeros((1, 3, 6)))
    early, whole = (seen.intervals(verdicts.Look(3, level, 4000)) for level in (0.0076, 0.05))
    assert early.critical > 1.2 * whole.critical and (early.low < whole.low).all()


def test_an_arm_that_diverged_gets_no_more_runs():
    tested, truth = ladder(looks=(3,), margin=MARGIN), world()
    rungs_of = {rung.name: number for number, rung in enumerate(rungs(tested.study))}
    results = {}
    while ready := tested.ready(results, verdicts.pairs_of_arms(tested, results)):
        for trial in ready:
            arm, lost = ARMS.index(trial.cell.arm), trial.cell.arm == "a" and not trial.tunes
            value = truth.run(arm, rungs_of[trial.cell.rung], trial.rate, (-1) ** trial.seed * (arm + 1))
            results[trial] = np.nan if lost else value
    pairs = verdicts.pairs_of_arms(tested, results)
    assert pairs["a"] == 3 and max(pairs.values()) == 5


def rate_of_false(truth: World, studies: int, **options) -> tuple[float, float]:
    """The share of studies with a false verdict, and the mean of pairs that an arm had."""
    rng, tested, wrong, had = np.random.default_rng(0), ladder(looks=(3,), margin=MARGIN, **options), 0, []
    for _ in range(studies):
        pairs, words_AR = found(tested, made(tested, truth, rng))
        wrong += false(words_AR, truth.effect_AR[1:])
        had += [pairs[arm] for arm in ARMS[1:]]
    return wrong / studies, float(np.mean(had))


WORLDS = {
    "null": world(),
    "an arm that varies": world(noise=(1, 3, 1, 1)),
    "an effect of the margin": world(effect=MARGIN),
    # At the rung to which rates are carried furthest, half of an interval of three pairs is four margins, nearly all of it
    # by the error of the rate: such an effect is settled at the first look in half of the studies, and twice that at once.
    "effects of four margins": world(effect=4 * MARGIN, noise=(0.5,) * 4),
    "large effects": world(effect=8 * MARGIN, noise=(0.5,) * 4),
}


@pytest.mark.long
@pytest.mark.parametrize("name", WORLDS)
def test_false_verdicts_come_in_5_percent_of_studies_at_most(name):
    rate, had = rate_of_false(WORLDS[name], 1000)
    assert rate <= 0.05 and had <= (3.3 if name == "large effects" else PAIRS), (rate, had)


def test_a_few_studies_that_stop_have_hardly_a_false_verdict():
    """5 % of 8 studies are less than one: more than 3 have a chance of 1 in 3,000."""
    rate, had = rate_of_false(WORLDS["null"], 8)
    assert rate * 8 <= 3 and 3 <= had <= PAIRS


def test_the_plan_expects_fewer_runs_where_differences_are_clear():
    study = ladder(looks=(3,), margin=MARGIN, deviation=0.005).study
    clear, unclear = (study_plan.expected_runs(study, each) for each in (4 * MARGIN, MARGIN / 2))
    assert clear == pytest.approx(4 * 6 * 3, rel=0.05) and unclear == pytest.approx(4 * 6 * 5, rel=0.05)


def test_cells_of_a_rung_that_failed_are_left_out():
    tested, rng = ladder(margin=MARGIN), np.random.default_rng(0)
    results = made(tested, world(), rng)
    pairs, (look,) = verdicts.pairs_of_arms(tested, results), verdicts.looks(tested.study)
    seen = verdicts.evidence(tested, results, pairs, look, [Cell("s0-x10", "a"), Cell("s1-x10", "base")])
    unknown = np.isnan(seen.differences_ARN).all(-1)
    assert unknown[0, 0] and unknown[:, 2].all() and unknown.sum() == 4
