"""Routing: a reference in NumPy, and planted routers."""

from itertools import product

import jax.numpy as jnp
import numpy as np
import pytest

from tests.daily import daily
from tests.tiny_runs import rough_params, tiny_model
from xfresearch import LanguageModel, analysis
from xfresearch.analysis.panel import Panel
from xfresearch.analysis.routing import information, kept
from xfresearch.models.inputs import forward
from xfresearch.runtime.errors import UserError

TOKENS_NL = np.random.default_rng(0).integers(257, size=(4, 32))


def test_equals_the_reference():
    lm = tiny_model("moe")
    data = analysis.routing(lm, TOKENS_NL).data
    sites = ("router_logits", "router_probabilities", "chosen")
    values = lm.capture(TOKENS_NL, [f"blocks.1.feed_forward.{site}" for site in sites])
    logits, scores, chosen = (np.asarray(value) for value in values.values())
    E, k = logits.shape[-1], chosen.shape[-1]
    load, together = np.zeros(E), np.zeros((E, E))
    entropy, margin = [], []
    for b, row in enumerate(chosen):
        for n, choice in enumerate(row):
            load[choice] += 1
            for i in choice:
                together[i, choice] += 1
            p = np.exp(logits[b, n].astype(np.float64))
            p /= p.sum()
            entropy.append(-(p * np.log(p)).sum())
            ranked = np.sort(scores[b, n])[::-1]
            margin.append(ranked[k - 1] - ranked[k])
    np.testing.assert_allclose(data["load"][1], load / load.sum())
    np.testing.assert_allclose(data["together"][1], together / np.maximum(np.diag(together)[:, None], 1))
    assert data["busiest"][1] == pytest.approx(load.max() / load.sum() * E)
    assert data["entropy"][1] == pytest.approx(np.mean(entropy), rel=1e-5)
    assert data["margin"][1] == pytest.approx(np.mean(margin), rel=1e-4, abs=1e-6)


DAILY = [("sigmoid", "bias", 2)]  # the reference has a softmax and no bias
ROUTERS = [*product(("softmax", "sigmoid"), ("loss", "bias"), (2, 8))]


@pytest.mark.parametrize(("scores", "balance", "top_k"), daily(DAILY, ROUTERS))
def test_figures_are_the_statistics_of_training(scores, balance, top_k):
    options = {"scores": scores, "balance": balance, "top_k": top_k}
    lm = tiny_model("moe", **{f"model__blocks__main__feed_forward__moe__{name}": value for name, value in options.items()})
    if balance == "bias":  # it decides most choices
        layer = lm.params["blocks"]["main"]["feed_forward"]
        layer["router_bias"] = 0.5 * jnp.arange(16.0).reshape(2, 8)[:, ::-1] * jnp.array([[1.0], [-1.0]])
    sums = forward(lm.config, lm.params, jnp.asarray(TOKENS_NL))[1].statistics["main"]["feed_forward"]
    expected = {name: np.asarray(value).sum(1) / TOKENS_NL.size for name, value in sums.items()}
    data = analysis.routing(lm, TOKENS_NL).data
    for name in ("mass", "entropy", "margin"):
        np.testing.assert_allclose(data[name], expected[f"router_{name}"], rtol=1e-4, atol=1e-6, err_msg=name)
    np.testing.assert_allclose(data["load"], expected["router_load"] / top_k, atol=1e-6)
    panel = Panel(lm.config, {"tokens": TOKENS_NL})(lm.params)
    np.testing.assert_allclose(panel["router_entropy"], expected["router_entropy"], rtol=1e-4)


def test_a_planted_router_of_token_ids_is_found_and_a_random_one_is_not():
    lm = tiny_model("moe", model__blocks__main__feed_forward__moe__scores="softmax")
    E, D = lm.config.blocks["main"].feed_forward.moe.experts, lm.config.width
    params = rough_params(lm.config)
    # The embeddings of all tokens of one class are one vector, and the router's column of its expert.
    vectors = np.linalg.qr(np.random.default_rng(0).standard_normal((D, E)))[0].T
    classes = np.arange(lm.config.vocab_size) % E
    params["embed"]["table"] = jnp.asarray(20 * vectors[classes], jnp.float32)
    router = params["blocks"]["main"]["feed_forward"]["router"]
    router["kernel"] = jnp.broadcast_to(jnp.asarray(20 * vectors.T, jnp.float32), router["kernel"].shape)
    ours = LanguageModel(lm.config, params, None, lm.run)
    tokens_NL = TOKENS_NL % 16  # few ids: each occurs often enough
    actual, without = (analysis.routing(each, tokens_NL).data["by_token"][0] for each in (ours, lm))
    assert actual > 0.75 * np.log2(E) and without < 0.6 * actual
    even_NL = tokens_NL // 2 * 2
    of_corpora = [analysis.routing(ours, even_NL, corpora=[even_NL + other]) for other in (1, 0)]
    one, none = (each.data["by_corpus"][0] for each in of_corpora)
    assert one > 0.95 and abs(none) < 0.05  # two corpora of equal size whose experts differ: 1 bit
    loads = of_corpora[0].data["corpus_load"][:, 0]
    assert loads.shape == (2, E) and (loads[0] * loads[1] < 0.3).all()


def test_corpora_have_rows_as_long_as_those_of_a_text(tmp_path):
    (tmp_path / "notes.txt").write_text("".join(f"line {number} of the text\n" for number in range(500)))
    lm = tiny_model("moe", data__cache_dir=tmp_path / "cache", evaluation__split="train")
    result = analysis.routing(lm, ["hello world"], count=3, corpora=[f"text_files:{tmp_path}/notes.txt"])
    assert result.data["entropy_rows"].shape[0] == 4 and "4 rows of 11 given tokens, text_files:" in result.about


def test_an_analysis_that_does_not_apply_says_why():
    with pytest.raises(UserError, match="^routing does not apply to this model: "):
        analysis.routing(tiny_model("gpt2"), TOKENS_NL)


def test_information_is_that_of_the_definition_and_zero_for_independent_values():
    rng = np.random.default_rng(1)
    a = rng.integers(4, size=4000)
    assert information(a, a * 7, 0) == pytest.approx(2.0, abs=0.02)
    assert information(a, rng.integers(50, size=4000), 0) == pytest.approx(0.0, abs=0.02)
    assert information(a, a // 2, 0) == pytest.approx(1.0, abs=0.02)


def test_kept_choices():
    chosen = np.array([[[0, 1], [2, 3]]])
    np.testing.assert_allclose(kept(chosen, np.array([[[1, 0], [3, 1]]]), np.ones((1, 2), bool)), [0.75])
    lm = tiny_model("moe")
    result = analysis.routing(lm, TOKENS_NL, against=lm)
    np.testing.assert_array_equal(result.data["kept"], 1.0)


def test_dropped_choices_are_counted():
    lm = tiny_model("moe", model__blocks__main__feed_forward__moe__capacity=0.25)
    actual = analysis.routing(lm, TOKENS_NL).data["dropped"]
    dropped = np.asarray(lm.capture(TOKENS_NL, "blocks.0.feed_forward.dropped")["blocks.0.feed_forward.dropped"])
    assert actual[0] == pytest.approx(dropped.mean()) and dropped.any()
