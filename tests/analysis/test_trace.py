"""Causal tracing: one batched program equals a loop over the definition; planted places are found."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.tiny_runs import tiny_model
from tests.tolerances import TOLERANCE, relative_error
from xfresearch import Patch, UserError
from xfresearch.analysis.prompts import prompt_of
from xfresearch.analysis.trace import CLASSES, by_class, noise_of, stands_out, token_class, trace
from xfresearch.analysis.tracing import effects, normal
from xfresearch.data.records import Record

RECORDS = [Record("Ada", "{} plays", "a"), Record("Bob Li", "So {} is in", "b"), Record("C", "x {}", "c")]
SITES = {"stream": "feed_forward.residual", "attention": "attention.out", "feed_forward": "feed_forward.out"}


def probability(lm, prompt, replace=None) -> float:
    logits_BLV = lm(np.array([prompt.tokens]), replace=replace)
    return float(jax.nn.softmax(logits_BLV[0, -1])[prompt.target[0]])


def restored(lm, prompt, noise_SLD, site: str, window: range, position: int) -> float:
    """The definition, one pass for each draw."""
    at_L = np.arange(len(prompt.tokens))
    subject_L = (at_L >= prompt.first) & (at_L <= prompt.last)
    names = [f"blocks.{layer}.{site}" for layer in window if 0 <= layer < lm.config.depth]
    clean = lm.capture(np.array([prompt.tokens]), names) if names else {}
    restored_F = []
    for noise_LD in noise_SLD:
        noise = jnp.asarray(noise_LD[: len(at_L)] * subject_L[:, None], jnp.float32)
        replace = {"embed": Patch(jnp.add, (noise,))}
        for name, value in clean.items():
            where = (at_L == position)[(None,) * (value.ndim - 2)]
            replace[name] = Patch(arguments=(value,), where=where)
        restored_F.append(probability(lm, prompt, replace))
    return float(np.mean(restored_F))


@pytest.mark.parametrize(
    "name, changes",
    [("gpt2", {}), *(pytest.param(name, {}, marks=pytest.mark.long) for name in ("all_attention", "moe", "gptj"))],
)
def test_effects_are_those_of_one_pass_for_each_place(name, changes):
    lm = tiny_model(name, **{f"model__{key}": value for key, value in changes.items()})
    prompts = [prompt_of(lm, record) for record in RECORDS[:2]]
    draw = normal(0, 0.5, samples=2)
    traced = effects(lm, prompts, 2, draw)
    sites = {"stream": "attention.residual", "attention": "attention.out", "slots": "attention.coefficients"}
    sites = sites if name == "all_attention" else SITES
    assert set(traced[0].restored) == set(sites)
    for number, (prompt, each) in enumerate(zip(prompts, traced, strict=True)):
        noise_SLD = draw(number, 16, lm.config.width)
        assert relative_error(each.clean, probability(lm, prompt)) < 10 * TOLERANCE["float32"]
        expected = restored(lm, prompt, noise_SLD, SITES["stream"], range(0), 0)
        assert relative_error(each.corrupted, expected) < 100 * TOLERANCE["float32"]
        for value, site in sites.items():
            layer, position = 1, prompt.last
            window = range(layer, layer + 1) if value == "stream" else range(layer - 1, layer + 1)
            expected = restored(lm, prompt, noise_SLD, site, window, position)
            assert relative_error(each.restored[value][layer, position], expected) < 100 * TOLERANCE["float32"], value
            assert np.isnan(each.restored[value][:, : prompt.first]).all()
            assert np.isfinite(each.restored[value][:, prompt.first :]).all()


def test_restoring_the_whole_stream_restores_the_clean_run():
    """A fact whose subject is the last token: the stream there is all that the last layer's output depends on."""
    lm = tiny_model("gpt2")
    prompt = prompt_of(lm, RECORDS[2])
    (traced,) = effects(lm, [prompt], 1, normal(0, 5.0, samples=2))
    assert traced.restored["stream"][-1, -1] == pytest.approx(traced.clean, rel=1e-5)
    assert abs(traced.corrupted - traced.clean) > 0.01 * traced.clean


def test_classes_of_tokens():
    lm = tiny_model("gpt2")  # one token is one byte
    prompt = prompt_of(lm, RECORDS[1])
    assert bytes(prompt.tokens[prompt.first : prompt.last + 1]) == b"Bob Li" and prompt.target == (32, ord("b"))
    named = [CLASSES[number] if number >= 0 else "" for number in token_class(prompt)]
    expected = [*[""] * prompt.first, "first subject", *["middle subject"] * 4, "last subject", "first after"]
    assert named == [*expected, *["further"] * (len(named) - len(expected) - 1), "last"]
    assert [CLASSES[n] for n in token_class(prompt_of(lm, RECORDS[2])) if n >= 0] == ["last subject"]
    (traced,) = effects(lm, [prompt], 1, normal(0, 1.0, samples=1))
    (mean_NC,) = by_class(lm.config, [prompt], [traced], "stream")
    expected = (traced.restored["stream"] - traced.corrupted)[:, prompt.first + 1 : prompt.last].mean(1)
    np.testing.assert_allclose(mean_NC[:, 1], expected)


def test_sigma_is_that_of_the_subjects_embeddings():
    lm = tiny_model("gpt2")
    prompts = [prompt_of(lm, record) for record in RECORDS[:2]]
    rows = np.asarray(lm.params["embed"]["table"], np.float64)[[*b"AdaBob Li"]]
    assert noise_of(lm, prompts) == pytest.approx(rows.std())


@pytest.mark.parametrize("norm", ["layer", "none"])
@pytest.mark.parametrize("scale", ["none", "sqrt_width", "learned"])
def test_sigma_is_that_of_the_values_that_get_the_noise(scale, norm):
    """The noise comes after the embedding's norm, and after its scale."""
    lm = tiny_model("gpt2", model__position="none", model__embedding_norm=norm, model__embedding_scale=scale)
    lm.params["embed"]["table"] = 0.02 * lm.params["embed"]["table"]
    prompt = prompt_of(lm, RECORDS[1])
    value_BLD = lm.capture(np.array([prompt.tokens]), "embed")["embed"]
    expected = np.asarray(value_BLD, np.float64)[0, prompt.first : prompt.last + 1].std()
    assert noise_of(lm, [prompt]) == pytest.approx(expected, rel=1e-5)


def test_only_known_facts_are_traced_and_the_result_has_pictures():
    lm = tiny_model("gpt2")
    likeliest = int(np.asarray(lm(RECORDS[0].text))[0, -1].argmax())
    with pytest.raises(UserError, match="the model predicts the object of none of the 2 facts"):
        trace(lm, RECORDS[1:])
    lm.params["embed"]["table"] = lm.params["embed"]["table"].at[32].set(3 * lm.params["embed"]["table"][likeliest])
    result = trace(lm, RECORDS, count=1)
    assert result.data["clean"].shape == (1,) and result.data["stream"].shape == (2, len(CLASSES))
    assert len(result.figures()) == 6 and "total effect" in result.summary


def test_prompts_that_are_longer_than_the_table_of_positions_are_refused():
    lm = tiny_model("gpt2")  # 64 rows; padding to a multiple of 8 may go beyond them, which nothing reads
    short, long = (Record("Ada", "x" * letters + " {} plays", "a") for letters in (54, 55))
    for call in (lambda: trace(lm, [short, long]), lambda: effects(lm, [prompt_of(lm, long)], 1, normal(0, 1.0, 1))):
        with pytest.raises(UserError, match="sequence length 65 is not allowed: it must be at most 64, by the model"):
            call()
    assert len(prompt_of(lm, short).tokens) == 64
    assert np.isfinite(effects(lm, [prompt_of(lm, short)], 1, normal(0, 1.0, 1))[0].clean)


def test_no_records_are_not_those_of_the_corpus():
    lm = tiny_model("gpt2", data__corpus="('facts',)")
    with pytest.raises(UserError, match="the model predicts the object of none of the 0 facts"):
        trace(lm, [])


def test_the_last_token_of_the_subject_stands_out_only_where_it_does():
    rng = np.random.default_rng(0)

    def p(effect: float, facts: int = 40) -> float:
        x_FNC = 0.05 * rng.standard_normal((facts, 4, len(CLASSES)))
        x_FNC[:, 2, CLASSES.index("last subject")] += effect
        x_FNC[:, 1, CLASSES.index("last")] += 0.1
        x_FNC[: facts // 2, :, CLASSES.index("middle subject")] = np.nan  # some subjects have two tokens
        return stands_out(x_FNC)

    assert p(0.2) < 1e-4 and p(0.0) > 0.5
    assert np.mean([p(0.1) < 0.05 for _ in range(300)]) < 0.06  # as large as at the last token: no false positives

    def by_chance() -> float:  # the best of 30 layers without an effect, against a single one
        x_FNC = np.full((40, 30, len(CLASSES)), np.nan)
        x_FNC[:, :, CLASSES.index("last subject")] = rng.standard_normal((40, 30))
        x_FNC[:, 0, CLASSES.index("last")] = rng.standard_normal(40)
        return stands_out(x_FNC)

    assert np.mean([by_chance() < 0.05 for _ in range(200)]) < 0.12
    assert np.isnan(stands_out(np.zeros((1, 4, len(CLASSES)))))
    none = np.full((20, 4, len(CLASSES)), np.nan)
    none[:, :, -1] = rng.standard_normal((20, 4))
    assert np.isnan(stands_out(none))  # no fact has such a token
