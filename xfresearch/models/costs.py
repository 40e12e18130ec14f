"""Costs of parts of a model: parameters, FLOPs and cache. Each layer's own formula stands in that layer's file.

Convention: FLOPs are those of a forward pass, 2 per multiply-add, of every matrix product; causal attention is counted in
full (all L x L logits), as the plain implementation computes them. A training step is three times the forward pass.
"""

from dataclasses import dataclass


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
