"""Networks with a known key, memory, basis or path: the analysis finds it and only it, and not in a network without."""

from importlib import import_module

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.analysis.test_attention import planted as with_heads
from tests.analysis.test_memories import planted as with_memory
from tests.contracts.variants import model
from tests.tiny_runs import tiny_config
from xfresearch import LanguageModel, analysis
from xfresearch.analysis.patching import paths
from xfresearch.analysis.sequences import Sequences
from xfresearch.models import transformer

BARE = {"norm": "none", "attention.heads": 1}


def network(sizes: dict, changes: dict) -> tuple:
    """A config without norms, and parameters of zeros."""
    options = {f"blocks.main.{name}": value for name, value in (BARE | changes).items()}
    config = model({"final_norm": "none", "depth": 1} | sizes | options)
    return config, jax.tree.map(lambda leaf: np.zeros(leaf.shape), transformer.abstract(config))


def finished(config, params) -> LanguageModel:
    return LanguageModel(config, jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), params), None, tiny_config("gpt2"))


@pytest.mark.parametrize("hidden", [True, False])
def test_a_key_that_no_query_selects(hidden):
    """Keys are the inputs. Token 5 is the mean of tokens 0 to 3, or apart from all others."""
    config, params = network({"width": 8, "vocab_size": 6}, {"layout": "attention_only", "attention.head_size": 8})
    params["embed"]["table"][:] = np.eye(6, 8)
    params["embed"]["table"][5] = np.eye(6, 8)[:4].mean(0) if hidden else np.eye(8)[7]
    params["blocks"]["main"]["attention"]["key"]["kernel"][0, :, 0] = np.eye(8)
    tokens_NL = np.array([[0, 1, 2, 3, 4, 5], [5, 4, 3, 2, 1, 0], [0, 1, 2, 4, 4, 5]])  # without token 3 it is selectable
    data = analysis.norms(finished(config, params), tokens_NL).data
    expected = [1 / 6, 1 / 6, 0] if hidden else [0, 0, 0]
    np.testing.assert_allclose(data["hidden_keys_rows"][:, 0, 0], expected)
    np.testing.assert_allclose(data["hidden_before_rows"][:, 0], expected)


def test_the_lens_finds_the_memory_that_makes_the_prediction():
    """Key i writes token i + 1 for token i: without token 7 in the text, key 7 has no part."""
    counting_NL = (np.array([[8], [10]]) + np.arange(12)) % 24  # 8 to 21
    data = analysis.lens(with_memory(), counting_NL).data
    used = np.zeros(24, bool)
    used[counting_NL[:, :-1].ravel()] = True
    keys = data["blocks.0.feed_forward.keys"]
    assert (keys[used] > 0.1).all() and (keys[~used] == 0).all()
    np.testing.assert_array_equal(data["token"][0], counting_NL[0] + 1)
    assert data["parts"][data["attribution"].argmax()] == "blocks.0.feed_forward"
    keys = analysis.lens(with_memory(seed=3), counting_NL).data["blocks.0.feed_forward.keys"]
    assert (keys[~used] != 0).any()


def test_memories_that_agree_on_a_token_that_is_the_first_of_none():
    """Keys 2 i and 2 i + 1 read token i, and write tokens i + 1 and i + 2, and both nearly as much of i + 3."""
    V = 24
    config, params = network({"width": V, "vocab_size": V}, {"feed_forward.kind": "relu", "feed_forward.hidden": 2 * V})
    params["embed"]["table"][:] = np.eye(V)
    feed_forward = params["blocks"]["main"]["feed_forward"]
    feed_forward["up"]["kernel"][0] = np.repeat(np.eye(V), 2, 1)
    first = (np.repeat(np.arange(V), 2) + np.tile([1, 2], V)) % V
    third = (np.repeat(np.arange(V), 2) + 3) % V
    feed_forward["down"]["kernel"][0] = np.eye(V)[first] + 0.9 * np.eye(V)[third]
    data = analysis.memories(finished(config, params), np.random.default_rng(0).integers(V, size=(4, 12)), top=3).data
    assert data["composed"][0] == 1.0 and data["written"][0] == 1.0 and data["active"][0] == pytest.approx(1 / V)
    np.testing.assert_array_equal(data["blocks.0.feed_forward/value_tokens"][:, 0], first)


LAST = 18  # tokens 19 and 20 are apart


@pytest.mark.parametrize(
    "layout, gain, share",
    [
        ("pre_norm", None, {"written": 1.0}),
        ("output_norm", "norm_out", {"written": 1.0}),
        ("peri_norm", "norm_out", {"written": 1.0}),
        ("post_norm", "norm_post", {"residual": 1.0}),
        ("all_attention", "norm_post", {"residual": 1.0}),
    ],
)
def test_the_memory_of_a_layout_with_a_planted_gain(layout, gain, share):
    """Unit or slot i reads token i and writes 5 times token i + 1, and token 20. The gain of an out-norm raises token 20
    above the others: it is what the layer writes. That of a post-norm prefers earlier tokens: the stream keeps token i."""
    V, alone = 24, layout == "all_attention"
    of_memory = {"feed_forward.kind": "relu", "feed_forward.hidden": V}
    of_memory = {"attention.memory_slots": V, "attention.head_size": V} if alone else of_memory
    changes = {"layout": layout, "norm": "rms", "norm_epsilon": 1e-30} | of_memory
    config, params = network({"width": V, "vocab_size": V}, changes)
    params["embed"]["table"][:] = np.eye(V)
    block = params["blocks"]["main"]
    for name, norm in block.items():
        if "_norm_" in name:
            norm["gain"][:] = 1.0
    writes_VD = 5 * np.eye(V)[(np.arange(V) + 1) % V] + np.eye(V)[20]
    if alone:
        block["attention"]["query"]["kernel"][0, :, 0] = 100 * np.eye(V)
        block["attention"]["memory"]["key"][0, :, 0] = np.eye(V)
        block["attention"]["memory"]["value"][0, :, 0] = writes_VD / np.sqrt(V)
        block["attention"]["output"]["kernel"][0, 0] = np.eye(V)
    else:
        block["feed_forward"]["up"]["kernel"][0] = np.eye(V)
        block["feed_forward"]["down"]["kernel"][0] = writes_VD
    if gain == "norm_post":
        block["attention_norm_post" if alone else "feed_forward_norm_post"]["gain"][0] = 6.0 ** -np.arange(V)
    elif gain:
        block["feed_forward_norm_out"]["gain"][0, 20] = 100.0
    tokens_NL = np.random.default_rng(0).integers(LAST + 1, size=(4, 12))
    data = analysis.memories(finished(config, params), tokens_NL, top=3).data
    assert {name: data[name][0] for name in share} == share and data["third"][0] == 0
    memory = data["memories"][0]
    token_K = 20 if gain and gain.endswith("out") else (np.arange(V) + 1) % V
    np.testing.assert_array_equal(data[f"{memory}/value_tokens"][: LAST + 1, 0], np.broadcast_to(token_K, V)[: LAST + 1])


def test_the_tuned_lens_undoes_a_change_of_basis(monkeypatch):
    """Layer 1 rotates the stream. The translator of layer 0 learns the rotation; that of layer 1 has nothing to learn."""
    D, V = 12, 40
    sizes = {"width": D, "vocab_size": V, "depth": 2}
    config, params = network(sizes, {"feed_forward.kind": "relu", "feed_forward.hidden": 2 * D})
    rng = np.random.default_rng(5)
    rotation_DD = np.linalg.qr(rng.standard_normal((D, D)))[0]
    params["embed"]["table"][:] = rng.standard_normal((V, D))
    feed_forward = params["blocks"]["main"]["feed_forward"]
    feed_forward["up"]["kernel"][1] = np.concatenate([np.eye(D), -np.eye(D)], 1)  # relu(x) - relu(-x) = x
    change_DD = rotation_DD - np.eye(D)
    feed_forward["down"]["kernel"][1] = np.concatenate([change_DD, -change_DD])
    monkeypatch.setattr(import_module("xfresearch.analysis.tuned_lens"), "RATE", 0.03)
    tokens_NL, training = rng.integers(V, size=(4, 16)), rng.integers(V, size=(64, 16))
    data = analysis.tuned_lens(finished(config, params), tokens_NL, steps=300, training=training).data
    assert data["divergence"][0] > 5 and data["tuned_divergence"][0] < 0.1
    likeness = [np.corrcoef(data["matrix"][0].ravel(), each.ravel())[0, 1] for each in (change_DD, change_DD.T)]
    assert likeness[0] > 0.9 and likeness[1] < 0.7
    assert data["divergence"][1] == pytest.approx(0, abs=1e-6) and np.abs(data["matrix"][1]).max() < 0.05


def test_an_induction_head_has_all_of_its_weight_there():
    data = analysis.attention(with_heads(), np.random.default_rng(1).integers(24, size=(2, 24))).data
    # The first token looks at itself instead of a previous one, so the second one is not the only one after it.
    assert data["induction"][1, 0] == pytest.approx(23 / 24, abs=1e-3)
    assert np.delete(data["induction"].ravel(), 2).max() < 0.2


def test_the_path_between_two_heads_of_induction():
    """The last token occurred at 4, and the head of layer 0 writes so at 5, where that of layer 1 finds it."""
    tokens = np.random.default_rng(1).permutation(24)[:13]
    clean = np.array([[*tokens[:12], tokens[4]]])
    other_head, other_value = clean.copy(), clean.copy()
    other_head[0, 4] = tokens[12]  # the last token is new
    other_value[0, 5] = tokens[12]  # it has occurred, before another token
    answers = int(tokens[5]), int(tokens[12])

    def metric(prompt) -> float:
        logits = np.asarray(with_heads()(prompt))[0, -1]
        return logits[answers[0]] - logits[answers[1]]

    effect_NC = paths(with_heads(), Sequences(clean), Sequences(other_head), "blocks.1.attention", answers)
    assert metric(clean) > metric(other_head) + 0.5 and effect_NC[0, 0] == pytest.approx(metric(clean), abs=0.02)
    effect_NC = paths(with_heads(), Sequences(clean), Sequences(other_value), "blocks.1.attention", answers)
    assert metric(clean) > metric(other_value) + 0.5 and effect_NC[0, 0] == pytest.approx(metric(other_value), abs=0.02)
