"""Parameters, FLOPs and cache of any config, in closed form. Each layer's own formula stands in that layer's file.

Convention: FLOPs are those of a forward pass, 2 per multiply-add, of every matrix product; causal attention is counted in
full (all L x L logits), as the plain implementation computes them. A training step is three times the forward pass.
"""

import math
from dataclasses import dataclass

from xfresearch.config import ModelConfig


@dataclass(frozen=True)
class Costs:
    """`active_parameters` leaves out the experts that a token does not use. `flops_per_token` is forward, at
    `sequence_length`; `cache_bytes_per_token` is for one more token of context."""

    parameters: int = 0
    active_parameters: int = 0
    flops_per_token: int = 0
    cache_bytes_per_token: int = 0
    sequence_length: int = 0

    def __add__(self, other: "Costs") -> "Costs":
        pairs = zip(vars(self).items(), vars(other).values(), strict=True)
        return Costs(**{k: max(a, b) if k == "sequence_length" else a + b for (k, a), b in pairs})

    def __mul__(self, times: int) -> "Costs":
        return Costs(**{k: v if k == "sequence_length" else v * times for k, v in vars(self).items()})


def weights(count: int, active: int | None = None) -> Costs:
    """Costs of `count` parameters alone, `active` of which a token uses (all of them by default)."""
    return Costs(parameters=count, active_parameters=count if active is None else active)


def linear(inputs, outputs, bias: bool) -> Costs:
    """Costs per token of a linear map between dimensions `inputs` and `outputs`."""
    kernel = math.prod(inputs) * math.prod(outputs)
    count = kernel + (math.prod(outputs) if bias else 0)
    return Costs(count, count, 2 * kernel)


def costs(config, sequence_length: int | None = None) -> Costs:
    """Costs of a model: a ModelConfig, `config.model` of ml-collections, or a whole run's config.

    `sequence_length` (tokens) is what attention is counted for; by default the model's max_length.
    UserError where the config is not valid or its vocabulary is not known yet (model.vocab_size = 0).
    """
    from xfresearch.config_io import model_from
    from xfresearch.errors import require
    from xfresearch.models.block import Block
    from xfresearch.models.norms import Norm
    from xfresearch.models.positions import SharedPositions
    from xfresearch.models.sizes import position_rows

    model: ModelConfig = model_from(config)
    length = sequence_length or model.max_length
    require(model.vocab_size > 0, "model.vocab_size", model.vocab_size, "known, at least 1, to count a model")
    require(length > 0, "model.max_length", length, "known, at least 1, to count a model (or give sequence_length)")
    V, D, first = model.vocab_size, model.width, model.blocks[model.pattern[0]]
    total = weights(V * D if model.tie_embeddings else 2 * V * D) + weights(V * model.head_bias)
    total += Costs(flops_per_token=2 * V * D, sequence_length=length)
    total += weights(position_rows(model) * D) + SharedPositions.costs(model)
    total += weights(int(model.embedding_scale == "learned"))
    total += Norm.costs(D, model.embedding_norm, first) + Norm.costs(D, model.final_norm, first)
    for name in model.pattern:
        total += Block.costs(model, model.blocks[name], length) * (model.depth // len(model.pattern))
    return total
