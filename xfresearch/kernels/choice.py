"""Selects one of several kernels of an operation."""

from collections.abc import Callable
from typing import Generic, NamedTuple, TypeVar

from xfresearch.runtime.errors import UserError, nearest

BY_NAME = "selected by name"
Name = TypeVar("Name", str, int)


class KernelChoice(NamedTuple, Generic[Name]):
    name: Name  # of a kernel, or a number
    reason: str


def choose(
    key: str, asked: str, call, refusals: dict[str, Callable], preferred: dict[str, str], rest: str
) -> KernelChoice[str]:
    """The kernel for `call`, and the reason.

    key: the config key of the option, for errors.
    asked: the name of a kernel, or 'auto' for the first of `preferred` that supports the call, otherwise `rest`.
    refusals: {name: function of a call that returns why the kernel does not support it, or ''}, for every kernel.
    preferred: {name: reason to prefer the kernel}.

    Raises UserError if there is no kernel of that name, or if the named kernel does not support the call.
    """
    if asked not in ("auto", *refusals):
        allowed = ", ".join(("auto", *refusals)) + nearest(asked, refusals)
        raise UserError(f"config.{key}={asked!r} is not allowed: it must be one of {allowed}")
    if asked != "auto":
        refusal = refusals[asked](call)
        if refusal:
            raise UserError(f"config.{key}={asked!r} is not allowed here: {refusal}")
        return KernelChoice(asked, BY_NAME)
    reasons = []
    for name, reason in preferred.items():
        refusal = refusals[name](call)
        if not refusal:
            return KernelChoice(name, reason)
        reasons.append(f"{name}: {refusal}")
    return KernelChoice(rest, "; ".join(reasons) or f"no faster kernel for {call.platform}")
