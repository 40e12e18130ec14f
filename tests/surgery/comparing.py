"""Compares a model with its conversion in float64, without a whole certificate."""

import jax
import numpy as np

from xfresearch.language_model import LanguageModel
from xfresearch.models import transformer
from xfresearch.models.model_config import ModelConfig
from xfresearch.surgery import CONVERSIONS
from xfresearch.surgery.certificate import BOUND, CONTROL, difference
from xfresearch.surgery.layerwise import Runner
from xfresearch.surgery.network import assemble, take_apart

LENGTH = 12


def apart(lm: LanguageModel, name: str, layers=None, **options) -> tuple[ModelConfig, float, float]:
    """The converted config, and how far its logits and those of the control are from the model's, relative."""
    before = take_apart(lm.config, lm.params)
    tokens_BL = np.random.default_rng(1).integers(lm.config.vocab_size, size=(2, LENGTH))
    networks = [before, *(CONVERSIONS[name](before, layers, broken=broken, **options) for broken in (False, True))]
    with jax.enable_x64(True):
        old, new, control = (Runner(network, "float64").run(tokens_BL).logits_BLV for network in networks)
    model, params = assemble(networks[1], "float32")
    assert jax.tree.structure(params) == jax.tree.structure(transformer.abstract(model))
    return model, difference(old, new)["relative"], difference(old, control)["relative"]


def assert_exact(lm: LanguageModel, name: str, layers=None, **options) -> ModelConfig:
    """The converted config of an exact conversion whose control differs."""
    model, exact, control = apart(lm, name, layers, **options)
    assert exact <= BOUND, f"{name} differs by {exact:.1e}"
    assert control >= CONTROL, f"the control of {name} differs by {control:.1e} only"
    return model
