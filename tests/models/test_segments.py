"""Packed documents: each is what it is alone, its positions, attention and auxiliary losses included."""

import jax
import numpy as np
import pytest

from tests.contracts.variants import NAMED, VARIANTS, forward, in_float64, marked, plain, random_params, tokens_for
from tests.models import reference
from tests.tolerances import TOLERANCE, relative_error

FIRST, SECOND, PADDING = 5, 7, 4
MODELS = {f"configs/{name}.py": config for name, config in NAMED.items()} | {
    name: VARIANTS[name] for name in ("pattern", "position=sinusoidal", "positions=learned+rope")
}


def packed(config):
    """One sequence of two documents and padding: tokens, positions and segments [1, L]."""
    tokens_BL = tokens_for(config, 1, FIRST + SECOND + PADDING)
    positions = [*range(FIRST), *range(SECOND), *[0] * PADDING]
    segments = [1] * FIRST + [2] * SECOND + [0] * PADDING
    return tokens_BL, np.array([positions]), np.array([segments], np.int32)


def _fast() -> list:
    """Kernels are compared by test_kernels.py: here every day in one model of each kind."""
    here = [f"configs/{name}.py" for name in ("gpt2", "moe", "all_attention")]
    return [pytest.param(case.values[0], "auto", marks=case.marks) for case in marked(here, MODELS)]


@pytest.mark.parametrize("name, kernel", [*((name, "plain") for name in MODELS), *_fast()])
def test_packed_documents_are_each_alone(name, kernel, x64):
    config = in_float64(MODELS[name])
    config = plain(config) if kernel == "plain" else config
    params, (tokens_BL, positions_BL, segments_BL) = random_params(config), packed(config)
    run = jax.jit(
        lambda tokens_BL, positions_BL, segments_BL: forward(
            config, params, tokens_BL, positions_BL=positions_BL, segments_BL=segments_BL
        )
    )
    logits, losses = run(tokens_BL, positions_BL, segments_BL)
    numpy_params = jax.tree.map(np.asarray, params)
    for start, end in [(0, FIRST), (FIRST, FIRST + SECOND)]:
        alone, _ = reference.model(config, numpy_params, tokens_BL[0, start:end])
        assert relative_error(logits[0, start:end], alone) < TOLERANCE["float64"]
    _, expected = reference.model(config, numpy_params, tokens_BL[0], positions_BL[0], segments_BL[0])
    for loss, value in expected.items():
        assert relative_error(losses[loss], np.array([value])) < TOLERANCE["float64"], loss


def test_padding_adds_nothing_to_auxiliary_losses(x64):
    config = in_float64(plain(NAMED["moe"]))
    params, (tokens_BL, positions_BL, segments_BL) = random_params(config), packed(config)
    changed_BL = np.where(segments_BL == 0, (tokens_BL + 1) % config.vocab_size, tokens_BL)
    run = jax.jit(
        lambda tokens_BL: forward(config, params, tokens_BL, positions_BL=positions_BL, segments_BL=segments_BL)[1]
    )
    losses, changed = run(tokens_BL), run(changed_BL)
    for name, value in losses.items():
        assert float(value[0]) == float(changed[name][0]) != 0


def test_a_sequence_of_padding_alone_is_finite():
    config = NAMED["moe"]
    padding_BL, params = np.zeros((2, 8), np.int32), random_params(config)
    logits, losses = jax.jit(lambda tokens_BL: forward(config, params, tokens_BL, segments_BL=padding_BL))(
        tokens_for(config)
    )
    assert np.isfinite(logits).all()
    assert all((value == 0).all() for value in losses.values())
