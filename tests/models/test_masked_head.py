"""BERT's parts of a model: token types, and the layer before the output matrix (models/head_layer.py)."""

from dataclasses import replace

import numpy as np
import pytest

import xfresearch as xf
from tests.contracts.variants import ALL, in_float64, random_params, tokens_for
from tests.reference import model as reference
from tests.tiny_runs import tiny_config
from tests.tolerances import TOLERANCE, relative_error
from xfresearch.analysis.contributions import contributions
from xfresearch.runtime.errors import UserError
from xfresearch.surgery.network import take_apart
from xfresearch.surgery.registry import CONVERSIONS

BERT = ALL["configs/bert.py"]
TYPES_BL = np.array([[0, 0, 0, 1, 1, 1, 1, 1], [1, 0, 1, 0, 0, 0, 0, 1]])


def made(config) -> xf.LanguageModel:
    return xf.LanguageModel(config, random_params(config), None, replace(tiny_config("gpt2"), model=config))


@pytest.fixture
def lm(x64) -> xf.LanguageModel:
    return made(in_float64(BERT))


def test_token_types_are_added_before_the_norm_of_the_embedding(lm):
    tokens_BL = tokens_for(BERT)
    rows = zip(tokens_BL, TYPES_BL, strict=True)
    params = reference.tree(lm.params)
    expected = np.stack([reference.model(lm.config, params, tokens, types=types)[0] for tokens, types in rows])
    assert relative_error(lm(tokens_BL, token_types_BL=TYPES_BL), expected) < TOLERANCE["float64"]
    zeros_BL = np.zeros_like(TYPES_BL)
    np.testing.assert_array_equal(lm(tokens_BL), lm(tokens_BL, token_types_BL=zeros_BL))
    embedded = lm.capture(tokens_BL, "embed", token_types_BL=TYPES_BL)["embed"]
    assert relative_error(embedded, lm.capture(tokens_BL, "embed")["embed"]) > 0.1


def test_token_types_of_another_range_or_for_another_model_are_refused_in_one_line(lm):
    with pytest.raises(UserError, match="token_types_BL has 2, .* at least 0 and below 2"):
        lm(tokens_for(BERT), token_types_BL=TYPES_BL + 1)
    with pytest.raises(UserError, match="this model has no table of token types"):
        made(ALL["base"])(tokens_for(BERT), token_types_BL=TYPES_BL)


def test_the_lens_reads_a_stream_through_the_layer_of_the_head(lm):
    """Kept from the last layer, the stream gives the logits of the model."""
    tokens_BL = tokens_for(BERT)
    last, final = lm.capture(tokens_BL, ["blocks.1.feed_forward.residual", "final"]).values()
    for read, normed in ((last, False), (final, True)):
        assert relative_error(lm.unembed(read, normed), lm(tokens_BL)) < TOLERANCE["float64"]


def test_what_needs_a_linear_head_refuses_it_in_one_line():
    config = ALL["head_norm=layer"]
    params, words = random_params(config), "head_activation='gelu'"
    with pytest.raises(UserError, match=words):
        contributions(config, params, tokens_for(config))
    for name in ("fold_norm", "centre"):
        with pytest.raises(UserError, match=words):
            CONVERSIONS[name](take_apart(config, params))
    tables = replace(config, embedding_norm="layer", head_activation="none", head_norm="none", final_norm="none")
    with pytest.raises(UserError, match="the sum of the tables of tokens and of token types"):
        CONVERSIONS["fold_norm"](take_apart(tables, random_params(tables)))
