"""Sparse dictionaries: a plain NumPy reference, planted directions, dead features, and the scale in the weights."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from xfresearch.analysis import sparse

T, D, E, F, K = 24, 6, 5, 16, 3


def draw(seed: int = 0):
    rng = np.random.default_rng(seed)
    state = sparse.start(seed, D, F, E)
    weights = {name: value + 0.1 * rng.standard_normal(value.shape) for name, value in state["weights"].items()}
    return weights, rng.standard_normal((T, D)), rng.standard_normal((T, E)), rng.random(F) < 0.5


def reference_largest(z_TF, count):
    smallest = np.sort(z_TF, axis=None)[::-1][count - 1]
    return np.where(z_TF >= smallest, z_TF, 0.0), smallest


def reference_loss(w, x_TD, y_TE, dead_F):
    z_TF = np.maximum(x_TD @ w["encoder_DF"] + w["encoder_bias_F"], 0)
    f_TF, smallest = reference_largest(z_TF, K * T)
    error_TE = y_TE - f_TF @ w["decoder_FE"] - w["decoder_bias_E"]
    dead_TF, _ = reference_largest(z_TF * dead_F, E // 2 * T)
    auxiliary = ((error_TE - dead_TF @ w["decoder_FE"]) ** 2).mean() if dead_F.any() else 0.0
    return (error_TE**2).mean() + auxiliary / 32, f_TF, smallest


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("dead", [False, True])
def test_the_loss_is_that_of_the_definition(seed, dead):
    weights, x_TD, y_TE, dead_F = draw(seed)
    dead_F = dead_F & dead
    expected, f_TF, smallest = reference_loss({n: np.float64(w) for n, w in weights.items()}, x_TD, y_TE, dead_F)
    result, (of_loss, lowest) = sparse.loss(weights, jnp.float32(x_TD), jnp.float32(y_TE), K, dead_F)
    assert result == pytest.approx(expected, rel=1e-5) and lowest == pytest.approx(smallest, rel=1e-5)
    np.testing.assert_allclose(of_loss, f_TF, rtol=1e-5, atol=1e-6)


def test_dead_features_learn_the_error_and_do_not_change_it():
    weights, x_TD, y_TE, _ = draw()
    weights["encoder_bias_F"] = weights["encoder_bias_F"].at[4:].add(10.0)  # the first four are never among the largest
    slopes = jax.grad(lambda w, dead_F: sparse.loss(w, jnp.float32(x_TD), jnp.float32(y_TE), 1, dead_F)[0])
    without, with_dead = slopes(weights, np.zeros(F, bool)), slopes(weights, np.arange(F) < 4)
    assert not np.abs(without["decoder_FE"][:4]).any() and np.abs(with_dead["decoder_FE"][:4]).any(1).all()
    for slope in (without, with_dead):
        slope["decoder_FE"] = slope["decoder_FE"][4:]
        slope["encoder_DF"] = slope["encoder_DF"][:, 4:]
        slope["encoder_bias_F"] = slope["encoder_bias_F"][4:]
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), with_dead, without)


def test_the_largest_values_are_those_of_a_sort():
    rng = np.random.default_rng(0)
    for count in (1, 7, 60):
        z_TF = np.float32(np.maximum(rng.standard_normal((12, 10)), 0) * 10.0 ** rng.integers(-30, 30))
        result, lowest = sparse.largest(jnp.asarray(z_TF), count)
        expected, smallest = reference_largest(z_TF, count)
        np.testing.assert_array_equal(result, expected)
        assert lowest == smallest
    result, lowest = sparse.largest(jnp.asarray([[0.0, 2.0, 3.0]]), 3)  # fewer are positive
    np.testing.assert_array_equal(result, [[0.0, 2.0, 3.0]])
    assert lowest == 0


def dictionary_of(state, x_TD, y_TE):
    return sparse.folded(state, sparse.scale_of(x_TD), sparse.scale_of(y_TE))


def test_the_scale_is_in_the_weights():
    rng = np.random.default_rng(1)
    x_TD, y_TE = 7 + 3 * rng.standard_normal((200, D)), -2 + 0.1 * rng.standard_normal((200, E))
    scaled_TD = scaled(x_TD)
    np.testing.assert_allclose(scaled_TD.mean(0), 0, atol=1e-5)
    assert np.linalg.norm(scaled_TD, axis=1).mean() == pytest.approx(np.sqrt(D), rel=1e-5)
    state = sparse.start(0, D, F, E)
    state["weights"], *_ = draw()
    state["threshold"] = jnp.float32(0.4)
    w = {name: np.float64(value) for name, value in state["weights"].items()}
    z_TF = np.float64(scaled_TD) @ w["encoder_DF"] + w["encoder_bias_F"]
    out = sparse.scale_of(y_TE)
    y_scaled_TE = np.where(z_TF > 0.4, z_TF, 0) @ w["decoder_FE"] + w["decoder_bias_E"]
    expected = y_scaled_TE / float(out.factor) + np.asarray(out.mean)
    result = dictionary_of(state, x_TD, y_TE)
    f_TF = np.asarray(sparse.encode(result, jnp.asarray(x_TD)))
    np.testing.assert_array_equal(f_TF > 0, z_TF > 0.4)
    np.testing.assert_allclose(f_TF, np.where(z_TF > 0.4, z_TF, 0) / float(out.factor), atol=1e-5)
    np.testing.assert_allclose(sparse.decode(result, f_TF), expected, atol=1e-5)


def test_constant_activations_are_their_mean():
    x_TD = np.ones((8, D))
    result = dictionary_of(sparse.start(0, D, F), x_TD, x_TD)
    np.testing.assert_allclose(sparse.decode(result, sparse.encode(result, jnp.asarray(x_TD))), x_TD, atol=1e-6)


def scaled(x_CTD):
    return sparse.scale_of(x_CTD)(jnp.asarray(x_CTD))


def trained(x_CTD, y_CTE, size: int, k: int, transcoder: bool = False):
    x_CTD, y_CTE = scaled(x_CTD), scaled(y_CTE)
    state = sparse.start(0, x_CTD.shape[-1], size, y_CTE.shape[-1] if transcoder else 0)
    return sparse.train(state, x_CTD, y_CTE, k, len(x_CTD))


def sparse_sums(rng, directions_FD, batches: int = 400, tokens: int = 192, active: int = 3):
    """[C, T, D]: sums of `active` random directions, each with a random length."""
    order = rng.random((batches, tokens, len(directions_FD))).argsort(-1)
    return np.where(order < active, rng.uniform(0.5, 1.5, order.shape), 0) @ directions_FD


def directions(rng, count: int, width: int):
    x_FD = rng.standard_normal((count, width))
    return x_FD / np.linalg.norm(x_FD, axis=1, keepdims=True)


def recovered(state, true_FD) -> float:
    """The mean, over the true directions, of the largest cosine with a row of the decoder."""
    return float(np.abs(true_FD @ np.asarray(state["weights"]["decoder_FE"]).T).max(1).mean())


def test_planted_directions_are_found_and_none_in_noise():
    rng = np.random.default_rng(0)
    true_FD = directions(rng, 32, 24)
    x_CTD = sparse_sums(rng, true_FD)
    state = trained(x_CTD, x_CTD, 64, 3)
    assert recovered(state, true_FD) > 0.97
    np.testing.assert_allclose(np.linalg.norm(state["weights"]["decoder_FE"], axis=1), 1, atol=1e-5)
    result = sparse.folded(state, *2 * [sparse.scale_of(x_CTD)])
    f_TF = np.asarray(sparse.encode(result, jnp.asarray(x_CTD[0])))
    assert (f_TF > 0).sum(1).mean() == pytest.approx(3, abs=0.5)  # with the mean threshold, as many as in training
    noise = rng.standard_normal(x_CTD.shape)
    assert recovered(trained(noise, noise, 64, 3), true_FD) < 0.65


def test_a_transcoder_finds_what_each_direction_writes():
    rng = np.random.default_rng(1)
    reads_FD, writes_FE = directions(rng, 16, 16), directions(rng, 16, 12)
    f_CTF = sparse_sums(rng, np.eye(16), active=2)
    assert recovered(trained(f_CTF @ reads_FD, f_CTF @ writes_FE, 32, 2, transcoder=True), writes_FE) > 0.9


def test_steps_one_by_one_are_those_of_one_call():
    x_CTD = jnp.float32(np.random.default_rng(2).standard_normal((6, 32, D)))
    whole, parts = (sparse.start(0, D, F) for _ in range(2))
    whole = sparse.train(whole, x_CTD, x_CTD, K, 6)
    lowest, silent_F = [], np.zeros(F)
    for x_TD in x_CTD:
        row_FE = np.asarray(parts["weights"]["decoder_FE"])
        f_TF, threshold = sparse.loss(parts["weights"], x_TD, x_TD, K, silent_F > 99)[1]
        lowest.append(threshold)
        silent_F = np.where((f_TF > 0).any(0), 0, silent_F + 1)
        parts = sparse.train(parts, x_TD[None], x_TD[None], K, 6)
        if len(lowest) == 1:  # the slopes of the decoder's rows are orthogonal to them
            np.testing.assert_allclose((parts["adam"].mu["decoder_FE"] * row_FE).sum(-1), 0, atol=1e-6)
    jax.tree.map(np.testing.assert_array_equal, whole, parts)
    assert whole["threshold"] == pytest.approx(np.mean(lowest), rel=1e-5)
    np.testing.assert_array_equal(whole["silent_F"], silent_F)
