"""What `auto` chooses: by platform, memory and depth, in a trace for a GPU that is not here, and what a sweep measures."""

import re
from dataclasses import replace

import jax
import pytest
from jax.sharding import AbstractDevice

from tests.tiny_runs import tiny_config
from xfresearch.kernels import attention, defaults, grouped_matmul
from xfresearch.kernels.defaults import (
    ATTENTION,
    BY_NAME,
    EXPERTS,
    LAYERS,
    LOSS_ROWS,
    TABLES,
    VOCABULARY,
    Setting,
    choose_default,
)
from xfresearch.planning.formula import abstract_mesh
from xfresearch.run_config.resolving import with_vocabulary
from xfresearch.sharding.mesh import AXES
from xfresearch.training import outline
from xfresearch.training.hyperparameters import hyper_of
from xfresearch.training.kernel_choices import choices, kernel_choices
from xfresearch.training.program import Program, batch_shapes

H100 = AbstractDevice("NVIDIA H100 80GB HBM3", num_cores=None, platform="gpu")


def chosen(table, platform: str, **facts):
    return choose_default(table, Setting(platform, **facts)).name


def test_layers_are_unrolled_on_cpu_and_up_to_a_depth_on_a_gpu():
    most = defaults.UNROLLED
    assert [chosen(LAYERS, "gpu", depth=n) for n in (1, most, most + 1)] == ["unroll", "unroll", "scan"]
    assert [chosen(LAYERS, platform, depth=999) for platform in ("cpu", "gpu", "tpu")] == ["unroll", "scan", "scan"]
    assert chosen(LAYERS, "gpu", depth=2, expert_kernel="tokamax") == "scan"


@pytest.mark.parametrize(
    ("gigabytes", "vocabulary", "rows"),
    [(60, 50_257, 4096), (106, 50_257, 8192), (34, 128_256, 1024), (106, 256, 32_768), (0, 9, 4096)],
)
def test_rows_of_the_loss_by_a_gpu_s_memory(gigabytes, vocabulary, rows):
    memory = int(gigabytes * 1e9)
    assert chosen(LOSS_ROWS, "gpu", memory=memory, vocabulary=vocabulary) == rows
    assert not gigabytes or rows * vocabulary * 4 <= memory / defaults.SHARE_OF_LOGITS


def test_nothing_is_padded_but_on_a_gpu():
    assert [chosen(VOCABULARY, platform) for platform in ("cpu", "gpu", "tpu")] == [1, 128, 1]


def test_every_line_says_where_it_was_measured_or_that_it_was_not():
    lines = [line for table in TABLES.values() for line in table]
    assert all(line.where and line.reason and line.measured for line in lines)
    dated = [line for line in lines if re.search(r"20\d\d-\d\d-\d\d", line.measured)]
    assert len(dated) > 5 and defaults.NOT_MEASURED in {line.measured for line in lines}


@pytest.mark.parametrize("table, refusals", [(ATTENTION, attention.REFUSALS), (EXPERTS, grouped_matmul.REFUSALS)])
def test_every_kernel_is_chosen_by_a_line_or_has_a_reason_to_stay(table, refusals):
    chosen = {line.choice for line in table}
    assert refusals.keys() - chosen <= {*BY_NAME, "plain"} and not chosen & BY_NAME.keys()


def test_a_run_on_a_gpu_has_a_padded_vocabulary_and_unrolled_layers():
    """Traced on an abstract H100: products have 384 ids for a vocabulary of 257, and no loop has a layer in it."""
    config = tiny_config()
    config = with_vocabulary(replace(config, model=replace(config.model, vocab_size=257)), 257)
    mesh = abstract_mesh(dict.fromkeys(AXES, 1), H100)
    program = Program(config, mesh)
    text = str(jax.make_jaxpr(program.update)(jax.eval_shape(program.init, hyper_of(config)), batch_shapes(config)))
    products = [line for line in text.splitlines() if "dot_general[" in line]
    assert sum("384" in line for line in products) >= 2 and not any("257" in line for line in products)
    assert {leaf.shape[0] for leaf in jax.tree.leaves(program.shapes["params"]["embed"])} == {257}
    loops = re.findall(r"scan\[.*?length=(\d+)", text, re.S)
    assert set(loops) == {"1"}  # of the loss, whose tokens fit into one chunk
    line = outline.execution_line(config, mesh, kernel_choices(config, mesh))
    assert "; layers: unroll (" in line and "; vocabulary padded to 384 ids (" in line


def test_a_sweep_has_only_values_that_the_config_and_the_device_allow():
    dense, moe = choices(tiny_config()), choices(tiny_config("moe"))
    assert dense["training.layers"] == ("scan", "unroll") and dense["training.remat"] == ("none", "full", "dots")
    assert {"plain", "blocked", "chunked"} <= {*dense["training.attention_kernel"]}
    assert not {"cudnn", "splash", "ring"} & {*dense["training.attention_kernel"]}
    assert "training.loss_rows" not in dense  # 512 tokens: one chunk has them all
    assert "training.expert_kernel" not in dense and {"ragged", "blocked"} <= {*moe["training.expert_kernel"]}
