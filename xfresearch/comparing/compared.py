"""What `xf.compare` returns: a comparison that a notebook shows as the command prints it."""

from pathlib import Path
from typing import Any

from xfresearch.comparing import page, text
from xfresearch.comparing.collecting import Comparison
from xfresearch.runtime.run_rows import Rows

PAIR = ("difference", "p_holm", "verdict")  # of a run with the first one


class Compared:
    """A comparison. Printed, it is the text of the command."""

    def __init__(self, comparison: Comparison):
        self._comparison = comparison

    def __repr__(self) -> str:
        return text.text(self._comparison)

    @property
    def figures(self) -> dict[str, Any]:
        """Everything that the command writes with --json."""
        return self._comparison.data

    @property
    def table(self) -> Rows:
        """A row for each run: its costs, its held-out loss, and the difference to the first run with its interval (low,
        high) over the held-out text."""
        rows = Rows()
        for path, run in self.figures["runs"].items():
            own = run["held_out"] or {}
            pair = own.get("pair", {})
            low, high = pair.get("interval", (None, None))
            costs = {name: value for name, value in run.items() if name != "held_out"}
            loss = {"loss": own.get("value"), "standard_error": own.get("standard_error")}
            rows.append({"run": path, **costs, **loss, **{name: pair.get(name) for name in PAIR}, "low": low, "high": high})
        return rows

    @property
    def groups(self) -> Rows:
        """A row for each group of runs that differ in the seed alone: the losses, their mean, the verdict on the change."""
        return Rows(self.figures["groups"])

    def report(self, path: str | Path) -> Path:
        """Writes the page of --html to `path`, and returns it."""
        page.write(path, self._comparison)
        return Path(path)
