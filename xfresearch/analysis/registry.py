"""The table of analyses by name, and the checks before each of them."""

import inspect
from collections.abc import Callable
from functools import wraps
from typing import Any, NamedTuple

from xfresearch.checkpoints.validity import not_finite
from xfresearch.models.model_config import ModelConfig
from xfresearch.runtime import arguments
from xfresearch.runtime.errors import UserError


class Analysis(NamedTuple):
    run: Callable[..., Any]  # (lm, data, count, sequence_length, ...) -> Result
    applies: Callable[[ModelConfig], str]  # why it does not apply to a model; '' if it does
    about: str
    prompts: bool = False  # it takes a clean and a corrupted prompt instead of rows of a corpus

    def takes(self, argument: str) -> bool:
        """Whether the function has an argument of this name."""
        return argument in inspect.signature(self.run).parameters


ANALYSES: dict[str, Analysis] = {}  # all are in it once xfresearch.analysis has been imported


def analysis(applies: Callable[[ModelConfig], str], about: str, prompts: bool = False) -> Callable[..., Any]:
    """A decorator that puts a function (lm, ...) -> Result into the table. It raises UserError then for a model to which it
    does not apply, for an argument that is not allowed (runtime/arguments.py), and for a model whose parameters are not all
    finite."""

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def checked(lm: Any, *given: Any, **options: Any) -> Any:
            if reason := row.applies(lm.config):
                raise UserError(f"{function.__name__} does not apply to this model: {reason}")
            arguments.check(inspect.signature(function).bind(lm, *given, **options).arguments)
            require_finite(lm)
            return function(lm, *given, **options)

        row = ANALYSES[function.__name__] = Analysis(checked, applies, about, prompts)
        return checked

    return decorate


def require_finite(lm: Any) -> None:
    """Raises UserError if a parameter is NaN or infinite: no figure of such a model means anything."""
    if wrong := not_finite(lm.params):
        at = f" at step {lm.step}" if lm.step else ""
        raise UserError(f"the model has parameters{at} that are not finite numbers: {wrong[0]}")
