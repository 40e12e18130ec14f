"""The held-out metrics of the checkpoints of a run, kept in its directory: an evaluation of all of them that was interrupted
goes on, and numbered jobs (runtime/jobs.py) may evaluate one each.

    <workdir>/evaluations/<digest of what is measured>/<step>.json
"""

import hashlib
import json
import math
import sys

from xfresearch.checkpoints import store
from xfresearch.data.coverage import shares
from xfresearch.evaluation.held_out import settings
from xfresearch.runtime import distributed
from xfresearch.runtime.errors import UserError
from xfresearch.runtime.files import exists, inside, read_object, write_json


class Kept:
    """The results of one measurement: the data, the windows, how many of them are read (--limit), and whether each document
    has a result of its own."""

    def __init__(self, workdir, data, per_document: bool):
        lost = [shares(data.meta)] if shares(data.meta) else []  # earlier versions counted what does not come back
        measured = json.dumps([settings(data), data.digest, len(data.rows), per_document, *lost], sort_keys=True)
        self.workdir = workdir
        self.folder = inside(workdir, "evaluations", hashlib.sha256(measured.encode()).hexdigest()[:16])

    def read(self, step: int) -> dict | None:
        """The result of a checkpoint, in every process; None if there is none, or if it is of another checkpoint of that
        step."""
        return distributed.shared(self._read(step) if distributed.first() else None)

    def _read(self, step: int) -> dict | None:
        file = inside(self.folder, f"{step}.json")
        kept = read_object(file) if exists(file) else {}
        if not kept or kept.get("checkpoint") != store.digest_of(self.workdir, step):
            return None
        return {name: math.nan if value is None else value for name, value in kept["result"].items()}

    def write(self, step: int, result: dict) -> None:
        """Keeps a result. It is only a warning that the directory cannot be written: the run may be somebody else's."""
        if not distributed.first():
            return
        try:
            content = {"checkpoint": store.digest_of(self.workdir, step), "result": result}
            write_json(inside(self.folder, f"{step}.json"), content)
        except (OSError, UserError) as error:
            print(f"warning: the result of step {step} is not kept: {error}", file=sys.stderr)
