"""Studies without any effect, from the results of runs to the verdicts: they find one at the stated rate."""

import math
from dataclasses import replace
from itertools import chain

import numpy as np
import pytest

from xfresearch.studies import design, outcome, plan, report, statistics
from xfresearch.studies.cells import planned

STUDIES, ARMS, SEEDS = 1000, 4, 5
MADE = {"commit": "", "date": "", "machine": {"cpu": "", "cores": 1, "devices": ""}, "versions": {}}
RESULT = {"blocks": {"values": [1.0, 2.0], "sizes": [1, 1]}, "seconds": {"step": 1.0, "evaluation": 0.0}, "made": MADE}


@pytest.fixture
def null_study(config, monkeypatch):
    """A study of two sizes and four arms, with its plan. What takes most of the time, and no verdict needs, is left out."""
    monkeypatch.setattr(statistics, "_bootstrap", lambda differences: (math.nan, math.nan))
    monkeypatch.setattr(outcome, "_power", lambda *_: {})
    monkeypatch.setattr(outcome, "shares", lambda *_: {})
    monkeypatch.setattr(outcome, "_sampling_error", lambda *_: math.nan)
    monkeypatch.setattr(outcome, "_difference_sampling_error", lambda *_: math.nan)
    chosen = design.read(config)
    layouts = ("parallel", "no_norm_between", "no_residual_between", "fused_output")
    arms = {"base": ()} | {layout: (f"model.blocks.main.layout={layout}",) for layout in layouts}
    sizes = {"small": chosen.sizes["tiny"], "large": ("model.width=24", "steps=12")}
    chosen = replace(chosen, arms=arms, sizes=sizes, seeds=SEEDS, margin=1e-3, rates=(1e-2,), extensions=0)
    return chosen, plan.make(chosen).matched


def results(trials, rng) -> dict:
    """The runs of one seed share most of their noise at all arms, and the large size has twice as much."""
    shared = rng.standard_normal((2, SEEDS + 1))
    values = {}
    for trial in trials:
        size = int(trial.cell.size == "large")
        noise = shared[size, min(trial.seed, SEEDS)] + 0.5 * rng.standard_normal()
        values[trial] = RESULT | {"evaluation": {"bits_per_byte": 5 + (1 + size) * 0.01 * noise}}
    return values


def test_studies_without_an_effect_find_one_at_the_stated_rate(null_study):
    chosen, solved = null_study
    rng, trials = np.random.default_rng(0), list(planned(chosen))
    wrong, trends = {"small": 0, "large": 0, "together": 0}, 0
    for _ in range(STUDIES):
        found = outcome.outcome_of(chosen, solved, results(trials, rng))
        for name, part in chain(found["sizes"].items(), [("together", found["together"])]):
            verdicts = {arm["verdict"] for arm in part["arms"].values() if "verdict" in arm}
            wrong[name] += bool(verdicts & {"better", "worse"})
        trends += sum(trend["low"] > 0 or trend["high"] < 0 for trend in found["trends"].values())
    highest = 0.05 + 2 * math.sqrt(0.05 * 0.95 / STUDIES)
    for name, count in wrong.items():
        assert 0.02 < count / STUDIES <= highest, name
    assert 0.03 < trends / (STUDIES * ARMS) <= highest  # not corrected for the number of arms


@pytest.mark.parametrize(("sign", "varies_less"), [(1, "change"), (-1, "mean")])
def test_an_interval_is_doubted_if_the_differences_of_seeds_cancel(null_study, sign, varies_less):
    """The noise of a seed at the large size is that at the small one, or its opposite."""
    chosen, solved = null_study
    rng = np.random.default_rng(0)
    noise = {(arm, seed): 0.01 * rng.standard_normal() for arm in chosen.arms for seed in range(SEEDS)}
    runs = {}
    for trial in planned(chosen):
        cell, factor = trial.cell, sign if trial.cell.size == "large" else 1
        value = 5 + factor * noise.get((cell.arm, trial.seed), 0.0) + 1e-4 * rng.standard_normal()
        runs[trial] = RESULT | {"evaluation": {"bits_per_byte": value}}
    found = outcome.outcome_of(chosen, solved, runs)
    deviations = {"mean": found["together"]["arms"]["parallel"]["difference"], "change": found["trends"]["parallel"]}
    assert min(deviations, key=lambda name: deviations[name]["deviation"]) == varies_less
    lines = report.cancelling(found)
    assert len(lines) == ARMS and lines[0].startswith("parallel: the differences of a seed at the sizes depend")
    change = found["trends"]["parallel"]["independent"]
    assert f"interval of {change['low']:+.4f} to {change['high']:+.4f}." in lines[0]
