"""The checks that every analysis makes first: that it applies to the model, its arguments, and the model's parameters."""

import inspect
from collections.abc import Callable
from functools import wraps

from xfresearch.checkpoints.validity import not_finite
from xfresearch.models.model_config import ModelConfig, second_stack
from xfresearch.runtime import arguments
from xfresearch.runtime.errors import UserError


def only_if(applies: Callable[[ModelConfig], str]) -> Callable:
    """A decorator of analyses (lm, ...) -> Result. The analysis raises UserError if applies(lm.config) is not '': it is the
    reason why the analysis does not apply to the model. It also does for an argument that is not allowed (arguments.py), and
    for a model whose parameters are not all finite."""

    def decorate(analysis: Callable) -> Callable:
        @wraps(analysis)
        def checked(lm, *given, **options):
            if reason := second_stack(lm.config) or applies(lm.config):
                raise UserError(f"{analysis.__name__} does not apply to this model: {reason}")
            arguments.check(inspect.signature(analysis).bind(lm, *given, **options).arguments)
            require_finite(lm)
            return analysis(lm, *given, **options)

        return checked

    return decorate


def require_finite(lm) -> None:
    """Raises UserError if a parameter is NaN or infinite: no figure of such a model means anything."""
    if wrong := not_finite(lm.params):
        at = f" at step {lm.step}" if lm.step else ""
        raise UserError(f"the model has parameters{at} that are not finite numbers: {wrong[0]}")
