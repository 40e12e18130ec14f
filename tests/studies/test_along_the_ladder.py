"""What a difference does along the ladder, the law of losses, and what a difference is worth."""

import math

import numpy as np
import pytest

from tests.studies.simulated import D_R, N_R
from xfresearch.studies import estimates, simultaneous, verdicts

PLACES_RF = np.log(np.stack([N_R, D_R / N_R], 1))


def shapes(effect_R, noise: float) -> dict[str, str]:
    rng = np.random.default_rng(0)
    differences = effect_R + noise * rng.standard_normal((5, len(N_R)))
    contrasts = verdicts.change_contrasts(PLACES_RF)
    result = simultaneous.intervals(differences.T[None], contrasts)
    return {axis: each["shape"] for axis, each in verdicts.changes(result, 0, float(np.mean(effect_R)), 0.02).items()}


def test_a_planted_change_has_its_word():
    tokens = np.tile([0.06, 0.0], 3)
    assert shapes(tokens, 0.003) == {"sizes": "stays", "budgets": "shrinks"}
    assert shapes(-tokens[::-1], 0.003) == {"sizes": "stays", "budgets": "grows"}
    assert shapes(np.repeat([0.0, 0.05, 0.1], 2), 0.003) == {"sizes": "grows", "budgets": "stays"}
    assert shapes(np.repeat([-0.05, 0.0, 0.04], 2), 0.003)["sizes"] == "rises"  # a gain that becomes a cost
    assert shapes(np.repeat([0.05, 0.0, -0.04], 2), 0.003)["sizes"] == "falls"
    assert shapes(np.repeat([-0.05, -0.02, 0.003], 2), 0.003)["sizes"] == "shrinks"  # a gain that vanishes
    assert shapes(np.full(6, 0.05), 0.003) == {"sizes": "stays", "budgets": "stays"}
    assert shapes(np.full(6, 0.05), 0.1) == {"sizes": "unknown", "budgets": "unknown"}


def test_changes_are_along_what_differs():
    two = np.array([[0.0, 1.0], [math.log(1.7), 1.0 - math.log(1.7)]])  # one number of tokens: the axes are one
    assert verdicts.change_contrasts(two) == pytest.approx(np.array([[-1.0, 1.0], [0.0, 0.0]]))
    assert not verdicts.change_contrasts(np.array([[0.0, 1.0], [math.log(1.2), 1.0]])).any()  # too near


@pytest.mark.parametrize(
    ("of_rungs", "expected"),
    [
        (["worse"] * 3, "worse"),
        (["worse", "undecided"], "undecided"),
        (["worse", "equivalent"], "mixed"),
        (["better", "worse"], "mixed"),
        (["equivalent", "undecided"], "undecided"),
    ],
)
def test_a_verdict_holds_over_the_ladder_if_all_rungs_have_it(of_rungs, expected):
    assert verdicts.over_ladder(of_rungs) == expected


def test_the_law_of_losses_is_found_and_goes_beyond_the_ladder():
    """With the constants of Besiroglu et al. 2024 (arXiv 2404.10102), and noise of a thousandth."""
    true = estimates.Law(*map(np.array, (1.817, 482.0, 2085.0, 0.348, 0.366)))
    losses = true.at(N_R, D_R) + 1e-3 * np.random.default_rng(0).standard_normal((50, len(N_R)))
    result = estimates.fit_law(N_R, D_R, losses, np.full(len(N_R), 1e-3))
    assert result.at(N_R[5], D_R[5]) == pytest.approx(true.at(N_R[5], D_R[5]), abs=4e-3)
    beyond = result.at(4 * N_R[5], 4 * D_R[5])
    assert np.median(beyond) == pytest.approx(true.at(4 * N_R[5], 4 * D_R[5]), rel=0.02)
    assert estimates.has_law(N_R, D_R) and not estimates.has_law(N_R, 20 * N_R) and not estimates.has_law(N_R[:4], D_R[:4])


def test_a_loss_that_rises_with_size_has_a_constant_law():
    result = estimates.fit_law(N_R, D_R, np.log(N_R * D_R)[None], np.ones(len(N_R)))
    assert result.at(1e6, 1e7) == pytest.approx(np.log(N_R * D_R).mean())


def test_a_difference_is_worth_tokens():
    losses = {tokens: 3 - 0.2 * math.log(tokens) for tokens in (1e6, 2e6, 4e6)}
    assert estimates.tokens_worth(losses, 0.2 * math.log(1.07)) == pytest.approx(0.07)
    assert estimates.tokens_worth({1e6: 1.0}, 0.1) is None and estimates.tokens_worth({1e6: 1.0, 2e6: 1.1}, 0.1) is None
