"""Contract 4: the closed forms of the costs equal the counts in the parameters, the program and the cache."""

import jax
import numpy as np
import pytest

from tests.blocks import block
from tests.contracts.passes import forward
from tests.contracts.variants import ALL, BATCH, DISTINCT, LENGTH, ROOT
from xfresearch.models import transformer
from xfresearch.models.counting import count_flops
from xfresearch.models.layers import stacks
from xfresearch.models.model_config import ModelConfig
from xfresearch.run_config.closed_form import costs
from xfresearch.run_config.config_files import parse


def sizes(tree) -> int:
    return sum(leaf.size for leaf in jax.tree.leaves(tree))


@pytest.mark.parametrize("name", ALL)
def test_parameters_equal_the_size_of_the_tree(name):
    assert costs(ALL[name]).parameters == sizes(transformer.abstract(ALL[name]))


@pytest.mark.parametrize("name", ALL)
def test_active_parameters_exclude_unused_experts(name):
    config = ALL[name]
    idle = 0
    for stack in stacks(config):
        experts = transformer.abstract(config)["blocks"][stack.name].get("feed_forward", {}).get("experts", {})
        if experts:
            moe = config.blocks[stack.block].feed_forward.moe
            idle += sum(leaf.size * (moe.experts - moe.top_k) // moe.experts for leaf in experts.values())
            assert all(leaf.shape[:2] == (stack.repeats, moe.experts) for leaf in experts.values())
    assert costs(config).active_parameters == sizes(transformer.abstract(config)) - idle


@pytest.mark.parametrize("name, layers", [*((name, "unroll") for name in ALL), *((name, "scan") for name in DISTINCT)])
def test_forward_flops_equal_the_sum_over_matrix_products(name, layers):
    config = ALL[name]
    tokens_BL = np.zeros((BATCH, LENGTH), np.int32)
    counted = count_flops(lambda params: forward(config, params, tokens_BL, layers), transformer.abstract(config))
    assert counted == BATCH * LENGTH * costs(config, LENGTH).flops_per_token


@pytest.mark.parametrize("name", [name for name in ALL if ALL[name].causal])  # others have no cache
def test_cache_bytes_per_token_equal_the_growth_of_the_cache(name):
    config = ALL[name]

    def cache_bytes(length):
        make = lambda params: transformer.bind(config, params).init_caches(1, length)  # noqa: E731
        leaves = jax.tree.leaves(jax.eval_shape(make, transformer.abstract(config)))
        return sum(leaf.size * leaf.dtype.itemsize for leaf in leaves)

    assert costs(config).cache_bytes_per_token == cache_bytes(LENGTH + 1) - cache_bytes(LENGTH)


def test_gpt2_has_the_published_parameters():
    config = parse(["--config", f"{ROOT / 'configs/gpt2.py'}"]).model
    assert (config.vocab_size, config.max_length) == (50257, 1024)
    assert costs(config).parameters == 124_439_808  # openai-community/gpt2


def test_mixtral_8x7b_has_the_published_parameters():
    main = block(
        norm="rms",
        attention={"heads": 32, "kv_heads": 8, "position": "rope"},
        feed_forward={"kind": "moe", "hidden": 14336},
    )
    config = ModelConfig(
        width=4096, depth=32, vocab_size=32000, blocks={"main": main}, final_norm="rms", tie_embeddings=False
    )
    result = costs(config, 4096)
    assert result.parameters == 46_702_792_704  # mistralai/Mixtral-8x7B-v0.1
    assert result.active_parameters == 12_879_925_248  # "13B active" in the paper


def test_all_attention_layer_has_the_published_parameters():
    """4 D^2 + 2 M D per layer and one post-norm of 2 D. The paper's 39 M model has 18 layers."""
    main = block(layout="all_attention", norm_bias=True, attention={"heads": 8, "memory_slots": 1024})
    config = ModelConfig(width=512, depth=18, vocab_size=205, blocks={"main": main}, final_norm="none")
    assert costs(config, 512).parameters == 18 * (4 * 512**2 + 2 * 1024 * 512 + 2 * 512) + 205 * 512


def test_training_flops_are_three_times_the_forward_flops():
    """The backward pass has two matrix products for each product of the forward pass."""
    config = ALL["base"]
    tokens_BL = np.zeros((BATCH, LENGTH), np.int32)

    def loss(params):
        return forward(config, params, tokens_BL)[0].sum()

    counted = count_flops(jax.grad(loss), transformer.abstract(config))
    assert counted == 3 * BATCH * LENGTH * costs(config, LENGTH).flops_per_token
