"""Each request on its own: as papers measure an edit, on the model before all edits."""

from collections.abc import Callable, Sequence

import numpy as np

from xfresearch.data.facts import Fact
from xfresearch.data.records import Record
from xfresearch.editing.metrics import Measured, consistency
from xfresearch.editing.report import Drift, Report
from xfresearch.editing.requests import prepared
from xfresearch.progress import stage


def alone(method: Callable, lm, requests: Sequence[Record], known: Sequence[Fact] | None = None, **settings) -> Report:
    """The report of `method` (editing.rome, ...) on each request, every time on the model `lm`; settings are those of the
    method. Bits per byte after an edit are the mean over the edits; the other facts are not asked."""
    requests, known = prepared(lm, requests, known)
    reports = []
    with stage(f"{method.__name__}, one by one", len(requests), "requests") as progress:
        for record in requests:
            reports.append(method(lm, [record], known=(), **settings)[1])
            progress.update(1)
    edits = [edit for report in reports for edit in report.edits]
    before, after = (_joined([getattr(report, name) for report in reports], requests) for name in ("before", "after"))
    drifts = reports[0].drift_before, Drift(float(np.mean([r.drift_after.bits_per_byte for r in reports])), np.nan)
    failures = [line.replace("request 0,", f"request {n},") for n, report in enumerate(reports) for line in report.failures]
    return Report(method.__name__, reports[0].settings | {"alone": True}, edits, before, after, *drifts, failures)


def _joined(parts: list[Measured], requests: Sequence[Record]) -> Measured:
    values = {name: np.concatenate([part.values[name] for part in parts]) for name in parts[0].values}
    texts = tuple(text for part in parts for text in part.texts)
    if "consistency" in values:  # its document frequencies are those of all requests
        values["consistency"] = consistency(texts, [record.references for record in requests])
    new, old = (np.concatenate([getattr(part, name) for part in parts]) for name in ("new", "old"))
    return Measured(values, new, old, texts)
