"""Properties of random configs: each can be built, counted, trained, saved and loaded, and is causal.

A config is drawn by changing any number of options of the base, with different blocks in a pattern. Changes that the
config's checks refuse are skipped, so every drawn config is valid. Numbers have a few values each. For models that are
not causal see tests/models/test_bidirectional.py.
"""

import tempfile
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

import xfresearch as xf
from tests.contracts.passes import forward
from tests.contracts.variants import BASE, change, choices, fields, get, model, needed
from tests.training.test_step import make_batch
from xfresearch.data.tokenizers import ByteTokenizer
from xfresearch.models import transformer
from xfresearch.models.model_config import resolve_model
from xfresearch.options.run_options import OptimizerConfig
from xfresearch.run_config.closed_form import costs
from xfresearch.run_config.config import Config
from xfresearch.run_config.resolving import resolve
from xfresearch.runtime.errors import UserError
from xfresearch.training.hyperparameters import hyper_of
from xfresearch.training.program import Program

LENGTH, BATCH, VOCAB = 8, 2, 257
SMALL = replace(BASE, vocab_size=VOCAB, max_length=LENGTH)
SMALL = change(SMALL, "blocks.main.feed_forward.hidden", 0)  # a size that is valid in every layout
FIELDS = {path: [get(model(needed(path, None)), path), *values] for path, values in choices().items()} | {
    "blocks.main.attention.memory_slots": [0, 1, 5],
    "blocks.main.attention.heads": [1, 2, 4],
    "blocks.main.attention.dropout": [0.0, 0.1],
    "blocks.main.attention.span_ramp": [32, 3],
    "blocks.main.feed_forward.hidden": [0, 24],
    "blocks.main.feed_forward[moe].moe.jitter": [0.0, 0.1],
    "dtype": ["float32", "bfloat16"],
    **{path: ["", "rms", "none"] for path in fields() if ".norms." in path and path.endswith(".kind")},
    "blocks.main.feed_forward[moe].moe.experts": [1, 4, 8],
}
OF_BLOCK = {path: values for path, values in FIELDS.items() if path.startswith("blocks.main.")}
OF_MODEL = {path: values for path, values in FIELDS.items() if not path.startswith("blocks.main.")}
PATTERNS = [("a",), ("a", "b"), ("b", "a", "b")]


def changes(fields: dict):
    pairs = [(path, value) for path, values in fields.items() for value in values]
    return st.lists(st.sampled_from(pairs), max_size=len(fields), unique_by=lambda pair: pair[0])


def applied(config, drawn, check):
    """`config` with the drawn changes, without those that would make it invalid."""
    for path, value in drawn:
        try:
            changed = change(config, path, value)
            check(changed)
        except UserError:
            continue
        config = changed
    return config


@st.composite
def models(draw):
    small = replace(SMALL, final_norm=draw(st.sampled_from(["layer", "none"])))  # post-norm requires "none"
    blocks = {}
    for name in ("a", "b"):
        blocks[name] = applied(small, draw(changes(OF_BLOCK)), resolve_model).blocks["main"]
    pattern = draw(st.sampled_from(PATTERNS))
    config = replace(small, pattern=pattern, depth=len(pattern), blocks={name: blocks[name] for name in set(pattern)})
    try:
        resolve_model(config)
    except UserError:  # two blocks that cannot share a table of positions
        config = replace(config, pattern=("a",), depth=2, blocks={"a": blocks["a"]})
    return resolve_model(applied(config, draw(changes(OF_MODEL)), resolve_model))


def check(config):
    run = resolve(
        Config(model=config, steps=2, batch_size=BATCH, sequence_length=LENGTH, optimizer=OptimizerConfig(warmup=0))
    )
    program = Program(run)
    batch = make_batch([LENGTH] * BATCH, V=VOCAB)
    tokens_BL = jnp.asarray(batch["tokens"])
    others_BL = tokens_BL.at[:, LENGTH // 2 :].set((tokens_BL[:, LENGTH // 2 :] + 1) % VOCAB)

    @jax.jit
    def everything(batch, tokens_BL, others_BL):
        state = program.init(hyper_of(run))
        new, metrics = program.update(state, batch)
        params = new["params"]
        # One program for both: two copies of it may round differently.
        logits = jax.lax.map(lambda t: forward(config, params, t, "scan")[0], jnp.stack([tokens_BL, others_BL]))
        return state["params"], params, metrics, logits

    before, params, metrics, (logits_BLV, others_BLV) = everything(batch, tokens_BL, others_BL)
    assert costs(config).parameters == sum(leaf.size for leaf in jax.tree.leaves(params))
    assert jnp.isfinite(metrics["loss"]) and jnp.isfinite(metrics["gradient_norm"])
    assert all(jnp.isfinite(leaf).all() for leaf in jax.tree.leaves(params))
    assert any((a != b).any() for a, b in zip(jax.tree.leaves(params), jax.tree.leaves(before), strict=True))
    np.testing.assert_array_equal(logits_BLV[:, : LENGTH // 2], others_BLV[:, : LENGTH // 2])
    assert not np.array_equal(logits_BLV, others_BLV)
    assert jax.tree.structure(params) == jax.tree.structure(transformer.abstract(config))
    with tempfile.TemporaryDirectory() as directory:
        xf.LanguageModel(config, params, ByteTokenizer(), run).save(f"{directory}/run")
        loaded = xf.load(f"{directory}/run")
        assert loaded.config == config
        jax.tree.map(np.testing.assert_array_equal, loaded.params, params)


COMMON = {"deadline": None, "suppress_health_check": list(HealthCheck), "phases": [Phase.explicit, Phase.generate]}


@settings(max_examples=2, derandomize=True, **COMMON)
@given(models())
def test_every_valid_config_works(config):
    check(config)


@pytest.mark.long
@settings(max_examples=200, print_blob=True, **COMMON)
@given(models())
def test_two_hundred_more_configs(config):
    check(config)
