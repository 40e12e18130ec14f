"""A packed document has the same logits as alone; its positions, attention and auxiliary losses are separate."""

import jax
import numpy as np
import pytest

from tests.contracts.passes import PLAIN, forward
from tests.contracts.variants import KINDS, NAMED, VARIANTS, in_float64, marked, random_params, tokens_for
from tests.reference import model as reference
from tests.tolerances import TOLERANCE, relative_error
from xfresearch.models.context import AUTO

FIRST, SECOND, PADDING = 5, 7, 4
MODELS = {f"configs/{name}.py": config for name, config in NAMED.items()} | {
    name: VARIANTS[name] for name in ("pattern", "position=sinusoidal", "positions=learned+rope")
}
MODELS |= {f"attention.kind={kind}": VARIANTS[f"attention.kind={kind}"] for kind in KINDS["attention"]}


# The other named configs have sublayers and positions of these.
DEFAULT_RUN = [name for name in MODELS if not name.startswith("configs/")]
DEFAULT_RUN += [f"configs/{name}.py" for name in ("gpt2", "llama", "moe", "all_attention", "vanilla_2017_decoder")]


def packed(config):
    """One sequence of two documents and padding: tokens, positions and segments [1, L]."""
    tokens_BL = tokens_for(config, 1, FIRST + SECOND + PADDING)
    positions = [*range(FIRST), *range(SECOND), *[0] * PADDING]
    segments = [1] * FIRST + [2] * SECOND + [0] * PADDING
    return tokens_BL, np.array([positions]), np.array([segments], np.int32)


def _cases() -> list:
    """Models with plain kernels, and with the fast ones a model of each kind (test_kernels.py compares kernels)."""
    fast = marked([f"configs/{name}.py" for name in ("gpt2", "moe", "all_attention")], MODELS)
    plain = marked(DEFAULT_RUN, MODELS)
    return [
        pytest.param(*case.values, kernels, marks=case.marks, id=f"{case.values[0]}-{name}")
        for cases, kernels, name in ((plain, PLAIN, "plain"), (fast, AUTO, "auto"))
        for case in cases
    ]


@pytest.mark.parametrize("name, execution", _cases())
def test_a_packed_document_has_the_same_logits_as_alone(name, execution, x64):
    config = in_float64(MODELS[name])
    params = random_params(config)
    tokens_BL, positions_BL, segments_BL = packed(config)
    run = jax.jit(
        lambda tokens_BL, positions_BL, segments_BL: forward(
            config, params, tokens_BL, positions_BL=positions_BL, segments_BL=segments_BL, execution=execution
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


def test_padding_does_not_change_auxiliary_losses(x64):
    config = in_float64(NAMED["moe"])
    params = random_params(config)
    tokens_BL, positions_BL, segments_BL = packed(config)
    changed_BL = np.where(segments_BL == 0, (tokens_BL + 1) % config.vocab_size, tokens_BL)
    run = jax.jit(
        lambda tokens_BL: forward(config, params, tokens_BL, positions_BL=positions_BL, segments_BL=segments_BL)[1]
    )
    losses, changed = run(tokens_BL), run(changed_BL)
    for name, value in losses.items():
        assert float(value[0]) == float(changed[name][0]) != 0


def test_logits_and_losses_of_a_sequence_of_padding_are_finite():
    config = NAMED["moe"]
    padding_BL = np.zeros((2, 8), np.int32)
    params = random_params(config)
    logits, losses = jax.jit(lambda tokens_BL: forward(config, params, tokens_BL, segments_BL=padding_BL))(
        tokens_for(config)
    )
    assert np.isfinite(logits).all()
    assert all((value == 0).all() for value in losses.values())
