"""How tokens are chosen: sampling and beam search. Commands read the defaults here, so this file does not import JAX."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any, TypedDict

from xfresearch.runtime.errors import UserError, shortened


def _is_id(value: Any) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool) and int(value) >= 0


def _is_number(value: Any) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool) and abs(float(value)) < float("inf")


def _require(holds: bool, name: str, value: Any, allowed: str) -> None:
    if not holds:
        raise UserError(f"{name}={shortened(repr(value), 100)} is not allowed: it must be {allowed}")


class Settings(TypedDict, total=False):
    """The settings of Rules and Beams that a Hugging Face folder may have, under the names of `transformers`."""

    no_repeat_ngram_size: int | None
    min_length: int | None
    repetition_penalty: float | None
    bad_words_ids: Sequence[Sequence[int]] | None
    length_penalty: float | None
    early_stopping: bool | str | None


@dataclass(frozen=True)
class Rules:
    """What the tokens before it mean for the next token, as in `transformers` (rules.py). The prompt counts, too.

    `no_repeat_ngram_size` n: no n tokens follow each other twice; 0 has no effect. `min_length`: a text with fewer tokens
    does not end. `repetition_penalty`: a score of a token that was there before is divided by it if it is above 0, and
    multiplied otherwise (Keskar et al. 2019). `bad_words_ids`: sequences of tokens that no text has.
    """

    no_repeat_ngram_size: int = 0
    min_length: int = 0
    repetition_penalty: float = 1.0
    bad_words_ids: Sequence[Sequence[int]] = ()

    def __post_init__(self) -> None:
        for name in ("no_repeat_ngram_size", "min_length"):
            value = getattr(self, name)
            _require(_is_id(value), name, value, "an integer of at least 0")
        penalty, words = self.repetition_penalty, self.bad_words_ids
        _require(_is_number(penalty) and penalty > 0, "repetition_penalty", penalty, "a number above 0")
        listed = isinstance(words, list | tuple) and all(isinstance(word, list | tuple) and word for word in words)
        listed = listed and all(_is_id(token) for word in words for token in word)
        _require(listed, "bad_words_ids", words, "a list of lists of token ids")
        object.__setattr__(self, "bad_words_ids", tuple(map(tuple, words)))  # a static argument of compiled functions


NO_RULES = Rules()


@dataclass(frozen=True)
class Sampling:
    """How a token is sampled: from softmax(logits / temperature) over the `top_k` most likely tokens, limited to the
    smallest number of them whose probabilities sum to `top_p`. Temperature 0 takes the most likely token. top_k 0 and
    top_p 1 have no effect."""

    temperature: float = 0.9
    top_k: int = 0
    top_p: float = 0.9
    rules: Rules = NO_RULES

    def __post_init__(self):
        checks = (
            ("temperature", Real, lambda x: 0 <= x < float("inf"), "a number of at least 0 (0 is greedy)"),
            ("top_k", Integral, lambda x: x >= 0, "an integer of at least 0 (0 is all tokens)"),
            ("top_p", Real, lambda x: 0 < x <= 1, "a number above 0 and at most 1 (1 is all tokens)"),
        )
        for name, kind, fits, allowed in checks:
            value = getattr(self, name)
            _require(isinstance(value, kind) and fits(value), name, value, allowed)


@dataclass(frozen=True)
class Beams:
    """How wide a search is. A length penalty above 0 is for longer texts, below 0 for shorter ones. `early_stopping` says
    when a search ends that has found as many texts as it has beams (beams.py)."""

    beams: int = 4
    length_penalty: float = 1.0
    early_stopping: bool | str = False
    rules: Rules = NO_RULES

    def __post_init__(self) -> None:
        _require(_is_id(self.beams) and self.beams >= 1, "beams", self.beams, "an integer of at least 1")
        _require(_is_number(self.length_penalty), "length_penalty", self.length_penalty, "a number")
        stops = isinstance(self.early_stopping, bool) or self.early_stopping == "never"
        _require(stops, "early_stopping", self.early_stopping, "True, False or 'never'")


def parts(settings: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The settings of Rules, and those of Beams."""
    names = Rules.__annotations__, Beams.__annotations__
    rules, search = ({name: value for name, value in settings.items() if name in each} for each in names)
    return rules, search


DEFAULT = Sampling()
