"""The check that an analysis applies to a model. Each analysis makes it first."""

from collections.abc import Callable
from functools import wraps

from xfresearch.errors import UserError
from xfresearch.models.model_config import ModelConfig


def only_if(applies: Callable[[ModelConfig], str]) -> Callable:
    """A decorator of analyses (lm, ...) -> Result. The analysis raises UserError if applies(lm.config) is not '': it is the
    reason why the analysis does not apply to the model."""

    def decorate(analysis: Callable) -> Callable:
        @wraps(analysis)
        def checked(lm, *arguments, **options):
            if reason := applies(lm.config):
                raise UserError(f"{analysis.__name__} does not apply to this model: {reason}")
            return analysis(lm, *arguments, **options)

        return checked

    return decorate
