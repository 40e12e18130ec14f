"""Norms and unselectable keys: geometry in 2 and 3 dimensions, planted keys, and certificates."""

import numpy as np
import pytest
from scipy.spatial import ConvexHull

from tests.tiny_runs import tiny_model
from tests.tolerances import TOLERANCE, relative_error
from xfresearch import analysis
from xfresearch.analysis.norms import angle, projected, spread
from xfresearch.analysis.selectable import selectable

RNG = np.random.default_rng(0)


def require_certificates(keys) -> None:
    """Each query selects its key; each convex combination of the others is its key."""
    keys_ND = keys.keys_ND
    for i, selects in enumerate(keys.selects_N):
        if selects:
            scores = keys_ND @ keys.queries_ND[i]
            assert scores[i] > np.delete(scores, i).max()
        else:
            weights = keys.weights_NN[i]
            assert weights[i] == 0 and weights.min() > -1e-9 and weights.sum() == pytest.approx(1.0)
            np.testing.assert_allclose(weights @ keys_ND, keys_ND[i], atol=1e-6 * np.abs(keys_ND).max())


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("count", [4, 10, 60])
def test_selectable_keys_are_the_corners_of_the_convex_hull(size, count):
    for _ in range(5):
        result = selectable(RNG.standard_normal((count, size)) + 3.0)
        corners = np.zeros(len(result.keys_ND), bool)
        corners[ConvexHull(result.keys_ND).vertices] = True
        np.testing.assert_array_equal(result.selects_N, corners)
        require_certificates(result)


def test_planted_keys():
    """A mean of others, a point on an edge, and a copy are hidden; a point just outside is not."""
    square = np.array([[0.0, 0], [1, 0], [0, 1], [1, 1]])
    for point, hidden in (([0.5, 0.5], 1), ([0.5, 0.0], 1), ([0.5, -1e-4], 0), ([0.0, 0.0], 0)):
        result = selectable(np.concatenate([square, [point]]))
        assert (~result.selects_N).sum() == hidden, point
        require_certificates(result)
    wide = RNG.standard_normal((40, 64))  # fewer than 65 points in general position hide none
    assert selectable(wide).selects_N.all()
    inside = np.concatenate([wide, wide[:7].mean(0, keepdims=True)])
    result = selectable(inside)
    assert (~result.selects_N).sum() == 1
    (hidden,) = np.flatnonzero(~result.selects_N)
    np.testing.assert_allclose(result.keys_ND[hidden], inside[-1])
    require_certificates(result)


def test_scaling_to_a_sphere_hides_no_key():
    """Brody et al. 2023, fig. 1d."""
    keys_ND = RNG.standard_normal((200, 4))
    assert not selectable(keys_ND).selects_N.all()
    result = selectable(keys_ND / np.linalg.norm(keys_ND, axis=1, keepdims=True))
    assert result.selects_N.all()
    require_certificates(result)


def test_angles_shares_and_spread_are_their_definitions():
    x_BLD = RNG.standard_normal((2, 6, 5))
    ones = np.ones(5)
    expected = np.degrees(np.arccos(np.abs(x_BLD @ ones) / np.linalg.norm(x_BLD, axis=-1) / np.sqrt(5)))
    np.testing.assert_allclose(angle(x_BLD), expected)
    assert angle(-3 * ones) == pytest.approx(0.0, abs=1e-5) and angle(ones - ones.mean() + [1, -1, 0, 0, 0]) == 90.0
    projector = np.eye(5) - np.ones((5, 5)) / 5
    norms_BL = np.linalg.norm(x_BLD @ projector, axis=-1)
    np.testing.assert_allclose(projected(x_BLD), 1 - norms_BL**2 / (x_BLD**2).sum(-1))
    np.testing.assert_allclose([spread(x_LD) for x_LD in x_BLD], norms_BL.std(1) / norms_BL.mean(1))


def test_layer_norm_makes_inputs_orthogonal_to_ones_and_selectable():
    changes = {"norm": "layer", "norms__attention_in__gain": False, "norms__attention_in__bias": False}
    lm = tiny_model(**{f"model__blocks__main__{name}": value for name, value in changes.items()})
    tokens_NL = RNG.integers(257, size=(2, 40))
    data = analysis.norms(lm, tokens_NL).data
    np.testing.assert_allclose(data["angle_after"], 90, atol=1e-3)
    assert (data["hidden_after"] == 0).all() and (data["angle_before"] < 89).all()
    q_BLHK, keys_BLGK = lm.capture(tokens_NL, ["blocks.1.attention.query", "blocks.1.attention.key"]).values()
    keys_BLGK = np.asarray(keys_BLGK, np.float64)
    hidden = [[(~selectable(keys_BLGK[b, :, g]).selects_N).mean() for g in range(4)] for b in range(2)]
    np.testing.assert_allclose(data["hidden_keys_rows"][:, 1], hidden)
    kernel_DGK = np.asarray(lm.params["blocks"]["main"]["attention"]["key"]["kernel"][1], np.float64)
    expected = angle(np.einsum("blhk,dhk->blhd", q_BLHK, kernel_DGK)).mean((0, 1))
    assert relative_error(data["angle_query"][1], expected) < TOLERANCE["float32"]


def test_it_runs_on_the_majority_task():
    lm = tiny_model("brody_majority")
    result = analysis.norms(lm, count=2)
    assert result.data["hidden_keys"].shape[0] == lm.config.depth and "rows of 24 tokens" in result.about
