"""python -m xfresearch.compare RUN RUN ... [--html FILE] [--margin X] [--data CORPUS[:PATH]] [--split NAME] [--limit N]

Compares runs with the first one: the options that differ, costs, curves, the held-out loss on the same text, and the
tasks on which xfresearch.evaluate has evaluated them. A run that has not finished takes part with its newest
checkpoint. A difference has a 95 % interval from pairs: documents or sequences for the loss, items for a task.
"""

import math
from argparse import ArgumentTypeError, Namespace
from collections.abc import Sequence
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

from xfresearch.evaluation import held_out
from xfresearch.pages.cards import Card, some
from xfresearch.runtime import command, distributed
from xfresearch.runtime.errors import UserError
from xfresearch.runtime.files import check_output, write_json
from xfresearch.runtime.run_rows import Rows

if TYPE_CHECKING:  # --help must not wait for them
    from xfresearch.comparing.collecting import Comparison
    from xfresearch.training.trained_run import Run

EPILOG = """\
examples:
  python -m xfresearch.compare runs/a runs/b
  python -m xfresearch.compare runs/a runs/b runs/c --html compared.html --json compared.json
  python -m xfresearch.compare runs/a runs/b --margin 0.01 --data text_files:notes/*.txt
  python -m xfresearch.compare runs/a/checkpoints/500 runs/a/checkpoints/1000 --limit 256

docs/compare.md explains each figure and verdict."""
PAIR = ("difference", "p_holm", "verdict")  # of a run with the first one


def main(arguments: list[str]) -> None:
    options = parse(arguments)
    distributed.check(options)
    from xfresearch.loading import loading

    workdir, _ = loading.locate(options.runs[0])  # error logs go there
    with distributed.joined(options, str(workdir)):
        from xfresearch.comparing import collecting

        compared = Compared(collecting.collect(options))
        if not distributed.first():
            return
        print(compared)
        if options.json:
            write_json(options.json, compared.figures)
        if options.html:
            compared.report(options.html)


class Compared(Card):
    """A comparison. Printed, it is the text of the command; as the value of a cell, a few lines of it."""

    def __init__(self, comparison: "Comparison"):
        self._comparison = comparison

    def __str__(self) -> str:
        from xfresearch.comparing import text

        return text.text(self._comparison)

    def _title(self) -> str:
        return f"Comparison of {len(self.figures['runs'])} runs, in {self.figures['unit']}"

    def _facts(self) -> dict[str, str]:
        """What was compared, and each run's loss beside the first one's."""
        held_out, notes = self.figures["held_out"], self.figures["notes"]
        facts = {"options": some([*self.figures["differences"]]) or "the same"}
        facts |= {"held out": f"{held_out['corpus']}, {held_out['split']}"} if held_out else {}
        facts["losses"] = some([_in_words(row) for row in self.table])
        return facts | ({"notes": str(len(notes))} if notes else {})

    def _rows(self) -> list[tuple[str, ...]]:
        from xfresearch.comparing import text

        rows = [(path, *text.loss_cells(run)) for path, run in self.figures["runs"].items()]
        return [("run", *text.LOSS_TITLES), *rows]

    def _picture(self) -> tuple[str, str] | None:
        """The curves by step: of the held-out loss, or of the training loss without it."""
        from xfresearch.comparing import page

        drawn = page.charts(self._comparison.runs, self.figures["measure"], self.figures["unit"])["step"]
        return (drawn[-1].title, drawn[-1].svg()) if drawn else None

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
        from xfresearch.comparing import page

        page.write(path, self._comparison)
        return Path(path)


def _in_words(row: dict[str, Any]) -> str:
    """A row of the table in words."""
    if row["loss"] is None:
        return f"{row['run']} unknown"
    difference = f" ({row['difference']:+.4f}, {row['verdict']})" if row["difference"] is not None else ""
    return f"{row['run']} {row['loss']:.4f}{difference}"


def compare(
    runs: "Sequence[str | PathLike[str] | Run]",
    *,
    margin: float = 0.0,
    task_margin: float = 0.0,
    data: str = "",
    split: str = "",
    sequence_length: int = 0,
    stride: int = 0,
    limit: int = 0,
    batch_size: int = 0,
) -> Compared:
    """Compares runs with the first one, as the command does. The options are its flags.

    runs: what `xf.train` returned, directories of runs, checkpoints, Hugging Face folders. Raises UserError for a path that
    is no model, an option that does not fit, and runs that cannot read the same data.
    """
    from xfresearch.comparing import collecting

    numbers = {"margin": margin, "task-margin": task_margin, "sequence-length": sequence_length, "stride": stride}
    given = {"data": data, "split": split, "limit": limit, "batch-size": batch_size} | numbers
    flags = [f"--{name}={value}" for name, value in given.items() if value]
    return Compared(collecting.collect(parse([*(str(getattr(run, "workdir", run)) for run in runs), *flags])))


def parser() -> command.Parser:
    """The flags of the command."""
    made = command.Parser(prog="python -m xfresearch.compare", description=__doc__, epilog=EPILOG)
    models = "a run's directory, one of its checkpoints, a Hugging Face folder, or a .bin file of llama2.c"
    made.add_argument("runs", nargs="+", metavar="RUN", help=f"{models}; the first is what the others are compared with")
    add = made.add_argument
    add("--html", metavar="FILE", help="also write a page with tables and curves, in one file that needs no network")
    add("--json", metavar="FILE", help="also write the results as JSON")
    equal = "two runs are equal if the interval of the difference lies between -X and X"
    add("--margin", type=margin, default=0.0, metavar="X", help=f"{equal}, in the unit of the loss (default: none are)")
    add("--task-margin", type=margin, default=0.0, metavar="X", help="the same for a task's share of correct answers")
    held_out.add_flags(made)
    distributed.add_flags(made)
    return made


def parse(arguments: list[str]) -> Namespace:
    options = parser().parse_args(arguments)
    if len(options.runs) < 2:
        raise UserError(f"RUN={options.runs[0]} is not allowed alone: give two runs or more")
    for run in options.runs:
        if options.runs.count(run) > 1:
            raise UserError(f"RUN={run} is not allowed twice: give different runs, or checkpoints of one run")
    if options.html is not None:
        check_output("--html", options.html)
    return options


def margin(text: str) -> float:
    """An argparse type: a finite number above 0."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise ArgumentTypeError(f"{text} is not allowed: it must be a finite number above 0")
    return value


if __name__ == "__main__":
    command.run(main)
