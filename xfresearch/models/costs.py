"""Costs of parts of a model: parameters, FLOPs and cache. Each layer's file has the formula of that layer.

Convention: FLOPs are those of all matrix products of a forward pass, 2 per multiply-add. Causal attention counts all
L x L logits, as the plain implementation computes them. A training step costs three times the forward pass.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Costs:
    """Costs of a model or of a part of it.

    active_parameters: without the experts that a token does not use.
    flops_per_token: of the forward pass, at `sequence_length`. With an encoder it may be a fraction, because it includes a
    token's share of the FLOPs of the encoder, and of the keys and values that cross-attention computes once.
    cache_bytes_per_token: for each additional token of context.
    """

    parameters: int = 0
    active_parameters: int = 0
    flops_per_token: int | float = 0
    cache_bytes_per_token: int = 0
    sequence_length: int = 0

    @property
    def training_flops_per_token(self) -> int | float:
        """FLOPs of a training step."""
        return 3 * self.flops_per_token

    def __add__(self, other: "Costs") -> "Costs":
        pairs = zip(vars(self).items(), vars(other).values(), strict=True)
        return Costs(**{k: max(a, b) if k == "sequence_length" else a + b for (k, a), b in pairs})

    def __mul__(self, times: int) -> "Costs":
        return Costs(**{k: v if k == "sequence_length" else v * times for k, v in vars(self).items()})


def shared_by(flops: int | float, tokens: int) -> int | float:
    """FLOPs per token of `flops` that all `tokens` share."""
    whole, rest = divmod(flops, tokens)
    return flops / tokens if rest else whole


def weights(count: int, active: int | None = None) -> Costs:
    """Costs of `count` parameters, of which a token uses `active` (all by default)."""
    return Costs(parameters=count, active_parameters=count if active is None else active)
