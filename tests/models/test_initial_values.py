"""Initial values of every parameter in every variant: a standard deviation or a constant.

The table is written by hand from the papers. test_initialisation.py tests the drawn numbers.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.contracts.variants import ALL, ONE_STACK
from tests.training.test_parameter_kinds import kind_of
from xfresearch.models import transformer
from xfresearch.models.layers import stacks
from xfresearch.runtime.trees import by_path

# Outputs per layer that are added to the residual stream. Each is scaled by 1/sqrt(depth * outputs), so that the
# stream's variance does not grow with depth (GPT-2, sec. 2.3). 0: not scaled, since a norm, a gain or the lack of a
# skip limits it.
OUTPUTS = {
    "pre_norm": 2,
    "post_norm": 0,
    "peri_norm": 0,
    "sandwich_norm": 0,
    "output_norm": 0,
    "parallel": 2,
    "parallel_two_norms": 2,
    "no_norm_between": 2,
    "fused_output": 1,  # of the feed-forward: there is no W_O
    "no_residual_between": 1,  # of the feed-forward: W_O is not added to the stream
    "no_skip": 0,
    "attention_only": 1,
    "skipless": 0,
    "skipless_parallel": 0,
    "all_attention": 0,
    "macaron": 3,
    "hyper_connections": 2,
    "attention_residuals": 2,
    "attention_residuals_blocks": 2,
    "deep_norm": 0,
    "resi_dual": 0,
}
ONES, ZEROS = 1.0, 0.0


def fan(n: int, model) -> float:
    return model.init_std if model.init == "normal" else n**-0.5


def beta(model, block) -> float:
    """DeepNorm's scale of values, W_O and the feed-forward (Wang et al. 2022, table 2, decoder)."""
    return (8 * model.depth) ** -0.25 if block.layout == "deep_norm" else 1.0


def output_scale(model, block, sublayer: str) -> float:
    outputs = OUTPUTS[block.layout]
    if not outputs or (block.layout, sublayer) == ("no_residual_between", "attention"):
        return beta(model, block)
    return (model.depth * outputs) ** -0.5


def query(shape, model, block) -> float:
    a = block.attention
    if getattr(a, "shaping", "none") == "shaped":  # uniform attention weights at first (He & Hofmann 2023)
        return 0.0
    if getattr(a, "query", "learned") == "merged" and not a.rank:  # like W_Q W_K^T: sums of K products
        return a.head_size**0.5 * fan(shape[0], model) ** 2
    return low_rank(a) * fan(shape[0], model)


def low_rank(a) -> float:
    """Logits of rank r, divided by sqrt(K), are as large as those of rank K: r s^4 = K."""
    return (a.head_size / a.rank) ** 0.25 if getattr(a, "rank", 0) else 1.0


def value(shape, model, block) -> float:
    if getattr(block.attention, "value", "learned") == "identity_plus":
        return 0.0
    return beta(model, block) * fan(shape[0], model)


def down(shape, model, block) -> float:
    """W_down. With softmax, its rows have length sqrt(width), like the values of memory slots."""
    f = next(options for name, options in block.sublayers.items() if name.startswith("feed_forward"))
    activation = f.moe.expert if f.kind == "moe" else f.kind
    softmax = shape[-2] ** 0.5 if activation == "softmax" else 1.0
    return output_scale(model, block, "feed_forward") * softmax * fan(shape[-2], model)


def up(shape, model, block) -> float:
    return beta(model, block) * fan(shape[-2], model)


def key_slots(shape, model, block) -> float:
    """[M, G, K]: N(0, 1/K), as in the code of Sukhbaatar et al. 2019; [M, D]: like W_up."""
    return shape[2] ** -0.5 if len(shape) == 3 else beta(model, block) * fan(shape[1], model)


def value_slots(shape, model, block) -> float:
    """[M, G, K]: N(0, 1/M); [M, D]: like W_down."""
    return shape[0] ** -0.5 if len(shape) == 3 else output_scale(model, block, "attention") * fan(shape[0], model)


def norm_gain(shape, model, block) -> float:
    return 1 - block.norm_offset


def lambda_values(shape, model, block) -> float:
    """A lambda layer has no W_O: its values are what it writes."""
    return output_scale(model, block, "attention") - block.norm_offset


def small_gain(shape, model, block) -> float:
    return block.branch_gain or 0.1 * (18 / model.depth) ** 0.5  # He & Hofmann 2023: 0.1 at 18 layers


def alpha(shape, model, block) -> float:
    return block.norm_alpha


def attention_alpha(shape, model, block) -> float:
    return block.norms.attention_in.alpha or block.norm_alpha


# {path: a number, an array of one layer's shape, or a function of (shape in one layer, model, block) that returns it}
INITIAL = {
    "embed/table": lambda shape, model, block: model.embedding_std or fan(model.width, model),
    "head/table": lambda shape, model, block: fan(model.width, model),
    "position/table": lambda shape, model, block: fan(model.width, model),
    "token_type/table": lambda shape, model, block: fan(model.width, model),
    "embedding_scale": lambda shape, model, block: model.width**0.5,
    "shared/relative_key": ONES,  # N(0, 1), as in the code of Sukhbaatar et al. 2019
    "shared/relative_bias": ZEROS,
    "head_bias/bias": ZEROS,
    "head_layer/dense/kernel": lambda shape, model, block: fan(shape[0], model),
    "head_layer/dense/bias": ZEROS,
    "block/attention/query/kernel": query,
    "block/attention/key/kernel": lambda shape, model, block: low_rank(block.attention) * fan(shape[0], model),
    "block/attention/value/kernel": value,
    "block/attention/output/kernel": lambda shape, model, block: (
        output_scale(model, block, "attention") * fan(shape[0] * shape[1], model)
    ),
    "block/attention/gate/kernel": lambda shape, model, block: fan(shape[0], model),
    "block/attention/lambda_key/kernel": lambda shape, model, block: fan(shape[0], model),
    "block/attention/lambda_value/kernel": lambda shape, model, block: fan(shape[0], model),
    "block/attention/distances": lambda shape, model, block: fan(np.prod(shape), model),
    "block/attention/memory/key": key_slots,
    "block/attention/memory/value": value_slots,
    "block/attention/memory/bias": ZEROS,
    "block/attention/value/identity_gain": ONES,
    "block/attention/value/weight_gain": ONES,
    "block/attention/shaping/identity": ONES,
    "block/attention/shaping/weights": lambda shape, model, block: float(block.attention.shaping == "shaped"),
    "block/attention/shaping/uniform": ONES,
    "block/attention/span/fraction": ZEROS,
    "block/attention/sink": ZEROS,
    "block/attention/own": 0.5,
    "block/attention/first": 0.5,
    "block/feed_forward/up/kernel": up,
    "block/feed_forward/gate/kernel": up,
    "block/feed_forward/down/kernel": down,
    "block/feed_forward/shared/up/kernel": up,
    "block/feed_forward/shared/gate/kernel": up,
    "block/feed_forward/shared/down/kernel": down,
    "block/feed_forward/experts/up": up,
    "block/feed_forward/experts/gate": up,
    "block/feed_forward/experts/down": down,
    **{f"block/feed_forward/experts/{name}_bias": ZEROS for name in ("up", "gate", "down")},
    **{f"block/feed_forward/shared/{name}/bias": ZEROS for name in ("up", "gate", "down")},
    "block/feed_forward/router/bias": ZEROS,
    "block/feed_forward/router/kernel": lambda shape, model, block: fan(shape[0], model),
    "block/feed_forward/router_bias": ZEROS,
    "block/feed_forward/hidden_norm/gain": ONES,
    "block/attention_gain": ONES,
    "block/feed_forward_gain": small_gain,
    "block/feed_forward_skip_gain": ONES,
}
INITIAL |= {f"block/attention/{name}/bias": ZEROS for name in ("query", "key", "value", "output")}
INITIAL |= {f"block/feed_forward/{name}/bias": ZEROS for name in ("up", "gate", "down", "hidden_norm")}
NORMS = ["embedding_norm", "final_norm", "head_layer/norm"]
NORMS += [f"block/{s}_norm_{place}" for s in ("attention", "feed_forward") for place in ("in", "out", "post")]
NORMS += [f"block/attention/{name}" for name in ("query_norm", "key_norm", "query_scaling", "value_scaling")]
INITIAL |= {f"block/attention/lambda_{name}_{i}": 0.1 for name in ("query", "key") for i in (1, 2)}
INITIAL |= {"block/attention/head_norm/gain": ONES}
INITIAL |= {
    f"block/{sublayer}_{name}": value
    for sublayer in ("attention", "feed_forward")
    for name, value in {
        **{"mix_query": ZEROS, "mix_gain": ONES},
        **{"mix": np.eye(2), "write": ONES, "read_scale": 0.01, "write_scale": 0.01},
        **dict.fromkeys(("read_kernel", "mix_kernel", "write_kernel"), ZEROS),
    }.items()
}
INITIAL |= {"end_mix_query": ZEROS, "end_mix_gain": ONES}
# Sublayer k of the model reads stream k mod 2: attention the first one, and the feed-forward layer the second.
INITIAL |= {"block/attention_read": np.array([1.0, 0.0]), "block/feed_forward_read": np.array([0.0, 1.0])}
INITIAL |= {f"{norm}/gain": norm_gain for norm in NORMS} | {f"{norm}/bias": ZEROS for norm in NORMS}
INITIAL |= {"block/attention/value_scaling/gain": lambda_values}
INITIAL |= {f"{norm}/alpha": attention_alpha if "attention_norm" in norm else alpha for norm in NORMS}
INITIAL |= {f"{norm}/shift": ZEROS for norm in NORMS}


def test_every_layout_is_in_the_table():
    assert OUTPUTS.keys() == ONE_STACK.keys()


@pytest.fixture
def ones(monkeypatch):
    """Makes every normal random number 1, so that a parameter equals its standard deviation."""
    monkeypatch.setattr(jax.random, "normal", lambda key, shape, dtype: jnp.ones(shape, dtype))
    monkeypatch.setattr(jax.random, "truncated_normal", lambda key, low, high, shape, dtype: jnp.ones(shape, dtype))


@pytest.mark.parametrize("name", ALL)
def test_initial_values_equal_the_table(name, ones):
    model = ALL[name]
    blocks = {stack.name: stack.block for stack in stacks(model)}
    for path, leaf in by_path(transformer.init(model, jax.random.key(0))).items():
        stacked = path.startswith("blocks/")
        block = model.blocks[blocks[path.split("/")[1]] if stacked else stacks(model)[0].block]
        initial = INITIAL[kind_of(path)]
        shape = leaf.shape[stacked:]
        expected = initial(shape, model, block) if callable(initial) else initial
        np.testing.assert_allclose(leaf, np.broadcast_to(expected, leaf.shape), rtol=1e-6, err_msg=path)
