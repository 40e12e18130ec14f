"""The kernel of each block's attention: said before tracing, refused by name, and free again for whoever reads the model."""

from dataclasses import replace

import jax
import numpy as np
import pytest
from xfresearch.models.kernel_choices import attention_call, attention_choices, expert_choices

import xfresearch as xf
from tests.contracts.variants import BASE, LENGTH, VARIANTS, change, forward, model, tokens_for
from xfresearch.config.resolving import resolve
from xfresearch.config.run import Config, DataConfig
from xfresearch.data.tokenizers import ByteTokenizer
from xfresearch.errors import UserError
from xfresearch.evaluation import make_scorer
from xfresearch.kernels import attention as face
from xfresearch.language_model import LanguageModel
from xfresearch.models import transformer
from xfresearch.models.model_config import resolve_model

KERNEL = "blocks.main.attention.kernel"


def test_what_is_said_before_tracing_is_what_is_traced(monkeypatch):
    """Of every variant with an attention of its own."""
    traced, seen, choose = [], set(), face.choose_attention
    monkeypatch.setattr(face, "choose_attention", lambda call, *a: traced.append(call) or choose(call, *a))
    for config in VARIANTS.values():
        blocks = [block for block in config.blocks.values() if block.attention.kind == "softmax"]
        new = {(config.width, block.attention) for block in blocks} - seen
        if not new:
            continue
        seen |= new
        expected = {attention_call(config, block, LENGTH, segments=True) for block in blocks}
        traced.clear()
        ids = np.ones((2, LENGTH), np.int32)
        jax.eval_shape(
            lambda params, config=config, ids=ids: forward(config, params, tokens_for(config), "scan", segments_BL=ids),
            transformer.abstract(config),
        )
        assert set(traced) == expected
    assert len(seen) > 10


def run_of(kernel: str) -> Config:
    model = resolve_model(replace(change(BASE, KERNEL, kernel), vocab_size=257))
    return resolve(Config(model=model, sequence_length=32, data=DataConfig(packing="documents")))


def test_a_kernel_that_cannot_serve_is_named_with_its_key():
    reason = "config.model.blocks.main.attention.kernel='splash' is not allowed here: it is for TPU, this is cpu"
    with pytest.raises(UserError, match=reason):
        attention_choices(run_of("splash"))
    assert attention_choices(run_of("auto"))["main"].name == "blocked"
    assert attention_choices(run_of("plain"))["main"] == ("plain", "asked for")


def test_products_of_experts_are_chosen_by_block():
    moe = "blocks.main.feed_forward.moe."

    def chosen(**options):
        options = {
            "blocks.main.feed_forward.kind": "moe",
            "vocab_size": 257,
            **{moe + k: v for k, v in options.items()},
        }
        config = resolve(Config(model=model(options), sequence_length=32))
        return expert_choices(config)["main"].name

    assert chosen() == "blocked" and chosen(kernel="ragged") == "ragged" and chosen(capacity=1.0) == "blocked"
    with pytest.raises(
        UserError, match="blocks.main.feed_forward.moe.kernel='megablox' is not allowed here: it is for TPU"
    ):
        chosen(kernel="megablox")
    assert expert_choices(run_of("auto")) == {}


def test_a_run_trained_with_a_kernel_of_another_machine_is_read_here(tmp_path):
    config = run_of("cudnn")
    params = transformer.init(config.model, jax.random.key(0))
    LanguageModel(config.model, params, ByteTokenizer(), config).save(tmp_path / "run")
    lm = xf.load(tmp_path / "run")
    assert lm.run.model == config.model and lm.config == change(config.model, KERNEL, "auto")
    tokens = np.arange(12).reshape(1, 12)
    assert lm(tokens).shape == (1, 12, 257)
    assert lm.capture(tokens, "blocks.0.attention.weights")
    assert isinstance(lm.generate("def", max_new_tokens=2), str)
    batch = {name: np.ones((1, 12), np.int32) for name in ("tokens", "targets", "positions", "segments", "weights")}
    nll_BL, _ = make_scorer(config.model)(params, batch)
    assert np.isfinite(nll_BL).all()
