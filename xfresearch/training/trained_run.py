"""A run that was trained, by its directory: what `xf.train` returns, and what a notebook opens again."""

from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from etils import epath

from xfresearch.checkpoints import store
from xfresearch.loading.language_model import LanguageModel
from xfresearch.loading.loading import load
from xfresearch.models.words import model_line
from xfresearch.pages.cards import Card
from xfresearch.pages.panel import panel_pictures
from xfresearch.pages.plots import plots
from xfresearch.run_config.config import Config
from xfresearch.run_config.config_files import read_json
from xfresearch.runtime.errors import UserError
from xfresearch.runtime.files import exists, inside
from xfresearch.runtime.run_rows import Rows
from xfresearch.training.metrics import last_written, read_metrics
from xfresearch.training.report import charts, write_report
from xfresearch.training.workdir import lineage, starts

if TYPE_CHECKING:
    from matplotlib.figure import Figure


class Run(Card):
    """The run in a directory. Everything is read from there when it is asked for.

        run = xf.Run("runs/a")
        run.history.where(kind="evaluation")["loss"]
        run.lm.generate("def main(")

    `stopped_by` is why `xf.train` ended it early: 'SIGINT', the text of StopTraining, or ''. Raises UserError if the
    directory has no run.
    """

    def __init__(self, workdir: str | Path, stopped_by: str = ""):
        self.workdir = epath.Path(workdir).expanduser()
        self.stopped_by = stopped_by
        self.config: Config = read_json(inside(self.workdir, "config.json"))

    def _title(self) -> str:
        return f"Run {self.workdir}"

    def _facts(self) -> dict[str, str]:
        facts = {"model": model_line(self.config.model, self.config.sequence_length)}
        facts["step"] = f"{self.step:,} of {self.config.steps:,}"
        facts |= {"best": f"held-out loss {self.best[1]:.4f} at step {self.best[0]:,}"} if self.best else {}
        return facts | ({"stopped by": self.stopped_by} if self.stopped_by else {})

    def _picture(self) -> tuple[str, str] | None:
        """The curves of the loss."""
        drawn = [chart for chart in charts(self.config, self.history) if chart.title == "Loss"]
        return (drawn[0].title, drawn[0].svg()) if drawn else None

    @property
    def step(self) -> int:
        """The update of the newest checkpoint; 0 without one."""
        return max(store.steps(self.workdir), default=0)

    @property
    def finished(self) -> bool:
        """Whether all updates are made."""
        return self.step == self.config.steps

    @property
    def history(self) -> Rows:
        """The rows of metrics.jsonl: of each logged update (`kind` is 'train'), evaluation and panel."""
        file = inside(self.workdir, "metrics.jsonl")
        return Rows(read_metrics(file) if exists(file) else [])

    @property
    def best(self) -> tuple[int, float] | None:
        """(step, loss) of the best evaluation on held-out data, among those of as much text as the first one."""
        rows = [row for row in self.history.where(kind="evaluation") if row["loss"] is not None]
        same = [(row["loss"], row["step"]) for row in rows if row["tokens"] == rows[0]["tokens"]]
        return min(same)[::-1] if same else None

    def figures(self, columns: int = 1) -> "dict[str, Figure]":
        """{title: Matplotlib's figure} of the report's curves and of its pictures of layers, as wide as `columns`, 1 or 2,
        of a printed page. Baselines of compression are in the report alone."""
        rows = self.history
        return plots([*charts(self.config, rows), *panel_pictures(rows)], columns)

    @cached_property
    def lm(self) -> LanguageModel:
        """The model of the newest good checkpoint, as `xf.load` reads it."""
        return load(self.workdir)

    @property
    def report(self) -> Path:
        """The page with curves, samples and config. If there is none of the last row of metrics.jsonl, as after a signal, it
        is written now, without samples."""
        file, metrics = self.workdir / "report.html", inside(self.workdir, "metrics.jsonl")
        newest = last_written(metrics) if exists(metrics) else 0.0
        whole = exists(file) and file.stat().mtime >= int(newest)  # of an epath, in whole seconds
        return file if whole else self._write_report()

    def _write_report(self) -> Path:
        evaluations = self.history.where(kind="evaluation")
        if not self.history:
            raise UserError(f"{self.workdir} has no report: it has made no update")
        begun = starts(self.workdir)
        machine = {**begun[-1]["machine"], **begun[-1]["versions"], "commit": begun[-1]["commit"]} if begun else {}
        hidden = ("kind", "unix_seconds")
        result = {name: value for name, value in (evaluations or [{}])[-1].items() if name not in hidden}
        written: Path = write_report(
            self.workdir,
            config=self.config,
            machine=machine,
            baselines={},
            result=result | {"step": self.history[-1]["step"], "starts": len(begun)},
            samples=[],
            commands={},
            lineage=lineage(self.workdir),
        )
        return written
