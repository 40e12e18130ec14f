"""Lens and attribution: the parts sum to the logits for every layout, and planted parts are found."""

import re

import jax
import numpy as np
import pytest

from tests.analysis.test_attention import planted
from tests.contracts.passes import capture, forward
from tests.contracts.variants import ALL, in_float64, marked, model, random_params, tokens_for
from tests.tiny_runs import tiny_model
from tests.tolerances import TOLERANCE, relative_error
from xfresearch import analysis
from xfresearch.analysis import coefficients
from xfresearch.analysis.contributions import contributions, directions, not_followed, recorded
from xfresearch.analysis.lens import attributed
from xfresearch.analysis.sequences import Sequences
from xfresearch.models import layers
from xfresearch.models.memories import memory as memory_of
from xfresearch.runtime.errors import UserError

LAYOUTS = ("post_norm", "peri_norm", "fused_output", "no_skip", "skipless", "deep_norm", "resi_dual", "all_attention")
DAILY = [*(f"layout={name}" for name in LAYOUTS), "base", "attention.output_gate=elementwise", "final_norm=dyt"]
TOKENS_NL = np.random.default_rng(0).integers(257, size=(3, 12))


@pytest.mark.parametrize("name", marked(DAILY))
def test_the_parts_sum_to_the_logits(name, x64):
    config = in_float64(ALL[name])
    params, tokens_BL = random_params(config), tokens_for(config)
    if reason := not_followed(config):
        with pytest.raises(UserError, match=re.escape(reason)):
            contributions(config, params, tokens_BL)
        return
    terms, head, hidden_BLD = jax.jit(contributions, static_argnums=(0, 3))(config, params, tokens_BL, True)
    total_BLD = sum(terms.values())
    assert relative_error(total_BLD, hidden_BLD) < TOLERANCE["float64"]
    assert relative_error(head.logits(total_BLD), forward(config, params, tokens_BL)[0]) < TOLERANCE["float64"]
    whole = contributions(config, params, tokens_BL)[0]
    for part, value in whole.items():
        own = [name for name in terms if name == part or name.startswith(f"{part}.") and name not in whole]
        assert relative_error(sum(terms[name] for name in own), value) < 1e-9, part


@pytest.mark.parametrize("parts", [{}, {"norm_bias": True}, {"norm_gain": False}], ids=["gain", "bias", "alone"])
@pytest.mark.parametrize("layout", ["post_norm", "peri_norm", "resi_dual"])
def test_the_parts_sum_to_the_logits_with_derf_in_every_place(layout, parts, x64):
    """Its constant is not only a bias: erf(shift) is there at 0, and derf has it without a gain or a bias too."""
    final = "none" if layout == "post_norm" else "derf"
    changes = {"layout": layout, "norm": "derf", **parts}
    config = in_float64(model({"final_norm": final, **{f"blocks.main.{name}": value for name, value in changes.items()}}))
    params, tokens_BL = random_params(config), tokens_for(config)
    terms, head, _ = contributions(config, params, tokens_BL, True)
    assert ("final_norm" in terms) == (final == "derf")
    total_BLD = sum(terms.values())
    assert relative_error(head.logits(total_BLD), forward(config, params, tokens_BL)[0]) < TOLERANCE["float64"]


@pytest.mark.parametrize("changes", [{}, {"model__blocks__main__layout": "resi_dual"}])
def test_the_lens_is_the_unembedded_stream(changes):
    lm = tiny_model("gpt2", **changes)
    data = analysis.lens(lm, TOKENS_NL).data
    final = np.asarray(jax.nn.log_softmax(lm(TOKENS_NL)), np.float64)
    assert data["loss"][-1] == pytest.approx(float(lm.loss(TOKENS_NL).mean()), rel=1e-5)
    assert data["agreement"][-1] == 1.0 and data["divergence"][-1] == pytest.approx(0, abs=1e-6)
    if not changes:
        stream = lm.capture(TOKENS_NL, "blocks.0.feed_forward.residual").popitem()[1]
        log_p = np.asarray(jax.nn.log_softmax(lm.unembed(stream)), np.float64)
        own = np.take_along_axis(log_p[:, :-1], TOKENS_NL[:, 1:, None], -1)
        np.testing.assert_allclose(data["loss_rows"][:, 0], -own.mean((1, 2)), rtol=1e-5)
        np.testing.assert_allclose(data["agreement_rows"][:, 0], (log_p.argmax(-1) == final.argmax(-1)).mean(1))
        kl = (np.exp(final) * (final - log_p)).sum(-1).mean(1)
        np.testing.assert_allclose(data["divergence_rows"][:, 0], kl, rtol=1e-3, atol=1e-6)


def test_attributions_sum_to_the_relative_logit():
    lm = tiny_model("gpt2")
    data = analysis.lens(lm, TOKENS_NL).data
    logits = np.asarray(lm(TOKENS_NL), np.float64)[:, :-1]
    own = np.take_along_axis(logits, TOKENS_NL[:, 1:, None], -1)[..., 0] - logits.mean(-1)
    np.testing.assert_allclose(data["attribution_rows"].sum(1), own.mean(1), rtol=1e-3, atol=1e-4)
    blocks = data["attribution"][[part.startswith("blocks.") for part in data["parts"]]].sum()
    assert np.nansum(data["by_sublayer"]) == pytest.approx(blocks)


def test_a_planted_induction_head_makes_the_prediction():
    half_NL = np.random.default_rng(0).permuted(np.tile(np.arange(24), (4, 1)), axis=1)
    data = analysis.lens(planted(), np.concatenate([half_NL, half_NL], 1)).data
    assert np.nanargmax(data["by_head"]) == 2 and data["by_head"].shape == (2, 2)  # layer 1, head 0
    assert np.nanmax(np.delete(data["by_head"].ravel(), 2)) < 0.1 * data["by_head"][1, 0]


KEYED = ["layout=peri_norm", "feed_forward[moe].moe.shared=2", "attention.memory_activation=gelu"]


@pytest.mark.parametrize("name", marked(KEYED))
def test_the_parts_of_keys_sum_to_those_of_their_sublayers(name, x64):
    config = in_float64(ALL[name])
    if not config.causal:
        pytest.skip("it does not predict next tokens")
    params, tokens_BL = random_params(config), tokens_for(config)
    of_parts, of_keys = attributed(config, params, Sequences(tokens_BL))
    towards = towards_next(config, params, tokens_BL)
    assert not [memory for memory in of_keys if coefficients.written_by(memory) not in towards]
    for sublayer, direction_BLD in towards.items():
        memories = [memory for memory in of_keys if coefficients.written_by(memory) == sublayer]
        if not memories or sublayer.endswith(".attention"):  # attention writes more than its slots
            continue
        total = sum(of_keys[memory].sum(1) + of_bias(config, params, memory, direction_BLD) for memory in memories)
        if sublayer in of_parts:
            assert relative_error(total, of_parts[sublayer]) < 1e-9, sublayer
        else:  # without a skip, only the next sublayer reads it
            assert not np.any(total), sublayer


def of_bias(config, params, memory: str, direction_BLD):
    """[B]: the part of the bias after the values of a memory, times the gates of its experts."""
    bias = memory_of(config, params, *coefficients.where(memory)).bias
    if bias is None or bias.ndim == 1:
        return 0 if bias is None else (direction_BLD @ bias).mean(1)
    names = [f"{memory}.{name}" for name in ("chosen", "gates")]
    chosen_BLk, gates_BLk = capture(config, params, tokens_for(config)[:, :-1], names)
    return (gates_BLk * np.einsum("bld,blkd->blk", direction_BLD, bias[chosen_BLk])).sum(-1).mean(1)


def towards_next(config, params, tokens_BL) -> dict:
    result = recorded(config, params, Sequences(tokens_BL[:, :-1]))
    table_VD = result.lm.logit_head().table_VD
    return directions(result, table_VD[tokens_BL[:, 1:]] - table_VD.mean(0))


def test_the_parts_of_slots_are_the_output_without_that_of_tokens(x64):
    config = in_float64(ALL["attention.memory_heads=shared"])
    params, tokens_BL = random_params(config), tokens_for(config)
    of_keys = attributed(config, params, Sequences(tokens_BL))[1]
    at = "blocks.0.attention"
    names = [f"{at}.{site}" for site in ("heads", "weights", "value")]
    values = recorded(config, params, Sequences(tokens_BL[:, :-1]), tuple(names)).values
    heads_BLHV, weights_BHLS, value_BSGV = (np.asarray(values[name]) for name in names)
    value_BSHV = value_BSGV.repeat(heads_BLHV.shape[2] // value_BSGV.shape[2], 2)
    slots_BLHV = heads_BLHV - np.einsum("bhls,bshv->blhv", weights_BHLS, value_BSHV)
    output_HVD = np.asarray(layers.get(config, params, 0)["attention"]["output"]["kernel"])
    direction_BLD = np.asarray(towards_next(config, params, tokens_BL)[at])
    expected = np.einsum("blhv,hvd,bld->bl", slots_BLHV, output_HVD, direction_BLD).mean(1)
    assert relative_error(of_keys[at].sum(1), expected) < 1e-9
