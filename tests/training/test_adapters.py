"""Training an adapter of a trained model: the base keeps every bit, and the run is one like others."""

import shutil

import jax
import numpy as np
import pytest

import xfresearch as xf
from tests.tiny_runs import make_run
from tests.training.test_pretrained import FILE, loaded
from tests.training.test_step import make_batch, make_config, run_steps
from tests.training.test_trainable import size, training
from xfresearch.checkpoints import store
from xfresearch.models.adapters import Lora
from xfresearch.options.fields import with_values
from xfresearch.runtime.errors import UserError
from xfresearch.runtime.trees import by_path
from xfresearch.train import main as train_main
from xfresearch.training import pretrained
from xfresearch.training.program import Program
from xfresearch.training.step import init_params

LORA = "--config.model.adapter.kind=lora"


def adapted(*patterns: str):
    config = training(make_config(), *patterns, weight_decay=0.5)
    return with_values(config, {"model": with_values(config.model, {"adapter": Lora()})})


@pytest.mark.parametrize("patterns", [(), ("*norm*",)])
def test_adapters_are_trained_and_of_the_base_what_a_pattern_names(patterns):
    config = adapted(*patterns)
    before = by_path(init_params(config, config.seed))
    state, _ = run_steps(config, [make_batch([8] * 8, seed) for seed in range(3)])
    changed = {path for path, leaf in by_path(state["params"]).items() if not np.array_equal(leaf, before[path])}
    trained = {path for path in before if "_adapter/" in path or patterns and "norm" in path}
    assert changed == trained
    assert size(Program(config).shapes["opt"]) == 2 * sum(before[path].size for path in trained) + 1  # Adam's counter


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return make_run(tmp_path_factory.mktemp("base") / "a")


def test_a_run_from_a_base_has_its_parameters_and_new_adapters(base):
    config, params, _ = loaded(base, LORA, "--config.model.adapter.rank=2")
    lm, new = xf.load(base), by_path(init_params(config, config.seed))
    old = by_path(lm.params)
    for path, leaf in by_path(params).items():
        np.testing.assert_array_equal(leaf, old[path] if path in old else new[path])
    assert {path for path in new if "_adapter/" in path} == by_path(params).keys() - old.keys()
    np.testing.assert_array_equal(lm.with_params(params).params["embed"]["table"], lm.params["embed"]["table"])


def test_an_adapter_without_a_base_is_refused():
    with pytest.raises(UserError, match="config.model.adapter.kind='lora' is not allowed: it must be 'none' without"):
        pretrained.parse([FILE, LORA])


def test_a_run_resumes_bit_for_bit_and_starts_another_one(base, tmp_path):
    """Killed after its first checkpoint, which is all that is left of it."""
    small = ["--config.steps=4", "--config.checkpoint.every=2", "--config.evaluation.every=0", "--config.log.tracker=jsonl"]
    corpus = tmp_path / "text.txt"
    corpus.write_text("one two three four five six seven. " * 200)
    data = [f"--config.data.corpus=('text_files:{corpus}',)", f"--config.data.cache_dir={tmp_path / 'cache'}"]

    def train(name: str):
        train_main([FILE, f"--config.start.path={base}", LORA, f"--workdir={tmp_path / name}", *small, *data])
        return by_path(xf.load(tmp_path / name).params)

    whole = train("whole")
    shutil.copytree(tmp_path / "whole", tmp_path / "killed")
    shutil.rmtree(store.folder_of(tmp_path / "killed", 4))
    resumed, old = train("killed"), by_path(xf.load(base).params)
    for path, leaf in whole.items():
        np.testing.assert_array_equal(resumed[path], leaf)
        assert path not in old or np.array_equal(leaf, old[path])
    with pytest.raises(UserError, match="config.model.adapter.rank=4 is not allowed: it must be 8 to start from"):
        loaded(tmp_path / "whole", "--config.model.adapter.rank=4")
    jax.tree.map(np.testing.assert_array_equal, loaded(tmp_path / "whole")[1], xf.load(tmp_path / "whole").params)
