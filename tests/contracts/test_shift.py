"""A model without absolute positions computes the same wherever its text stands: logits, and what its slots answer."""

import numpy as np
import pytest

from tests.contracts.variants import ALL, forward, in_float64, random_params, tokens_for
from tests.tolerances import TOLERANCE, relative_error
from xfresearch.models.layers import layers
from xfresearch.models.mixers.memory import softmax_slots
from xfresearch.models.taps import Taps

SHIFT = 17


def reads_positions(config) -> bool:
    """Whether positions enter, and not through a table of the model's: RoPE. Other kinds count tokens back."""
    rotated = any(getattr(block.attention, "position", "none") == "rope" for block in config.blocks.values())
    return config.position == "none" and rotated


def in_softmax(block) -> int:
    """Slots of a block's attention that are in its softmax."""
    return softmax_slots(block.attention) if hasattr(block.attention, "memory_slots") else 0


SHIFTED = [name for name, config in ALL.items() if reads_positions(config)]


@pytest.mark.parametrize("name", SHIFTED)
def test_a_shifted_text_gives_the_same_logits_and_coefficients(name, x64):
    config = in_float64(ALL[name])
    params, tokens_BL, found = random_params(config), tokens_for(config), []
    slots = [layer.number for layer in layers(config) if in_softmax(config.blocks[layer.block])]
    for shift in (0, SHIFT):
        taps = Taps(record=[f"blocks.{i}.attention.coefficients" for i in slots])
        positions_BL = np.broadcast_to(shift + np.arange(tokens_BL.shape[1]), tokens_BL.shape)
        logits, _ = forward(config, params, tokens_BL, positions_BL=positions_BL, taps=taps)
        found.append([logits, *taps.values.values()])
    assert len(found[0]) == 1 + len(slots)
    for first, shifted in zip(*found, strict=True):
        assert relative_error(shifted, first) < TOLERANCE["float64"]


def test_slots_under_rope_are_among_them():
    with_slots = {name for name in SHIFTED for block in ALL[name].blocks.values() if in_softmax(block)}
    assert {"configs/all_attention.py", "attention.position=rope+slots"} <= with_slots
