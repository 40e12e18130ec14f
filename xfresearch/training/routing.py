"""Router metrics of an update.

The model returns statistics as {stack: {sublayer: {name: [R, ...]}}}, summed over the tokens of the whole update.
Choices are counted in integers, so that neither microbatches nor devices change which expert has more than its share.
"""

import jax.numpy as jnp

from xfresearch.models.encoder import stack_of

CHOICES = ("router_load", "router_drops")  # divided by choices; the others are divided by tokens


def router_metrics(statistics: dict, tokens: dict) -> dict:
    """{name: {stack: [R, ...]}}: `router_load` and `router_drops` as shares of a layer's choices, the other statistics
    as means over the `tokens` of the update in the decoder or the encoder (step.tokens_in). If a block has several
    mixtures, their keys are 'stack/sublayer'."""
    metrics: dict = {}
    for stack, sublayers in statistics.items():
        for sublayer, layers in sublayers.items():
            path = stack if len(sublayers) == 1 else f"{stack}/{sublayer}"
            for name, value in layers.items():
                choices_R = jnp.maximum(layers["router_load"].sum(-1), 1)
                divisor = choices_R.reshape(-1, *[1] * (value.ndim - 1)) if name in CHOICES else tokens[stack_of(stack)]
                metrics.setdefault(name, {})[path] = value / divisor
    return metrics
