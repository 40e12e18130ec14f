"""Looks before the end: published bounds, and the rate of false verdicts of studies that stop."""

import numpy as np
import pytest
from scipy import special

from xfresearch.studies.interim import levels


def test_bounds_are_those_of_lan_and_demets():
    """Five equal looks, 5 % two-sided (Lan & DeMets; as in the R package ldbounds)."""
    bounds = [-special.ndtri(level / 2) for level in levels([1, 2, 3, 4, 5], 0.05)]
    assert bounds == pytest.approx([4.8769, 3.3569, 2.6803, 2.2898, 2.0310], abs=2e-3)
    assert levels([5], 0.05) == pytest.approx([0.05])


def test_stopping_at_a_look_keeps_the_rate_of_false_verdicts():
    looks = np.array([3, 5, 8])
    scores = np.random.default_rng(0).standard_normal((40_000, 8)).cumsum(1)[:, looks - 1] / np.sqrt(looks)
    bounds = -special.ndtri(np.array(levels(looks, 0.05)) / 2)
    assert (np.abs(scores) > bounds).any(1).mean() == pytest.approx(0.05, abs=0.004)
    assert (np.abs(scores) > 1.96).any(1).mean() > 0.08  # without a rule
