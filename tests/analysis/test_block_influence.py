"""The influence of every block equals its definition, computed from the reference's records alone, on every layout."""

import jax
import numpy as np
import pytest

from tests.analysis import test_two_stacks as pairs
from tests.analysis.test_figures import CASES, CLOSE, TOKENS_NL, made
from tests.daily import daily
from tests.reference import figures
from tests.tiny_runs import tiny_model
from xfresearch import analysis

LAYOUTS = list(dict.fromkeys(layout for layout, form in CASES if form == "dense"))
DAILY = ("post_norm", "hyper_connections", "attention_residuals")


def influence(p: figures.Pass) -> np.ndarray:
    """[B, N]: eq. 1 of Men et al. 2024."""
    values = []
    for number, block, _ in p.layers():
        names = list(block.sublayers)
        x, y = p.values[f"blocks.{number}.{names[0]}.before"], p.values[f"blocks.{number}.{names[-1]}.residual"]
        cosine_BL = (x * y).sum(-1) / np.sqrt((x**2).sum(-1) * (y**2).sum(-1))
        values.append(1 - cosine_BL.mean(1))
    return np.stack(values, 1)


@pytest.mark.parametrize("layout", daily(DAILY, LAYOUTS))
def test_the_influence_of_every_block(layout, x64):
    lm = made(layout, "dense")
    result = analysis.block_influence(lm, TOKENS_NL)
    expected_BN = influence(figures.Pass.of(lm.config, lm.params, TOKENS_NL))
    np.testing.assert_allclose(result.data["influence_rows"], expected_BN, atol=CLOSE)
    np.testing.assert_allclose(result.data["influence"], expected_BN.mean(0), atol=CLOSE)
    assert result.summary["influence"][0] == pytest.approx(expected_BN.mean(), abs=CLOSE)
    assert result.summary["least influence"][0] == pytest.approx(expected_BN.mean(0).min(), abs=CLOSE)


def test_both_stacks_without_padding(x64):
    lm = pairs.made("post-norm")
    data = analysis.block_influence(lm, pairs.ROWS).data
    for row, (p, source) in enumerate(zip(pairs.passes(lm), pairs.READ, strict=True)):
        np.testing.assert_allclose(data["influence_rows"][row], influence(p)[0], atol=CLOSE)
        of_encoder = influence(p.encoder(source[None]))[0]
        np.testing.assert_allclose(data["encoder/influence_rows"][row], of_encoder, atol=CLOSE)


def test_a_block_that_writes_nothing_has_none():
    lm = tiny_model("gpt2")
    silent = jax.tree_util.tree_map_with_path(
        lambda path, leaf: leaf.at[1].set(0) if {"output", "down"} & {str(key.key) for key in path} else leaf,
        lm.params["blocks"],
    )
    first, second = analysis.block_influence(lm.with_params(lm.params | {"blocks": silent}), TOKENS_NL).data["influence"]
    assert first > 1e-3 and second == pytest.approx(0, abs=1e-6)
