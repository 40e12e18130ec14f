"""The change of the values: it adds what is asked, it disturbs other keys least, and for a matrix it is ROME's formula."""

import numpy as np
import pytest
from scipy import optimize

from tests.tiny_runs import tiny_model
from tests.tolerances import TOLERANCE, relative_error
from xfresearch import UserError
from xfresearch.analysis.coefficients import of_keys, sites
from xfresearch.editing.values import Values, factored, path_of, rome_change, values_of, with_change, written

TOKENS_BL = np.random.default_rng(0).integers(257, size=(2, 12))
CASES = [
    ("gpt2", {}, "blocks.1.feed_forward"),
    ("llama", {}, "blocks.0.feed_forward"),
    ("moe", {}, "blocks.1.feed_forward"),
    ("all_attention", {}, "blocks.1.attention"),
    pytest.param("all_attention", {"kv_heads": 2}, "blocks.0.attention", marks=pytest.mark.long),
    ("all_attention", {"memory_heads": "shared"}, "blocks.0.attention"),
    ("all_attention", {"memory_activation": "relu", "output_gate": "head"}, "blocks.0.attention"),
    ("llama", {"kind": "slots"}, "blocks.0.attention"),
]


def made(name: str, changes: dict):
    return tiny_model(name, **{f"model__blocks__main__attention__{key}": value for key, value in changes.items()})


def keys(lm, memory: str) -> np.ndarray:
    """[B, L, H, M]: the coefficients of every token."""
    values = lm.capture(TOKENS_BL, sites(lm.config, memory))
    m_BLK = np.asarray(of_keys(lm.config, memory, values, gated=True), np.float64)
    M = values_of(lm, memory).values_GMV.shape[1]
    return m_BLK.reshape(*m_BLK.shape[:2], -1, M)


def covariance(values: Values, m_BLHM) -> np.ndarray:
    m_THM = m_BLHM.reshape(-1, *m_BLHM.shape[2:])
    listed = [sum(np.einsum("tm,tn->mn", m_THM[:, h], m_THM[:, h]) for h in heads) / len(m_THM) for heads in values.groups()]
    return np.stack([C + 0.1 * np.trace(C) / len(C) * np.eye(len(C)) for C in listed])


@pytest.mark.parametrize("name, changes, memory", CASES)
def test_the_key_writes_what_is_asked_in_the_model(name, changes, memory):
    lm = made(name, changes)
    values, m_BLHM = values_of(lm, memory), keys(made(name, changes), memory)
    delta_D = np.random.default_rng(1).standard_normal(lm.config.width)
    key_HM = m_BLHM[1, 5]
    change = rome_change(values, factored(covariance(values, m_BLHM)), key_HM, delta_D)
    np.testing.assert_allclose(written(values, change, key_HM), delta_D, rtol=1e-9, atol=1e-9)
    edited = with_change(lm, memory, change)
    before, after = (each.capture(TOKENS_BL, f"{memory}.raw")[f"{memory}.raw"] for each in (lm, edited))
    expected = np.array([[written(values, change, m_HM) for m_HM in row] for row in m_BLHM])
    assert relative_error(np.asarray(after) - np.asarray(before), expected) < 300 * TOLERANCE["float32"]


def test_for_a_matrix_it_is_the_formula_of_the_paper():
    rng = np.random.default_rng(2)
    key_M, delta_D, half_MM = rng.standard_normal(7), rng.standard_normal(4), rng.standard_normal((7, 9))
    C_MM = half_MM @ half_MM.T
    change = rome_change(Values((), 1.0, np.zeros((1, 7, 4)), None), factored(C_MM[None]), key_M[None], delta_D)
    u_M = np.linalg.inv(C_MM) @ key_M
    np.testing.assert_allclose(change[0], np.outer(u_M, delta_D / (u_M @ key_M)))


def test_no_other_change_that_writes_it_disturbs_less():
    """A solver of constrained least squares finds the same change, with two groups of two heads."""
    rng = np.random.default_rng(3)
    H, M, V, D = 4, 3, 2, 3
    values = Values((), 1.0, np.zeros((2, M, V)), rng.standard_normal((H, V, D)))
    key_HM, delta_D = rng.standard_normal((H, M)), rng.standard_normal(D)
    halves = rng.standard_normal((2, M, 5))
    C_GMM = halves @ halves.swapaxes(1, 2)
    result = rome_change(values, factored(C_GMM), key_HM, delta_D)

    def disturbance(x):
        return np.einsum("gmv,gmn,gnv->", x.reshape(2, M, V), C_GMM, x.reshape(2, M, V))

    asked = {"type": "eq", "fun": lambda x: written(values, x.reshape(2, M, V), key_HM) - delta_D}
    other = optimize.minimize(disturbance, np.zeros(2 * M * V), constraints=asked, options={"maxiter": 500}, tol=1e-14)
    assert other.success and disturbance(result.ravel()) == pytest.approx(other.fun, rel=1e-6)
    np.testing.assert_allclose(result.ravel(), other.x, atol=1e-4)


@pytest.mark.parametrize("gate", ["head", "elementwise"])
def test_slots_behind_a_gate_are_refused(gate):
    """The gate multiplies the heads before W_O: what was asked would not be written."""
    lm, memory = made("all_attention", {"output_gate": gate}), "blocks.1.attention"
    with pytest.raises(UserError, match=f"^memory='{memory}' is not allowed with rome and memit: output_gate='{gate}' "):
        values_of(lm, memory)
    assert path_of(lm, memory) == ("attention", "memory", "value")
    wide = made("all_attention", {"output_gate": gate, "memory_activation": "relu"})
    assert values_of(wide, memory).output_HVD is None


def test_mistakes_are_one_line():
    with pytest.raises(UserError, match="the covariance of 3 coefficients is singular"):
        factored(np.zeros((1, 3, 3)))
