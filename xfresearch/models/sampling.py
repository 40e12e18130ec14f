"""How tokens are chosen: sampling and beam search. Commands read the defaults here, so this file does not import JAX."""

from dataclasses import dataclass
from numbers import Integral, Real

from xfresearch.runtime.errors import UserError


@dataclass(frozen=True)
class Sampling:
    """How a token is sampled: from softmax(logits / temperature) over the `top_k` most likely tokens, limited to the
    smallest number of them whose probabilities sum to `top_p`. Temperature 0 takes the most likely token. top_k 0 and
    top_p 1 have no effect."""

    temperature: float = 0.9
    top_k: int = 0
    top_p: float = 0.9

    def __post_init__(self):
        checks = (
            ("temperature", Real, lambda x: 0 <= x < float("inf"), "a number of at least 0 (0 is greedy)"),
            ("top_k", Integral, lambda x: x >= 0, "an integer of at least 0 (0 is all tokens)"),
            ("top_p", Real, lambda x: 0 < x <= 1, "a number above 0 and at most 1 (1 is all tokens)"),
        )
        for name, kind, fits, allowed in checks:
            value = getattr(self, name)
            if not (isinstance(value, kind) and fits(value)):
                raise UserError(f"{name}={value!r} is not allowed: it must be {allowed}")


@dataclass(frozen=True)
class Beams:
    """How wide a search is. A length penalty above 0 is for longer texts, below 0 for shorter ones."""

    beams: int = 4
    length_penalty: float = 1.0

    def __post_init__(self) -> None:
        if not (isinstance(self.beams, Integral) and self.beams >= 1):
            raise UserError(f"beams={self.beams!r} is not allowed: it must be an integer of at least 1")
        if not (isinstance(self.length_penalty, Real) and abs(self.length_penalty) < float("inf")):
            raise UserError(f"length_penalty={self.length_penalty!r} is not allowed: it must be a number")


DEFAULT = Sampling()
