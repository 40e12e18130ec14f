"""The results of a study in a tracker (`--tracker`): an entry for each run that has ended, and one for the verdicts.

An entry is sent once: tracker/sent.json, in the study's directory, has a digest of each one by tracker, under a lock that
processes share. So the command may be given again, with a tracker for the first time or with another one, and sends what is
missing. Verdicts that change, by another margin or by a rung that is added, are a new entry. An error of the tracker ends
the tracking with a warning, and not the study.
"""

import hashlib
import json
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

from xfresearch.runtime.files import exists, finite, in_bucket, inside, read_bytes, read_object, write_bytes, write_json
from xfresearch.runtime.schema import ANY, check
from xfresearch.studies import report, report_tables
from xfresearch.studies.allocation import Cell, Trial
from xfresearch.studies.design import Study, rungs
from xfresearch.studies.matching import Matched, tokens
from xfresearch.training import trackers
from xfresearch.training.callbacks import scalars
from xfresearch.training.claims import Busy
from xfresearch.training.workdir import locked

FOLDER, SENT, LINES = "tracker", "sent.json", "entries.jsonl"
WAIT = 1.0  # seconds, while another process sends


class Entry(NamedTuple):
    """One run of a tracker: a run of the study, or its verdicts."""

    name: str
    options: dict[str, Any]
    figures: dict[str, float]
    step: int

    def digest(self) -> str:
        return hashlib.sha256(json.dumps(self, sort_keys=True).encode()).hexdigest()[:16]


class Lines(trackers.Tracker):
    """Lines of JSON in tracker/entries.jsonl: name, options and numbers of each entry."""

    name = "jsonl"

    def begin(self, log: trackers.Log) -> str:
        self.errors = Exception if in_bucket(log.folder) else OSError  # gcsfs has errors of its own
        self._file = inside(log.folder, LINES)
        self._line: dict[str, Any] = {"name": log.name, **log.options}
        return ""

    def write(self, step: int, figures: dict[str, float]) -> None:
        self._line |= {"step": step, **figures}

    def finish(self, finished: bool) -> None:
        before = read_bytes(self._file) if exists(self._file) else b""
        write_bytes(self._file, before + json.dumps(self._line).encode() + b"\n")


class Record:
    """A study in a tracker. Raises UserError if its library is not installed."""

    def __init__(self, study: Study, folder, name: str):
        self._study, self._name, self._folder = study, folder.name or "study", folder / FOLDER
        self._tracker = Lines() if name == Lines.name else trackers.tracker_of(name, "--tracker")
        self._open, self._seen = True, dict[Trial, Mapping]()

    def runs(self, solved: Mapping[Cell, Matched], results: Mapping[Trial, Mapping]) -> None:
        """Sends the runs that have ended and were not sent."""
        new = {trial: result for trial, result in results.items() if self._seen.get(trial) is not result}
        self._send([of_run(self._study, trial, solved[trial.cell], result) for trial, result in new.items()])
        self._seen |= new

    def verdicts(self, outcome: Mapping) -> None:
        """Sends the verdicts of a study whose runs have all ended, unless the same ones were sent."""
        self._send([of_verdicts(outcome)])

    def _send(self, entries: Sequence[Entry]) -> None:
        if not (entries and self._open):
            return
        with _alone(self._folder):
            file = inside(self._folder, SENT)
            sent = check(read_object(file), {ANY: [str]}, file) if exists(file) else {}
            known = sent.setdefault(self._tracker.name, [])
            for entry in entries:
                if (digest := entry.digest()) not in known:
                    if not self._sends(entry):
                        return
                    known.append(digest)
                    write_json(file, sent)

    def _sends(self, entry: Entry) -> bool:
        """Whether the tracker took an entry. It is not asked again after an error."""
        log = trackers.Log(self._folder, entry.name, {"study": self._name, **entry.options}, study=self._name)
        try:
            self._tracker.begin(log)
            if entry.figures:
                self._tracker.write(entry.step, entry.figures)
            self._tracker.finish(True)
        except self._tracker.errors as error:
            again = "the same command again sends what is missing"
            print(f"warning: --tracker={self._tracker.name}: {trackers.first_line(error)}; {again}", file=sys.stderr)
            self._open = False
        return self._open


def of_run(study: Study, trial: Trial, matched: Matched, result: Mapping) -> Entry:
    """The entry of a run: its cell, rate and seed, and its measures on held-out data and by probes. Measures that are not
    finite are left out."""
    rung = next(each for each in rungs(study) if each.name == trial.cell.rung)
    columns = report_tables.of_run(rung, trial, matched.parameters, int(tokens(matched.config)))
    options = dict(zip(report_tables.RUN, columns, strict=False)) | {"fingerprint": result["fingerprint"]}
    if "diverged" in result:
        options["diverged"] = result["diverged"]
    figures = _figures("evaluation", result["evaluation"]) | _figures("probes", result.get("probes"))
    return Entry(trial.folder, options, figures, result.get("step", 0))


def of_verdicts(outcome: Mapping) -> Entry:
    """The entry of a study's verdicts: a sentence for each arm, and its difference with its interval at each rung."""
    study = outcome["study"]
    compared = [arm for arm in study["arms"] if arm != study["baseline"]]
    sentences = dict(zip(compared, report.verdicts(outcome), strict=True))
    design = {name: study[name] for name in ("question", "rule", "baseline", "metric", "margin")}
    version = outcome["versions"][-1]["digest"] if outcome["versions"] else ""
    figures: dict[str, float] = {}
    for rung, arm, _, _, mean, low, high, *_, verdict in report_tables.differences(outcome):
        if verdict != report_tables.NO_VERDICT:
            figures |= _figures(f"{rung}/{arm}", {"difference": mean, "low": low, "high": high})
    return Entry("verdicts", {"use": "verdicts", **design, "version": version, "verdicts": sentences}, figures, 0)


def _figures(name: str, measures: Mapping | None) -> dict[str, float]:
    """The numbers that are finite, with their paths: the same ones of a result in memory and of its file."""
    plain = {key: None if value is None else float(value) for key, value in (measures or {}).items()}
    return {path: float(value) for path, value in scalars(name, finite(plain))}


@contextmanager
def _alone(folder) -> Iterator[None]:
    """No other process sends while the `with` block runs."""
    with ExitStack() as stack:
        while True:
            try:
                stack.enter_context(locked(folder))
                break
            except Busy:
                time.sleep(WAIT)
        yield
