"""The error of a conversion that would not be exact."""

from typing import TypeVar

from xfresearch.runtime.errors import UserError

T = TypeVar("T")


class Refused(UserError):
    """A conversion does not apply to a model. The message names the condition that fails, or the term that is not zero."""


def required(value: object, kind: type[T], reason: str) -> T:
    """`value`, which has to be of this class. Raises Refused with `reason` if it is not."""
    if not isinstance(value, kind):
        raise Refused(reason)
    return value


def refuse_unless(condition: bool, reason: str) -> None:
    """Raises Refused with `reason` unless `condition` holds."""
    if not condition:
        raise Refused(reason)
