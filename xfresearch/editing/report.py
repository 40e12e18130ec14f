"""What an edit did: requests checked before it, and what each of them changed after it."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from xfresearch.analysis.coefficients import places
from xfresearch.analysis.prompts import prompt_of
from xfresearch.analysis.recall import score
from xfresearch.analysis.trace import CLASSES, trace
from xfresearch.data.records import Record
from xfresearch.errors import UserError

BROKEN = 0.1  # a relative rise of the held-out loss above this breaks the model
ROWS = 16  # of held-out text


class Edit(NamedTuple):
    """One request, and how its change was found."""

    record: Record
    place: str
    norm: float  # of the change, relative to that of the values
    losses: list[float]  # of each step of the optimisation
    probability: float  # of the new object with delta, which the change of the values should reach


@dataclass(frozen=True)
class Report:
    """new_before, new_after, old_after [requests]: probabilities of the new and of the old object after the prompt.
    loss_before, loss_after: held-out, in nats per token. failures: a line for each request that failed, and for a broken
    model."""

    method: str
    edits: list[Edit]
    new_before: np.ndarray
    new_after: np.ndarray
    old_after: np.ndarray
    loss_before: float
    loss_after: float
    failures: list[str] = field(default_factory=list)


def check(lm, requests: Sequence[Record]) -> None:
    """Raises UserError, before anything is computed, for requests that cannot be made."""
    if not requests:
        raise UserError("requests=[] is not allowed: there must be at least one")
    if lm.tokenizer is None:
        raise UserError("this model has no tokenizer, so it cannot read a request")
    for number, record in enumerate(requests):
        if not record.target_new:
            raise UserError(f"request {number}, {record.text!r}, has no target_new: it must be the new object")
        if record.target_new == record.target:
            raise UserError(f"request {number}: target_new={record.target_new!r} is not allowed: it is the object before")
        prompt_of(lm, record, record.target_new)


def traced(lm, requests: Sequence[Record]) -> str:
    """The memory that the model's own trace of the requests finds: where restoring its sublayer at the last token of the
    subject helps most (analysis/trace.py). Raises UserError if the model knows none of the objects."""
    found = trace(lm, [record for record in requests if record.target]).data
    best = {}
    for place in places(lm.config):
        _, number, sublayer = place.split(".")[:3]
        value = "slots" if sublayer == "attention" else "feed_forward"
        best[place] = found[value][int(number), CLASSES.index("last subject")]
    return max(best, key=best.get)


def of(before, after, method: str, edits: list[Edit]) -> Report:
    """The report of edits that made the model `after` of `before`."""
    records = [edit.record for edit in edits]
    texts, new = [record.text for record in records], [record.target_new for record in records]
    new_before, new_after = (np.exp(score(lm, texts, new, "edits").log_probability) for lm in (before, after))
    old = [record.target or record.target_new for record in records]
    old_after = np.exp(score(after, texts, old, "edits").log_probability)
    old_after[[not record.target for record in records]] = np.nan
    rows_NL = next(iter(before.batches(batch_size=ROWS, limit=ROWS)))
    losses = [float(np.asarray(lm.loss(rows_NL)).mean()) for lm in (before, after)]
    failures = []
    for number, edit in enumerate(edits):
        if edit.norm == 0 or new_after[number] <= new_before[number]:
            failures.append(f"request {number}, {texts[number]!r}: the edit changed nothing")
        elif new_after[number] <= old_after[number]:
            kept = f"{old[number]!r} is still more likely than {new[number]!r}"
            failures.append(f"request {number}, {texts[number]!r}: {kept}")
    if losses[1] > (1 + BROKEN) * losses[0] or not np.isfinite(losses[1]):
        change = f"from {losses[0]:.3f} to {losses[1]:.3f} nats per token"
        failures.append(f"the model is broken: the held-out loss went {change}")
    return Report(method, edits, new_before, new_after, old_after, *losses, failures)
