"""The kernels of each block: known before tracing, errors for unsupported ones, chosen again when a run is loaded."""

from functools import partial

import jax
import numpy as np
import pytest

import xfresearch as xf
from tests.contracts.passes import forward
from tests.contracts.variants import LENGTH, VARIANTS, model, tokens_for
from xfresearch.data.tokenizers import ByteTokenizer
from xfresearch.evaluation.losses import make_scorer
from xfresearch.kernels import attention as attention_kernels
from xfresearch.loading.language_model import LanguageModel
from xfresearch.models import transformer
from xfresearch.models.context import Execution
from xfresearch.models.mixers.softmax.attention import training_call
from xfresearch.models.mixers.softmax.config import SoftmaxConfig
from xfresearch.models.place import Rows
from xfresearch.options.run_options import DataConfig, TrainingConfig
from xfresearch.run_config.config import Config
from xfresearch.run_config.resolving import resolve
from xfresearch.runtime.errors import UserError
from xfresearch.training.kernel_choices import kernel_choices


def test_the_call_described_before_tracing_equals_the_traced_call(monkeypatch):
    """For every variant whose attention no earlier variant has."""
    traced = []
    seen = set()
    choose = attention_kernels.choose_attention
    monkeypatch.setattr(attention_kernels, "choose_attention", lambda call, *a: traced.append(call) or choose(call, *a))
    for config in VARIANTS.values():
        places = [place for _, _, place in config.places() if isinstance(place.options, SoftmaxConfig)]
        new = {(config.width, place.options) for place in places} - seen
        if not new:
            continue
        seen |= new
        expected = {training_call(place, LENGTH, Rows(segments=True)) for place in places}
        traced.clear()
        ids = np.ones((2, LENGTH), np.int32)
        context = {"segments_BL": ids, "execution": Execution()}
        run = partial(forward, config, tokens_BL=tokens_for(config), layers="scan", **context)
        jax.eval_shape(run, transformer.abstract(config))
        assert set(traced) == expected
    assert len(seen) > 10


def run_of(kernel: str = "auto", experts: str = "auto", **changes) -> Config:
    training = TrainingConfig(attention_kernel=kernel, expert_kernel=experts)
    data = DataConfig(packing="documents")
    return resolve(Config(model=model(changes | {"vocab_size": 257}), sequence_length=32, data=data, training=training))


def test_the_error_for_an_unsupported_kernel_names_its_key():
    reason = "config.training.attention_kernel='splash' is not allowed here: it needs a TPU, and the platform is cpu"
    with pytest.raises(UserError, match=reason):
        kernel_choices(run_of("splash"))
    assert kernel_choices(run_of("auto"))["main", "attention"].name == "plain"
    assert kernel_choices(run_of("blocked"))["main", "attention"] == ("blocked", "selected by name")
    assert kernel_choices(run_of("auto")).keys() == {("main", "attention")}


def test_expert_kernels_are_chosen_for_each_block():
    def chosen(kernel: str = "auto", **options):
        options = {f"blocks.main.feed_forward.moe.{name}": value for name, value in options.items()}
        run = run_of(experts=kernel, **{"blocks.main.feed_forward.kind": "moe", **options})
        return kernel_choices(run)["main", "feed_forward"].name

    assert chosen() == "blocked" and chosen("ragged") == "ragged" and chosen(capacity=1.0) == "blocked"
    with pytest.raises(UserError, match="training.expert_kernel='megablox' is not allowed here: it needs a TPU"):
        chosen("megablox")


def test_a_run_trained_with_a_kernel_of_another_machine_can_be_loaded(tmp_path):
    config = run_of("cudnn")
    params = transformer.init(config.model, jax.random.key(0))
    LanguageModel(config.model, params, ByteTokenizer(), config).save(tmp_path / "run")
    lm = xf.load(tmp_path / "run")
    assert lm.run == config and lm.config == config.model
    tokens = np.arange(12).reshape(1, 12)
    assert lm(tokens).shape == (1, 12, 257)
    assert lm.capture(tokens, "blocks.0.attention.weights")
    assert isinstance(lm.generate("def", max_new_tokens=2), str)
    batch = {name: np.ones((1, 12), np.int32) for name in ("tokens", "targets", "positions", "segments", "weights")}
    nll_BL, _ = make_scorer(config.model)(params, batch)
    assert np.isfinite(nll_BL).all()
