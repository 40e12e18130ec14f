"""Networks whose answer is known by construction, in layouts with norms at other places: each analysis finds it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.contracts.variants import model
from tests.daily import daily
from tests.tiny_runs import tiny_config
from xfresearch import LanguageModel, analysis
from xfresearch.analysis.patching import paths
from xfresearch.analysis.prompts import Prompt
from xfresearch.analysis.sequences import Sequences
from xfresearch.analysis.tracing import effects
from xfresearch.models import transformer

LAYOUTS = ("pre_norm", "post_norm", "output_norm", "all_attention")
SUBLAYERS = LAYOUTS[:-1]  # with a feed-forward layer
V, L = 12, 8
D = V + L  # the stream: a dimension for each token, and one for each position
TOKENS_NL = np.random.default_rng(0).integers(V, size=(3, L))
all_attention = pytest.mark.parametrize("layout", daily(("all_attention",), LAYOUTS))
post_norm = pytest.mark.parametrize("layout", daily(("post_norm",), LAYOUTS))


def network(layout: str, **options) -> tuple:
    """A config of two layers, and parameters: gains of 1, tokens and positions as above, otherwise 0."""
    alone = layout == "all_attention"
    block = {"layout": layout, "norm": "rms", "norm_epsilon": 1e-30, "attention.heads": 2, "attention.head_size": D}
    block |= {"attention.memory_slots": V} if alone else {"feed_forward.kind": "relu", "feed_forward.hidden": V}
    outside = {"width": D, "depth": 2, "vocab_size": V, "max_length": L, "position": "learned"}
    outside |= {"final_norm": "none"} if layout in ("post_norm", "all_attention") else {}
    config = model(outside | {f"blocks.main.{name}": value for name, value in (block | options).items()})
    gain = lambda path, leaf: np.ones(leaf.shape) if path[-1].key == "gain" else np.zeros(leaf.shape)  # noqa: E731
    params = jax.tree_util.tree_map_with_path(gain, transformer.abstract(config))
    params["embed"]["table"][:], params["position"]["table"][:] = np.eye(D)[:V], np.eye(D)[V:]
    return config, params


def finished(config, params) -> LanguageModel:
    return LanguageModel(config, jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), params), None, tiny_config("gpt2"))


def copies_the_previous_token(layout: str, layer: int) -> LanguageModel:
    """Head 0 of a layer attends to the token before, and writes 5 times it. The others attend to all alike, and write 0."""
    config, params = network(layout)
    attention = params["blocks"]["main"]["attention"]
    attention["query"]["kernel"][layer, V:, 0, V:] = 100 * D**0.5 * np.eye(L)
    attention["key"]["kernel"][layer, V:, 0, V:] = np.eye(L, k=1)  # position p - 1 answers as p
    attention["value"]["kernel"][layer, :V, 0, :V] = attention["output"]["kernel"][layer, 0, :V, :V] = np.eye(V)
    attention["output"]["kernel"][layer, 0] *= 5
    return finished(config, params)


def counts(layout: str) -> LanguageModel:
    """Unit or slot i of layer 1 reads token i, and writes 5 times token i + 1. Layer 0 writes 0."""
    config, params = network(layout)
    block, next_VD = params["blocks"]["main"], np.eye(D)[(np.arange(V) + 1) % V]
    if layout == "all_attention":
        attention = block["attention"]
        attention["query"]["kernel"][1, :V, 0, :V] = 100 * np.eye(V)
        attention["memory"]["key"][1, :, 0, :V] = np.eye(V)
        attention["memory"]["value"][1, :, 0] = 5 * next_VD / V**0.5
        attention["output"]["kernel"][1, 0] = np.eye(D)
    else:
        block["feed_forward"]["up"]["kernel"][1, :V] = np.eye(V)
        block["feed_forward"]["down"]["kernel"][1] = 5 * next_VD
    return finished(config, params)


@all_attention
def test_the_head_of_the_previous_token(layout):
    data = analysis.attention(copies_the_previous_token(layout, 0), TOKENS_NL).data
    slots, after_first = V * (layout == "all_attention"), np.arange(1, L)
    others = {(0, 1), (1, 0), (1, 1)}
    even = {"previous": (1 / (after_first + 1 + slots)).mean(), "entropy": np.log(after_first + 1 + slots).mean()}
    even |= {"first": even["previous"], "self": even["previous"]} | ({"slots": (slots / (after_first + 1 + slots)).mean()})
    planted = {"previous": 1, "first": 1 / (L - 1), "self": 0, "distance": 1, "entropy": 0, "slots": 0, "copying": 1}
    for name in (planted if slots else planted.keys() - {"slots"}):
        assert data[name][0, 0] == pytest.approx(planted[name], abs=1e-5), name
        for place in others if name in even else ():
            assert data[name][place] == pytest.approx(even[name], rel=1e-5), name


@post_norm
def test_the_layer_that_makes_the_prediction(layout):
    """The stream after layer 0 is the token, and that after layer 1 the next one. Only keys of tokens in the text count."""
    counting_NL = np.array([[1], [2]]) + np.arange(7)
    lm = counts(layout)
    data, logits_NLV = analysis.lens(lm, counting_NL).data, np.asarray(lm(counting_NL))[:, :-1]
    own_NL = np.take_along_axis(logits_NLV, counting_NL[:, 1:, None], -1)[..., 0]
    assert data["attribution"].sum() == pytest.approx((own_NL - logits_NLV.mean(-1)).mean(), rel=1e-4)
    np.testing.assert_array_equal(data["token"], [counting_NL[0], counting_NL[0] + 1])
    np.testing.assert_array_equal(data["agreement"], [0, 1])
    assert data["divergence"][1] == pytest.approx(0, abs=1e-6) and data["divergence"][0] > 1
    place = "blocks.1.attention" if layout == "all_attention" else "blocks.1.feed_forward"
    parts = dict(zip(data["parts"], data["attribution"], strict=True))
    best = max(parts, key=parts.get)
    assert best.startswith(place) and parts[best] > 1
    assert all(abs(value) < 1e-4 for part, value in parts.items() if part not in (best, "embed"))
    keys = data[f"{place}.keys"][:V]
    used = np.isin(np.arange(V), counting_NL[:, :-1])
    assert (keys[used] > 0.05).all() and np.abs(keys[~used]).max() < 1e-4
    assert keys.sum() == pytest.approx(parts[best], rel=1e-4)


@pytest.mark.long
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_place_of_a_copy(layout):
    """The last token's prediction is the one before it. The stream carries the difference there, and at the last token from
    layer 1 on, whose attention moves it."""
    lm, clean = copies_the_previous_token(layout, 1), np.array([[1, 2, 3, 4]])
    corrupted = np.array([[1, 2, 5, 4]])
    data = analysis.patching(lm, clean, corrupted, (3, 5)).data
    assert data["clean"] == pytest.approx(-data["corrupted"]) and data["clean"] > 1
    last = "attention" if layout == "all_attention" else "feed_forward"
    expected = {f"{last}.residual": [[0, 0, 1, 0], [0, 0, 0, 1]], "attention.out": [[0, 0, 0, 0], [0, 0, 0, 1]]}
    expected |= {} if layout == "all_attention" else {"feed_forward.out": np.zeros((2, 4))}
    for site, effect_NL in expected.items():
        np.testing.assert_allclose(data[site], effect_NL, atol=1e-5, err_msg=site)
    to_head = np.zeros(data["paths"].shape)
    to_head[1, 0] = 1
    np.testing.assert_allclose(data["paths"], to_head, atol=1e-5)
    rows = Sequences(clean), Sequences(corrupted)
    to_layer = (paths(lm, *rows, "blocks.1.attention", (3, 5)) - data["corrupted"]) / data["clean"] / 2
    np.testing.assert_allclose(to_layer, np.where(np.arange(2)[:, None] < 1, 0, np.nan) + 0 * to_head, atol=1e-5)


@all_attention
def test_where_a_copied_token_is_recalled(layout):
    """The subject is the token before the last: its stream restores it before the copy in layer 1, and the last after it."""
    noise = 10 * np.random.default_rng(1).standard_normal((2, L, D))
    prompt = Prompt((1, 2, 3, 4), 2, 2, (3,))
    (traced,) = effects(copies_the_previous_token(layout, 1), [prompt], 1, lambda number, length, width: noise)
    assert traced.clean > 0.5 and traced.corrupted < 0.5 * traced.clean
    none = [traced.corrupted] * 2
    expected = {"stream": [none, none], "attention": [none, none], "feed_forward": [none, none], "slots": [none, none]}
    expected = {value: np.array(rows) for value, rows in expected.items() if value in traced.restored}
    expected["stream"][[0, 1], [0, 1]] = expected["attention"][1, 1] = traced.clean
    for value, p_NL in expected.items():
        np.testing.assert_allclose(traced.restored[value][:, 2:], p_NL, rtol=1e-4, err_msg=value)


@pytest.mark.parametrize("layout", daily(("pre_norm", "post_norm"), LAYOUTS))
def test_keys_and_angles_that_a_norm_changes(layout):
    """Token 5 is the mean of tokens 0 to 3. On the sphere of a layer norm each token is selected, and no token has a part
    along the ones: of the layer's input in pre-norm, and of the stream after a post norm."""
    config, params = network(layout, norm="layer")
    directions_ID = np.linalg.qr(np.concatenate([np.ones((1, D)), np.random.default_rng(2).standard_normal((6, D))]).T)[0].T
    angle = 50.0
    units_ID = np.cos(np.radians(angle)) / D**0.5 + np.sin(np.radians(angle)) * directions_ID[1:]
    units_ID = np.round(units_ID * 2**16) / 2**16  # so that the mean of four is exact in float32
    params["position"]["table"][:] = 0
    params["embed"]["table"][:6] = units_ID
    params["embed"]["table"][5] = units_ID[:4].mean(0)
    params["embed"]["table"][6] = units_ID[5]
    data = analysis.norms(finished(config, params), np.array([[0, 1, 2, 3, 4, 5], [0, 1, 2, 3, 4, 6]])).data
    raw, normed = (1 / 6, angle), (0, 90.0)
    in_stream = {"post_norm": (raw, normed), "all_attention": (raw, normed)}.get(layout, (raw, raw))
    in_layer = (normed, normed) if layout == "pre_norm" else in_stream
    for name, expected in (("before", in_stream), ("after", in_layer)):
        np.testing.assert_allclose(data[f"hidden_{name}_rows"][0], [hidden for hidden, _ in expected])
        np.testing.assert_allclose(data[f"hidden_{name}_rows"][1], 0)
        np.testing.assert_allclose(data[f"angle_{name}_rows"][1], [degrees for _, degrees in expected], atol=0.01)
    along = [np.cos(np.radians(degrees)) ** 2 for _, degrees in in_stream]
    np.testing.assert_allclose(data["projected_rows"][1], along, atol=1e-4)


@pytest.mark.parametrize("layout", daily(("output_norm",), SUBLAYERS))
def test_routers_by_token_and_always_the_same(layout):
    """Layer 0 sends token i to expert i mod 4, layer 1 all tokens to expert 2."""
    E = 4
    moe = {"experts": E, "top_k": 1, "renormalise": False}
    options = {f"feed_forward.moe.{name}": value for name, value in moe.items()}
    config, params = network(layout, **{"feed_forward.kind": "moe"} | options)
    router_NDE = params["blocks"]["main"]["feed_forward"]["router"]["kernel"]
    router_NDE[0, :V] = 100 * np.eye(E)[np.arange(V) % E]
    router_NDE[1, :V, 2] = 100
    tokens_NL = np.tile(np.arange(2 * V).reshape(3, L) % V, (40, 1))
    data = analysis.routing(finished(config, params), tokens_NL).data
    np.testing.assert_allclose(data["load"], [[1 / 4] * 4, [0, 0, 1, 0]])
    np.testing.assert_allclose(data["mass"], data["load"], atol=1e-6)
    np.testing.assert_allclose(data["busiest"], [1, E])
    np.testing.assert_allclose(data["together"], [np.eye(E), np.diag([0, 0, 1, 0])])
    assert np.abs(data["entropy"]).max() < 1e-6 and np.allclose(data["margin"], 1)
    assert data["by_token"] == pytest.approx([2, 0], abs=0.05)  # bits, less what is found by chance


@pytest.mark.long
@pytest.mark.parametrize("layout", LAYOUTS)
def test_features_are_the_tokens_of_a_memory(layout):
    """Of what layer 1 writes: a feature that token i triggers writes token i + 1. All tokens have one, but for a token whose
    output is the bias."""
    lm, rng = counts(layout), np.random.default_rng(3)
    tap = "blocks.1.attention.out" if layout == "all_attention" else "blocks.1.feed_forward.out"
    tokens_NL, training = rng.integers(V, size=(16, L)), rng.integers(V, size=(32, L))
    data = analysis.features(lm, tokens_NL, tap=tap, sizes=(2 * V,), k=1, steps=400, training=training).data
    assert data["unexplained"][0] < 0.02 and data["recovered"][0] > 0.95
    used = np.flatnonzero(data[f"{2 * V}/frequency"] > 0)
    triggered = {}
    for feature in used:
        at_T = data[f"{2 * V}/triggers"][feature]
        tokens = set(tokens_NL.ravel()[at_T[at_T >= 0]])
        assert len(tokens) == 1, feature
        triggered[feature] = tokens.pop()
        assert data[f"{2 * V}/value_tokens"][feature, 0] == (triggered[feature] + 1) % V
    others = set(range(V)) - set(triggered.values())
    assert others <= {(int(data[f"{2 * V}/decoder_bias_E"].argmax()) - 1) % V}
