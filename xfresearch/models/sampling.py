"""How a token is sampled. Commands read the defaults here, so this file does not import JAX."""

from dataclasses import dataclass

from xfresearch.errors import UserError


@dataclass(frozen=True)
class Sampling:
    """How a token is sampled: from softmax(logits / temperature) over the `top_k` most likely tokens, limited to the
    smallest number of them whose probabilities sum to `top_p`. Temperature 0 takes the most likely token. top_k 0 and
    top_p 1 have no effect."""

    temperature: float = 0.9
    top_k: int = 0
    top_p: float = 0.9

    def __post_init__(self):
        if not 0 <= self.temperature < float("inf"):
            raise UserError(f"temperature={self.temperature} is not allowed: it must be at least 0 (0 is greedy)")
        if not self.top_k >= 0:
            raise UserError(f"top_k={self.top_k} is not allowed: it must be at least 0 (0 is all tokens)")
        if not 0 < self.top_p <= 1:
            raise UserError(f"top_p={self.top_p} is not allowed: it must be above 0 and at most 1 (1 is all tokens)")


DEFAULT = Sampling()
