"""Compares a model with its conversion in float64, without a whole certificate."""

import jax
import numpy as np
import pytest

from tests.tiny_runs import tiny_model
from xfresearch.loading.language_model import LanguageModel
from xfresearch.models import transformer
from xfresearch.models.model_config import ModelConfig
from xfresearch.surgery import CONVERSIONS
from xfresearch.surgery.certificate import BOUND, CONTROL, difference
from xfresearch.surgery.layerwise import Runner
from xfresearch.surgery.network import Network, assemble, take_apart
from xfresearch.surgery.refused import Refused

LENGTH = 8
ATTENTION = "model__blocks__main__attention__"


def changed(name: str = "gpt2", **options) -> LanguageModel:
    """A tiny model with other options of attention."""
    return tiny_model(name, **{ATTENTION + key: value for key, value in options.items()})


def logits(network: Network) -> np.ndarray:
    """The network's logits in float64 for random tokens, and a random source if it has an encoder."""
    random = np.random.default_rng(1)
    tokens_BL = random.integers(network.model.vocab_size, size=(2, LENGTH))
    source_BS = random.integers(network.model.vocab_size, size=(2, LENGTH - 2)) if network.encoder else None
    with jax.enable_x64(True):
        return Runner(network, "float64").run(tokens_BL, source_BS=source_BS).logits_BLV


def apart(lm: LanguageModel, name: str, layers=None, **options) -> tuple[ModelConfig, float, float]:
    """The converted config, and how far its logits and those of the control are from the model's, relative."""
    before = take_apart(lm.config, lm.params)
    after, control = (CONVERSIONS[name](before, layers, broken=broken, **options) for broken in (False, True))
    model, params = assemble(after, "float32")
    assert jax.tree.structure(params) == jax.tree.structure(transformer.abstract(model))
    old, new, wrong = map(logits, (before, after, control))
    return model, difference(old, new)["relative"], difference(old, wrong)["relative"]


def assert_exact(lm: LanguageModel, name: str, layers=None, **options) -> ModelConfig:
    """The converted config of an exact conversion whose control differs."""
    model, exact, control = apart(lm, name, layers, **options)
    assert exact <= BOUND, f"{name} differs by {exact:.1e}"
    assert control >= CONTROL, f"the control of {name} differs by {control:.1e} only"
    return model


def assert_refused(lm: LanguageModel, name: str, reason: str, **options) -> None:
    """A conversion refuses the model. `reason` is the pattern of the message after the conversion's name."""
    with pytest.raises(Refused, match=f"^{name}: {reason}"):
        CONVERSIONS[name](take_apart(lm.config, lm.params), **options)
