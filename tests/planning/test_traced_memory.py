"""Memory of an update: what layers keep for the backward pass, and a plan's figure against the compiled program's."""

import re
from collections import Counter
from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest

from tests.contracts.variants import ROOT
from tests.daily import daily
from xfresearch.planning import accounting, compiling, formula, traced_memory
from xfresearch.run_config.config_files import parse

ALONE = {"data": 1, "fsdp": 1, "expert": 1, "tensor": 1, "context": 1}


@pytest.mark.parametrize(
    "name, hidden, stream",
    [("gpt2", 2, 5), ("llama", 3, 5), ("gptj", 2, 3), ("dyt", 3, 5), ("no_query", 2, 5)],
)
def test_scanned_layers_keep_the_operands_of_products_and_of_norms(name, hidden, stream):
    """Arrays [B, L, F]: what the activation reads and what W_down reads; a gated activation reads two. [B, L, D]: what each
    of two norms reads and returns, and the heads. No value between them, and nothing in float32."""
    overrides = ["--config.model.vocab_size=264", "--config.model.dtype=bfloat16", "--config.sequence_length=48"]
    config = compiling.prepare(parse(["--config", f"{ROOT}/configs/{name}.py:tiny", *overrides]))
    shapes = [shape for _, shape, _ in formula.estimate_step(config, ALONE).kept]
    kept = [re.fullmatch(r"8 x (\w+)\[2, (?:1, )?48, (\d+)\]", shape) for shape in shapes]
    counted = Counter((actual[1], int(actual[2])) for actual in kept if actual and actual[2] != "1")
    F = config.model.blocks["main"].feed_forward.hidden
    assert counted == {("bfloat16", F): hidden, ("bfloat16", config.model.width): stream}


@pytest.mark.parametrize("case", daily(accounting.CASES[::12], accounting.CASES), ids=lambda case: case.name)
def test_the_memory_of_a_plan_is_that_of_the_compiled_update(case):
    accounted, compiled = accounting.compare(case)
    assert abs(accounted / compiled - 1) <= accounting.WITHIN


def test_a_plan_of_one_device_counts_weights_of_attention_if_no_kernel_fuses_them():
    overrides = ["--config.model.vocab_size=264", "--config.sequence_length=256"]
    config = compiling.prepare(parse(["--config", f"{ROOT}/configs/gpt2.py:tiny", *overrides]))
    plain = replace(config, training=replace(config.training, attention_kernel="plain"))
    fused, whole = (sum(formula.estimate_step(each, ALONE).memory.values()) for each in (config, plain))
    assert whole - fused >= 2 * 8 * 4 * 256 * 256 * 4  # layers, sequences, heads, in float32


def test_weights_of_layers_in_bfloat16_are_kept_once_whatever_the_batch():
    overrides = ["--config.model.vocab_size=264", "--config.model.dtype=bfloat16"]
    kept = {}
    for batch in (8, 16):
        name = f"{ROOT}/configs/llama.py:tiny"
        config = compiling.prepare(parse(["--config", name, *overrides, f"--config.batch_size={batch}"]))
        rows = formula.estimate_step(config, ALONE).kept
        weights = sum(size for name, _, size in rows if name == traced_memory.WEIGHTS)
        kept[batch] = weights, sum(size for _, _, size in rows) - weights
    kernels = 2 * (4 * 32 * 32 + 3 * 32 * config.model.blocks["main"].feed_forward.hidden)  # of two layers
    assert kept[8][0] == kept[16][0] == 2 * kernels and kept[16][1] == 2 * kept[8][1]


def peak(function, *shapes, **options) -> float:
    return traced_memory.peak(jax.make_jaxpr(function)(*map(jnp.zeros, shapes)).jaxpr, **options)


def test_a_costly_value_that_several_operations_read_is_stored():
    """The sigmoid of a product, beside the product itself; a sum is computed again by each that reads it."""

    def products(of):
        return lambda x, w: [(value * x @ w, (value + x) @ w) for x in [x @ w] for value in [of(x)]]

    held = {of: peak(products(of), (64, 32), (32, 32)) for of in (jax.nn.sigmoid, jnp.negative)}
    assert held[jax.nn.sigmoid] - held[jnp.negative] == 64 * 32 * 4


def test_a_product_of_groups_of_rows_holds_copies_of_the_rows_for_each_group():
    def product(rows, matrices):
        return jax.lax.ragged_dot(rows, matrices, jnp.array([40, 24]))

    def gradient(rows, matrices):
        return jax.grad(lambda w: product(rows, w).sum())(matrices)

    shapes = (64, 32), (2, 32, 64)
    copied = [peak(each, *shapes, copies=True) - peak(each, *shapes) for each in (product, gradient)]
    rows, results = 64 * 32 * 4, 64 * 64 * 4
    assert copied == [2 * 2 * rows, 2 * (rows + results)]
