"""Compares a model with its conversion in float64, without a whole certificate."""

import jax
import numpy as np

from xfresearch.language_model import LanguageModel
from xfresearch.models.model_config import ModelConfig
from xfresearch.surgery import CONVERSIONS
from xfresearch.surgery.certificate import BOUND, CONTROL, difference, logits_of
from xfresearch.surgery.network import take_apart
from xfresearch.surgery.running import side_of

LENGTH = 12


def apart(lm: LanguageModel, name: str, layers=None, **options) -> tuple[ModelConfig, float, float]:
    """The converted config, and how far its logits and those of the control are from the model's, relative."""
    before = take_apart(lm.config, lm.params)
    tokens_BL = np.random.default_rng(1).integers(lm.config.vocab_size, size=(2, LENGTH))
    with jax.enable_x64(True):
        sides = [side_of(before)]
        sides += [side_of(CONVERSIONS[name](before, layers, broken=broken, **options)) for broken in (False, True)]
        old, new, control = (logits_of(side.in_dtype("float64"), tokens_BL) for side in sides)
    return sides[1].model, difference(old, new)["relative"], difference(old, control)["relative"]


def assert_exact(lm: LanguageModel, name: str, layers=None, **options) -> ModelConfig:
    """The converted config of an exact conversion whose control differs."""
    model, exact, control = apart(lm, name, layers, **options)
    assert exact <= BOUND, f"{name} differs by {exact:.1e}"
    assert control >= CONTROL, f"the control of {name} differs by {control:.1e} only"
    return model
