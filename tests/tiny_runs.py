"""Makes run directories without training: three kinds of models with random parameters."""

from dataclasses import replace
from pathlib import Path

import jax

from xfresearch.checkpoints import store
from xfresearch.data.tokenizers import ByteTokenizer
from xfresearch.loading.language_model import LanguageModel
from xfresearch.models import transformer
from xfresearch.run_config.config_files import parse

ROOT = Path(__file__).parent.parent
CONFIGS = ("gpt2", "all_attention", "moe")


def tiny_config(name: str = "gpt2", **overrides):
    """configs/<name>.py:tiny with overrides (a__b for config.a.b), for the byte tokenizer."""
    arguments = [f"--config.{key.replace('__', '.')}={value}" for key, value in overrides.items()]
    config = parse(["--config", f"{ROOT}/configs/{name}.py:tiny", *arguments])
    return replace(config, model=replace(config.model, vocab_size=257))


def rough_params(model, seed: int = 0) -> dict:
    """Parameters so large that a model's output depends on all of its context."""
    params = transformer.init(model, jax.random.key(seed))
    leaves, structure = jax.tree.flatten(params)
    keys = jax.random.split(jax.random.key(seed + 1), len(leaves))
    noisy = [
        leaf + 0.3 * jax.random.normal(key, leaf.shape, leaf.dtype) for leaf, key in zip(leaves, keys, strict=True)
    ]
    return structure.unflatten(noisy)


def tiny_model(name: str = "gpt2", **overrides) -> LanguageModel:
    config = tiny_config(name, **overrides)
    return LanguageModel(config.model, rough_params(config.model), ByteTokenizer(), config)


def make_run(directory: Path, name: str = "gpt2", steps=(10, 20), **overrides) -> Path:
    """Makes a run's directory with checkpoints of `steps`, each with different parameters."""
    lm = tiny_model(name, **overrides)
    for number, step in enumerate(steps):
        lm.step, lm.params = step, rough_params(lm.config, seed=number)
        if number:
            store.save_params(directory, step, lm.params)
        else:
            lm.save(directory)
    return directory
