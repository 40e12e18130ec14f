"""What an update says about its experts, and the balance of load by a bias.

Statistics come from the model as {stack: {name: [R, ...]}}, summed over the tokens of the whole update: choices as whole
numbers, so that neither microbatches nor devices change which expert has more than its share.
"""

import jax.numpy as jnp

from xfresearch.config import ModelConfig
from xfresearch.models.transformer import stack_names

CHOICES = ("router_load", "router_drops")  # counted in choices, the others in tokens


def router_metrics(statistics: dict, tokens) -> dict:
    """{name: {stack: [R, ...]}}: `router_load` and `router_drops` as shares of a layer's choices, the other statistics as
    averages over the update's `tokens`."""
    metrics = {}
    for stack, layers in statistics.items():
        for name, value in layers.items():
            choices_R = jnp.maximum(layers["router_load"].sum(-1), 1)
            over = choices_R.reshape(-1, *[1] * (value.ndim - 1)) if name in CHOICES else tokens
            metrics.setdefault(name, {})[stack] = value / over
    return metrics


def balanced(model: ModelConfig, params: dict, statistics: dict) -> dict:
    """`params` with every router's bias moved: b += speed sign(mean load - load) (DeepSeek-V3, sec. 2.1.2)."""
    blocks = dict(params["blocks"])
    for stack, name in zip(stack_names(model), model.pattern, strict=True):
        feed_forward = blocks[stack].get("feed_forward", {})
        if "router_bias" in feed_forward:
            load_RE = statistics[stack]["router_load"]
            bias_RE = feed_forward["router_bias"]
            step_RE = model.blocks[name].feed_forward.moe.bias_speed * below_mean(load_RE).astype(bias_RE.dtype)
            blocks[stack] = blocks[stack] | {"feed_forward": feed_forward | {"router_bias": bias_RE + step_RE}}
    return params | {"blocks": blocks}


def below_mean(load_RE):
    """sign(mean load - load), exactly and without overflow: of a total of q E + r, q is below the mean where r > 0."""
    q_R1, r_R1 = jnp.divmod(load_RE.sum(-1, keepdims=True), load_RE.shape[-1])
    return jnp.where(load_RE == q_R1, r_R1 > 0, jnp.sign(q_R1 - load_RE))
