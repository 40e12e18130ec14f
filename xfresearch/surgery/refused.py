"""The error of a conversion that would not be exact."""

from xfresearch.runtime.errors import UserError


class Refused(UserError):
    """A conversion does not apply to a model. The message names the condition that fails, or the term in the way."""


def refuse_unless(condition: bool, reason: str) -> None:
    """Raises Refused with `reason` unless `condition` holds."""
    if not condition:
        raise Refused(reason)
