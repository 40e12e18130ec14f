"""How one of several implementations of an operation is chosen, and why."""

from collections.abc import Callable
from typing import NamedTuple

from xfresearch.errors import UserError, nearest


class Choice(NamedTuple):
    name: str
    reason: str


def choose(key: str, asked: str, call, refusals: dict[str, Callable], preferred: dict[str, str], rest: str) -> Choice:
    """Which implementation serves `call`.

    asked: a name, or 'auto' for the first of `preferred` ({name: what speaks for it}) that can, otherwise `rest`.
    refusals: {name: why it cannot serve a call, '' where it can}, of every name there is.
    key: of the config, for errors. UserError for a name that there is not, or that cannot serve the call.
    """
    if asked not in ("auto", *refusals):
        allowed = ", ".join(("auto", *refusals)) + nearest(asked, refusals)
        raise UserError(f"config.{key}={asked!r} is not allowed: it must be one of {allowed}")
    if asked != "auto":
        refusal = refusals[asked](call)
        if refusal:
            raise UserError(f"config.{key}={asked!r} is not allowed here: {refusal}")
        return Choice(asked, "asked for")
    reasons = []
    for name, reason in preferred.items():
        refusal = refusals[name](call)
        if not refusal:
            return Choice(name, reason)
        reasons.append(f"{name}: {refusal}")
    return Choice(rest, "; ".join(reasons) or f"nothing else for {call.platform}")
