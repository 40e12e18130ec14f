"""Statistics of attention: a reference in NumPy, and networks with planted heads."""

import jax.numpy as jnp
import numpy as np
import pytest

from tests.contracts.variants import model
from tests.reference import figures
from tests.tiny_runs import tiny_config, tiny_model
from tests.tolerances import TOLERANCE, relative_error
from xfresearch import LanguageModel, analysis
from xfresearch.analysis.attention import repetition, statistics
from xfresearch.analysis.heads import effective_rank, positive_share
from xfresearch.models import layers

TOKENS_NL = np.random.default_rng(0).integers(257, size=(5, 12))
SITES = ("weights", "coefficients", "heads", "value")


@pytest.mark.parametrize(
    "name, changes",
    [
        ("llama", {"sink": "learned", "kv_heads": 2}),
        pytest.param("all_attention", {}, marks=pytest.mark.long),
    ],
)
def test_equals_the_reference(name, changes):
    lm = tiny_model(name, **{f"model__blocks__main__attention__{key}": value for key, value in changes.items()})
    data = analysis.attention(lm, TOKENS_NL).data
    for number in range(lm.config.depth):
        names = [f"blocks.{number}.attention.{site}" for site in SITES]
        names = [tap for tap in names if tap in lm.tap_names()]
        values = {tap.split(".")[-1]: np.asarray(value, float) for tap, value in lm.capture(TOKENS_NL, names).items()}
        expected = figures.attention(values, "sink" in changes)
        assert set(expected) <= set(data)
        for figure, value_BH in expected.items():
            assert relative_error(data[f"{figure}_rows"][:, number], value_BH) < 10 * TOLERANCE["float32"], figure
            assert relative_error(data[figure][number], value_BH.mean(0)) < 10 * TOLERANCE["float32"], figure


def planted(seed: int | None = None) -> LanguageModel:
    """Two layers of two heads. Head 0 of layer 0 attends to the previous token; head 0 of layer 1 is an induction head. The
    other heads have zero queries. With a seed, all parameters are random."""
    V, L = 24, 64
    D, K = 2 * V + L, L
    changes = {"layout": "attention_only", "norm": "none", "attention.heads": 2, "attention.head_size": K}
    config = model(
        {"width": D, "depth": 2, "vocab_size": V, "position": "learned", "final_norm": "none", "max_length": L}
        | {f"blocks.main.{name}": value for name, value in changes.items()}
    )
    from xfresearch.models import transformer

    params = {}
    rng = np.random.default_rng(seed)
    for path, leaf in _leaves(transformer.abstract(config)):
        params[path] = np.zeros(leaf.shape) if seed is None else rng.standard_normal(leaf.shape) / np.sqrt(D)
    if seed is None:
        eye = np.eye(D)
        token, position, before = eye[:V], eye[V : V + L], eye[V + L :]
        params["embed/table"][:] = token
        params["position/table"][:] = position
        names = ("query", "key", "value", "output")
        query, key, value, output = (params[f"blocks/main/attention/{name}/kernel"] for name in names)
        strong = 30.0 * K**0.5
        query[0, :, 0, :L] = strong * position.T  # position p asks for p ...
        key[0, :, 0, 1:L] = position[:-1].T  # ... and position p - 1 answers
        value[0, :, 0, :V] = token.T
        output[0, 0, :V] = before
        query[1, :, 0, :V] = strong * token.T
        key[1, :, 0, :V] = before.T
        value[1, :, 0, :V] = token.T
        output[1, 0, :V] = token
    from xfresearch.runtime.trees import nested

    run = tiny_config("gpt2")
    return LanguageModel(config, nested({path: jnp.asarray(leaf, jnp.float32) for path, leaf in params.items()}), None, run)


def _leaves(tree, prefix: str = ""):
    for name, value in tree.items():
        path = f"{prefix}/{name}" if prefix else name
        if isinstance(value, dict):
            yield from _leaves(value, path)
        else:
            yield path, value


def test_planted_heads_are_found_and_only_they():
    tokens_NL = np.random.default_rng(1).integers(24, size=(4, 64))
    result = analysis.attention(planted(), tokens_NL)
    previous, induction, copying = (result.data[name] for name in ("previous", "induction", "copying"))
    assert previous[0, 0] > 0.99 and induction[1, 0] > 0.5  # half: each token has occurred more than once
    others = np.delete(previous.ravel(), 0), np.delete(induction.ravel(), 2)
    assert max(map(np.max, others)) < 0.1
    assert copying[1, 0] == pytest.approx(1.0) and np.isnan(copying[0, 1])
    strongest = {row[0]: row[1] for row in result.tables[0].rows}
    assert strongest["Previous token"].startswith("0.0 ") and strongest["Induction"].startswith("1.0 ")
    without = analysis.attention(planted(seed=2), tokens_NL).data
    assert without["induction"].max() < 0.15 and without["previous"].max() < 0.15


def test_figures_of_planted_weights():
    shift_LS = np.eye(6, k=-1)
    shift_LS[0, 0] = 1
    values = {"weights": jnp.asarray(shift_LS)[None, None], "heads": jnp.ones((1, 6, 1, 2))}
    values["value"] = -jnp.ones((1, 6, 1, 2))
    data = {name: float(value[0, 0]) for name, value in statistics(values, sink=False).items() if name != "received"}
    assert data == pytest.approx(
        {"first": 0.2, "previous": 1.0, "self": 0.0, "distance": 1.0, "entropy": 0.0, "own_value": -1.0}
    )
    around_LS = (np.eye(6, k=-1) + np.eye(6, k=1)) / 2  # of an encoder: as much before as after
    data = statistics(values | {"weights": jnp.asarray(around_LS)[None, None]}, sink=False)
    assert float(data["distance"][0, 0]) == pytest.approx((4 + 0.5) / 5)  # the last token has none after it
    assert statistics({"query": 0}, sink=False) == {} == repetition({}, half=3)
    back_LS = np.zeros((6, 6))
    back_LS[[3, 4, 5], [1, 2, 3]] = 0.7
    back_LS[[3, 4, 5], [0, 1, 2]] = 0.3
    data = repetition({"weights": jnp.asarray(back_LS)[None, None]}, half=3)
    assert float(data["induction"][0, 0]) == pytest.approx(0.7) and float(data["duplicate"][0, 0]) == pytest.approx(0.3)


def test_negative_weights_have_no_entropy():
    w_BHLS = jnp.asarray([[[[1.0, 0.0], [0.5, 0.5]], [[1.0, 0.0], [1.5, -0.5]]]])
    ones = jnp.ones((1, 2, 2, 2))
    values = {"weights": w_BHLS, "heads": ones, "value": ones}
    entropy_BH = np.asarray(statistics(values, sink=False)["entropy"])
    assert entropy_BH[0, 0] == pytest.approx(np.log(2)) and np.isnan(entropy_BH[0, 1])
    assert np.isfinite(analysis.attention(tiny_model("simplified"), TOKENS_NL).summary["First token"]).all()


def test_figures_of_matrices():
    assert effective_rank(np.diag([2.0, 2.0, 2.0, 0.0]), 4) == pytest.approx(3.0)
    assert np.isnan(effective_rank(np.zeros((2, 2)), 2)) and np.isnan(positive_share(np.zeros((2, 2))))
    assert effective_rank(np.diag([1.0, 1e-12]), 2) == pytest.approx(1.0)
    assert positive_share(np.eye(3)) == 1.0 and positive_share(-np.eye(3)) == -1.0
    assert positive_share(np.array([[0.0, -1.0], [1.0, 0.0]])) == pytest.approx(0.0)
    lm = tiny_model("llama", model__blocks__main__attention__kv_heads=2)  # with an untied head
    data = analysis.attention(lm, TOKENS_NL).data
    params = layers.get(lm.config, lm.params, 1)["attention"]
    q, k, v, o = (np.asarray(params[name]["kernel"], np.float64) for name in ("query", "key", "value", "output"))
    embed = np.asarray(lm.params["embed"]["table"], np.float64)
    head = np.asarray(lm.params.get("head", lm.params["embed"])["table"], np.float64)
    for h in range(q.shape[1]):
        g = h // (q.shape[1] // k.shape[1])
        ov_VV = embed @ v[:, g] @ o[h] @ head.T
        qk_VV = embed @ q[:, h] @ k[:, g].T @ embed.T
        assert data["copying"][1, h] == pytest.approx(positive_share(ov_VV), abs=1e-6)
        assert data["matching"][1, h] == pytest.approx(positive_share(qk_VV), abs=1e-6)
        assert data["rank"][1, h] == pytest.approx(effective_rank(q[:, h] @ k[:, g].T, q.shape[2]))


def test_learned_spans_are_in_tokens():
    lm = tiny_model(
        model__blocks__main__attention__span="adaptive", model__blocks__main__attention__window=20
    )
    actual = analysis.attention(lm, TOKENS_NL).data["span"]
    fraction = np.asarray(lm.params["blocks"]["main"]["attention"]["span"]["fraction"])
    np.testing.assert_allclose(actual, fraction * 20, rtol=1e-6)


def test_a_sink_beside_slots_of_the_models_width_has_a_tap():
    changes = {"sink": "off_by_one", "memory_slots": 3, "memory_activation": "relu"}
    lm = tiny_model("llama", **{f"model__blocks__main__attention__{key}": value for key, value in changes.items()})
    taps = {site: f"blocks.0.attention.{site}" for site in ("weights", "sink_weight", "coefficients")}
    weights, sink, coefficients = lm.capture(TOKENS_NL, list(taps.values())).values()
    np.testing.assert_allclose(weights.sum(-1) + sink[..., 0], 1, rtol=1e-5)
    data = analysis.attention(lm, TOKENS_NL).data
    np.testing.assert_allclose(data["sink"][0], sink[:, :, 1:, 0].mean((0, 2)), rtol=1e-4)
    assert coefficients.shape == (*TOKENS_NL.shape, 3) and "slots" not in data
    assert lm(TOKENS_NL, replace={taps["coefficients"]: jnp.zeros_like(coefficients)}).shape[:2] == TOKENS_NL.shape


def test_copying_is_of_the_whole_matrix_of_values():
    lm = tiny_model("llama", model__blocks__main__attention__value="identity_plus")
    params = layers.get(lm.config, lm.params, 0)["attention"]
    value = {name: np.asarray(each, np.float64) for name, each in params["value"].items()}
    D, H, V = value["kernel"].shape
    of_all_DHV = value["identity_gain"] * np.eye(D).reshape(D, H, V) + value["weight_gain"] * value["kernel"]
    embed, head = (np.asarray(lm.params[name]["table"], np.float64) for name in ("embed", "head"))
    output_HVD = np.asarray(params["output"]["kernel"], np.float64)
    expected = [positive_share(embed @ of_all_DHV[:, h] @ output_HVD[h] @ head.T) for h in range(H)]
    np.testing.assert_allclose(analysis.attention(lm, TOKENS_NL).data["copying"][0], expected, atol=1e-6)
