"""The report of an edit: the metrics before and after, side effects, and the requests that failed."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from xfresearch.analysis.prompts import check_asked
from xfresearch.analysis.recall import score
from xfresearch.analysis.result import Result
from xfresearch.analysis.sequences import sequences
from xfresearch.data.facts import Fact
from xfresearch.data.records import Record
from xfresearch.editing.scores import KINDS, Measured, joined, measure, summary
from xfresearch.loading import edits as carried
from xfresearch.pages.charts import Curve
from xfresearch.pages.figures import LineChart, Table, table
from xfresearch.runtime.errors import UserError
from xfresearch.runtime.progress import stage
from xfresearch.runtime.summaries import mean_interval

BROKEN = 0.1  # a relative rise of the held-out loss above this breaks the model
ROWS = 16  # of held-out text
OTHERS = 400  # other facts that are asked, at most


class Edit(NamedTuple):
    """One request, and how its change was found."""

    record: Record
    memories: tuple[str, ...]
    norms: tuple[float, ...]  # of the change of each memory, relative to that of its values
    losses: list[float]  # of each step of the optimisation
    probability: float  # of the new object in the optimisation, which the change of the values should reach


class Drift(NamedTuple):
    """Figures that an edit must not change: bits per byte of held-out text, and the share of the other facts that are
    recalled. NaN without text, or without known facts."""

    bits_per_byte: float
    others: float


@dataclass(frozen=True)
class Report:
    """The metrics of an edit. failures: a line for each request that failed, and for a broken model."""

    method: str
    settings: dict
    edits: list[Edit]
    before: Measured
    after: Measured
    drift_before: Drift
    drift_after: Drift
    failures: list[str]

    def summary(self) -> dict[str, tuple]:
        """{name: (before, after, low, high)}: means over the requests, and the 95 % interval of the mean after."""
        before, after = summary(self.before), summary(self.after)
        return {name: (before[name][0], *after[name]) for name in before if after[name][0] == after[name][0]}

    def as_dict(self) -> dict:
        """The report as values of JSON."""
        rows = [
            {
                **{key: value for key, value in edit.record._asdict().items() if value},
                "memories": edit.memories,
                "norms": edit.norms,
                "losses": edit.losses,
                "probabilities": {"new before": float(new), "new after": float(after), "old after": float(old)},
                "probability in the optimisation": edit.probability,
            }
            for edit, new, after, old in zip(self.edits, self.before.new, self.after.new, self.after.old, strict=True)
        ]
        data = {"method": self.method, "settings": self.settings, "failures": self.failures, "requests": rows}
        names = ("before", "after", "low", "high")
        data["metrics"] = {name: dict(zip(names, row, strict=True)) for name, row in self.summary().items()}
        return data | {"before": self.drift_before._asdict(), "after": self.drift_after._asdict()}

    def result(self, step: int) -> Result:
        """The report as data, tables and a page (analysis/result.py)."""
        rows = [(name, *map(_known, interval)) for name, interval in self.summary().items()]
        drifts = self.drift_before._asdict(), self.drift_after._asdict()
        drift = [(name.replace("_", " "), *(_known(each[name]) for each in drifts)) for name in Drift._fields]
        tables = [table("Metrics", "means over the requests", ("metric", "before", "after", "low", "high"), rows)]
        tables.append(table("What else changed", "", ("", "before", "after"), drift))
        tables.append(self._requests())
        if self.failures:
            tables.append(table("Failures", "", ("failure",), [(line,) for line in self.failures]))
        data = {"new_before": self.before.new, "new_after": self.after.new, "old_after": self.after.old}
        data |= {name.replace(", ", "_").replace(" ", "_"): value for name, value in self.after.values.items()}
        means = {name: mean_interval(self.after.values[f"{name}, score"]) for name in KINDS}
        about = f"{self.method}, {len(self.edits)} requests, {', '.join(self.edits[0].memories)}"
        return Result("edit", about, step, data, means, self._pictures(), tuple(tables))

    def _pictures(self) -> tuple[LineChart, ...]:
        """The probabilities of the new objects, in the order of the requests: do later edits undo earlier ones?"""
        if len(self.edits) < 2:
            return ()
        x = np.arange(len(self.edits))
        after = Curve(np.stack([x, self.after.new], 1), "model", 1.6, True)
        before = Curve(np.stack([x, self.before.new], 1), "training", 1.0, False, "--")
        caption = "by request, in their order: after the edit, and before (dashed)"
        return (LineChart("Probability of the new object", caption, "request", (after, before)),)

    def _requests(self) -> Table:
        columns = ("request", "new object", "P(new) before", "after", "object before", "P after", "change of the values")
        rows = []
        for edit, *values in zip(self.edits, self.before.new, self.after.new, self.after.old, strict=True):
            new, after, old = map(_known, values)
            record = edit.record
            rows.append((record.text, record.target_new, new, after, record.target, old, max(edit.norms)))
        return table("Requests", "probabilities of the whole object", columns, rows)


def _known(value: float) -> float | str:
    return value if value == value else ""


class Asked(NamedTuple):
    """How edits are measured.

    known: facts, to measure what else changed. alone: each request is made on the model before all edits, as papers measure
    an edit; bits per byte after the edits are a mean over them, and no facts are asked. prompts: paraphrases, neighbours and
    consequences of a request that are asked, the first ones of each; 0 for all."""

    known: Sequence[Fact] | None = None
    alone: bool = False
    prompts: int = 0


def of(lm, requests, edit: Callable, method: str, settings: dict, asked: Asked):
    """(the model after the edits, which carries them, or `lm` if they are made alone; their report).
    edit(lm, requests) -> (edited model, edits)."""
    settings = settings | {name: getattr(asked, name) for name in ("alone", "prompts") if getattr(asked, name)}
    if asked.alone:
        return lm, _alone(lm, requests, edit, method, settings, asked.prompts)
    before, drift_before = measure(lm, requests, prompts=asked.prompts), drift(lm, requests, asked.known)
    edited, edits = edit(lm, requests)
    after, drift_after = measure(edited, requests, prompts=asked.prompts), drift(edited, requests, asked.known)
    failures = failed(edits, before, after) + broken(drift_before, drift_after)
    report = Report(method, settings, edits, before, after, drift_before, drift_after, failures)
    applied = carried.applied(lm.config, lm.params, edited.params, report.as_dict())
    return edited.with_params(edited.params, (*lm.edits, applied)), report


def _alone(lm, requests: Sequence[Record], edit: Callable, method: str, settings: dict, prompts: int) -> Report:
    before, drift_before = measure(lm, requests, prompts=prompts), drift(lm, requests, ())
    edits, parts, drifts = [], [], []
    with stage(f"{method}, one by one", len(requests), "requests") as progress:
        for record in requests:
            edited, edits_of_one = edit(lm, [record])
            edits += edits_of_one
            parts.append(measure(edited, [record], prompts=prompts))
            drifts.append(drift(edited, [record], ()))
            progress.update(1)
    after, bits_per_byte = joined(parts, requests), float(np.mean([each.bits_per_byte for each in drifts]))
    failures = failed(edits, before, after)
    for number, each in enumerate(drifts):
        failures += [f"request {number}, {requests[number].text!r}: {line}" for line in broken(drift_before, each)]
    return Report(method, settings, edits, before, after, drift_before, Drift(bits_per_byte, np.nan), failures)


def drift(lm, requests: Sequence[Record], known: Sequence[Fact] | None = None) -> Drift:
    """The figures that an edit must not change. The other facts are asked with a held-out prompt; facts that follow from the
    requests are left out."""
    edited = {record.text for record in requests} | {text for record in requests for text, *_ in record.consequences}
    others = [fact for fact in known or () if not edited & set(fact.prompts) and _fits(lm, fact)]
    asked = others[:: max(1, -(-len(others) // OTHERS))]
    recalled = np.nan
    if asked:
        prompts = [_asked(fact) for fact in asked]
        recalled = float(score(lm, prompts, [fact.object for fact in asked], "other facts").recalled.mean())
    return Drift(_bits_per_byte(lm), recalled)


def _fits(lm, fact: Fact) -> bool:
    """Whether the model's table of positions is long enough for the sentence that asks for the fact."""
    try:
        check_asked(lm, _asked(fact), [fact.object])
    except UserError:
        return False
    return True


def _asked(fact: Fact) -> str:
    """The prompt that asks for a fact: one that is held out, if there is one."""
    return (*fact.held_out, *fact.prompts)[0]


def _bits_per_byte(lm) -> float:
    """Of the first rows of the held-out text, or of the targets of held-out pairs; NaN if there is none, or none that
    comes back from its tokens."""
    try:
        rows = sequences(lm, None, ROWS)
    except UserError:  # a model from elsewhere may have no corpus here
        return np.nan
    predicted_NL = np.asarray(rows.real_NL)[:, 1:]
    count = sum(len(lm.tokenizer.token_bytes[token]) for token in np.asarray(rows.tokens_NL)[:, 1:][predicted_NL])
    if not count:  # none of it comes back
        return np.nan
    value = float(np.asarray(lm.loss(**rows.arguments()), np.float64)[predicted_NL].sum()) / np.log(2) / count
    return value if value == value else np.inf


def broken(before: Drift, after: Drift) -> list[str]:
    """A line if the edits break the model."""
    if after.bits_per_byte <= (1 + BROKEN) * before.bits_per_byte or np.isnan(before.bits_per_byte):
        return []
    change = f"from {before.bits_per_byte:.3f} to {after.bits_per_byte:.3f} bits per byte"
    return [f"the model is broken: held-out text went {change}"]


def failed(edits: list[Edit], before: Measured, after: Measured) -> list[str]:
    """A line for each request whose edit changed nothing, or not enough."""
    failures = []
    for number, edit in enumerate(edits):
        name = f"request {number}, {edit.record.text!r}"
        if not any(edit.norms) or after.new[number] <= before.new[number]:
            failures.append(f"{name}: the edit changed nothing")
        elif after.new[number] <= after.old[number]:
            failures.append(f"{name}: {edit.record.target!r} is still more likely than {edit.record.target_new!r}")
    return failures
