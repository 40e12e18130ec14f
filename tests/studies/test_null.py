"""The study without a difference (configs/studies/null.py), and the same runs given to its arms at random."""

import json
from pathlib import Path

import numpy as np
import pytest

from xfresearch.studies import rates, verdicts
from xfresearch.studies.allocation import Cell, Ladder, Trial
from xfresearch.studies.design import TUNING_SEED, Study, rungs

OUTCOME = json.loads((Path(__file__).parents[2] / "docs/data/studies/null/results.json").read_text())
STUDY = Study(**{name: tuple(each) if isinstance(each, list) else each for name, each in OUTCOME["study"].items()})
ARMS = {rung: here["arms"] for rung, here in OUTCOME["sizes"].items()}


def ladder() -> Ladder:
    base = [ARMS[rung.name]["base"] for rung in rungs(STUDY)]
    scales_RF = np.log([[arm["parameters"], arm["tokens"]] for arm in base])
    return Ladder(STUDY, rates.carry(scales_RF, [list(ARMS).index(name) for name in STUDY.tune_at]))


def results(values: dict[str, np.ndarray]) -> dict[Trial, float]:
    """The runs that chose rates, and at each rung those that decide, [arms, seeds]."""
    made = {}
    for rung, arms in ARMS.items():
        for (name, arm), values_N in zip(arms.items(), values[rung], strict=True):
            cell = Cell(rung, name)
            for rate, losses in arm["tried"].items():
                made |= {Trial(cell, float(rate), TUNING_SEED + at): loss for at, loss in enumerate(losses)}
            made |= {Trial(cell, arm["rate"], seed): float(value) for seed, value in enumerate(values_N)}
    return made


def words(values: dict[str, np.ndarray]) -> np.ndarray:
    """[arms, rungs] words."""
    made, of_rungs, (look,) = results(values), ladder(), verdicts.looks(STUDY)
    pairs = verdicts.pairs_of_arms(of_rungs, made)
    estimates = verdicts.evidence(of_rungs, made, pairs, look).intervals(look)
    return verdicts.verdicts_of(estimates, STUDY.margin, look.level)


VALUES = {rung: np.array([arm["values"] for arm in arms.values()]) for rung, arms in ARMS.items()}


def test_the_verdicts_of_the_study_are_those_of_its_page():
    names = [name for name in STUDY.arms if name != STUDY.baseline]
    told = [[ARMS[rung][name]["verdict"] for rung in ARMS] for name in names]
    assert words(VALUES).tolist() == told


@pytest.mark.long
def test_random_arms_of_real_runs_have_a_false_verdict_in_5_percent_of_studies_at_most():
    """Batches and initial values of all runs of a rung are independent, so any of them could be those of any arm."""
    rng, false, studies = np.random.default_rng(0), 0, 1000
    for _ in range(studies):
        drawn = {rung: rng.permutation(values.ravel()).reshape(values.shape) for rung, values in VALUES.items()}
        false += bool(np.isin(words(drawn), ("better", "worse")).any())
    print(f"{false} of {studies} studies have a false verdict")
    assert false <= 0.05 * studies
