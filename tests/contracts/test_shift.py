"""In a model without absolute positions, shifting all positions changes neither logits nor slot coefficients."""

import numpy as np
import pytest

from tests.contracts.passes import run
from tests.contracts.variants import ALL, in_float64, random_params, tokens_for
from tests.tolerances import TOLERANCE, relative_error
from xfresearch.models.layers import layers
from xfresearch.models.mixers.memory_slots import softmax_slots
from xfresearch.models.taps import captured

SHIFT = 17


def reads_positions(config) -> bool:
    """Whether the model reads positions and only through RoPE. Relative positions count tokens instead."""
    rotated = any(getattr(block.attention, "position", "none") == "rope" for block in config.blocks.values())
    return config.position == "none" and rotated


def slots_in_softmax(block) -> int:
    """The number of slots in the softmax of a block's attention."""
    return softmax_slots(block.attention) if hasattr(block.attention, "memory_slots") else 0


SHIFTED = [name for name, config in ALL.items() if reads_positions(config)]


@pytest.mark.parametrize("name", SHIFTED)
def test_a_shifted_text_gives_the_same_logits_and_coefficients(name, x64):
    config = in_float64(ALL[name])
    params = random_params(config)
    tokens_BL = tokens_for(config)
    collected = []
    slots = [layer.number for layer in layers(config) if slots_in_softmax(config.blocks[layer.block])]
    for shift in (0, SHIFT):
        names = [f"blocks.{i}.attention.coefficients" for i in slots]
        positions_BL = np.broadcast_to(shift + np.arange(tokens_BL.shape[1]), tokens_BL.shape)
        model, out = run(config, params, tokens_BL, positions_BL=positions_BL, record=names)
        collected.append([model.logits(out.hidden_BLD), *captured(config, out.captures, names).values()])
    assert len(collected[0]) == 1 + len(slots)
    for first, shifted in zip(*collected, strict=True):
        assert relative_error(shifted, first) < TOLERANCE["float64"]


def test_some_shifted_variants_have_slots():
    with_slots = {name for name in SHIFTED for block in ALL[name].blocks.values() if slots_in_softmax(block)}
    assert {"configs/all_attention.py", "attention.position=rope+slots"} <= with_slots
