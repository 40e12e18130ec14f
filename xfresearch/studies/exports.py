"""The results of a study for other programs: runs.csv (a line for each run), differences.csv and differences.tex (a line for
each arm at each rung), and, if an arm has a verdict, differences.svg."""

import csv
import io
from collections.abc import Iterable, Mapping

from xfresearch.pages.colours import as_file
from xfresearch.runtime.files import remove, write_text
from xfresearch.studies.cells import Trial
from xfresearch.studies.design import Rung
from xfresearch.studies.report_tables import NO_VERDICT
from xfresearch.studies.running import less_is_better

RUN = ("rung", "size", "tokens_per_parameter", "arm", "parameters", "tokens", "learning_rate", "seed", "use", "metric")
DIFFERENCE = ("rung", "arm", "parameters", "tokens", "difference", "low", "high", "error", "p", "p_equivalent", "verdict")


def write_runs(folder, outcome: Mapping, results: Mapping[Trial, Mapping]) -> None:
    """runs.csv, in a study's directory."""
    write_text(folder / "runs.csv", _csv(RUN, runs(outcome, results)))


def write_differences(folder, outcome: Mapping, picture: str) -> None:
    """The other files. picture: an SVG element; '' for none, which removes that of earlier results."""
    rows = differences(outcome)
    write_text(folder / "differences.csv", _csv(DIFFERENCE, rows))
    write_text(folder / "differences.tex", latex(outcome, rows))
    if picture:
        write_text(folder / "differences.svg", as_file(picture))
    else:
        remove(folder / "differences.svg")


def runs(outcome: Mapping, results: Mapping[Trial, Mapping]) -> list[tuple]:
    """A row for each run, with the columns RUN. The metric is such that less is better; '' for a run that diverged."""
    metric, rows = outcome["study"]["metric"], []
    for trial, result in results.items():
        here = outcome["sizes"][trial.cell.rung]
        arm = here["arms"][trial.cell.arm]
        value = less_is_better(metric, result["evaluation"].get(metric))
        rung = Rung(trial.cell.rung, here["size"], here["budget"])
        rows.append((*of_run(rung, trial, arm["parameters"], arm["tokens"]), value if value == value else ""))
    return rows


def of_run(rung: Rung, trial: Trial, parameters: int, tokens: int) -> tuple:
    """The columns RUN of a run, without the metric."""
    use = "chooses the rate" if trial.tunes else "decides"
    named = (rung.name, rung.size, rung.budget or "", trial.cell.arm, parameters, tokens)
    return (*named, trial.rate, trial.seed, use)


def differences(outcome: Mapping) -> list[tuple]:
    """A row for each arm but the baseline at each rung, with the columns DIFFERENCE; without a verdict, '' as figures."""
    rows, baseline = [], outcome["study"]["baseline"]
    for rung, here in outcome["sizes"].items():
        for name, arm in here["arms"].items():
            if name != baseline:
                rows.append((rung, name, arm["parameters"], arm["tokens"], *_figures(arm), arm.get("verdict", NO_VERDICT)))
    return rows


def _figures(arm: Mapping) -> tuple:
    """The columns DIFFERENCE from the difference to the second p-value."""
    if "difference" not in arm:
        return ("",) * 6
    each = arm["difference"]
    error = each.get("error", "")  # t tests of pairs, from before the ladder, keep none
    return each["mean"], each["low"], each["high"], error, arm["p_corrected"], arm["p_equivalent"]


def latex(outcome: Mapping, rows: Iterable[tuple]) -> str:
    """A table for a paper, with the rules of booktabs."""
    baseline = _escaped(outcome["study"]["baseline"])
    lines = [r"\begin{tabular}{llrrl}", r"\toprule", r"rung & arm & difference & 95\,\% interval & verdict \\", r"\midrule"]
    for rung, arm, _, _, mean, low, high, *_, verdict in rows:
        figures = " & " if verdict == NO_VERDICT else f"${mean:+.4f}$ & $[{low:+.4f}, {high:+.4f}]$"
        lines.append(rf"{_escaped(rung)} & {_escaped(arm)} & {figures} & {verdict} \\")
    return "\n".join([f"% beside {baseline}; less is better", *lines, r"\bottomrule", r"\end{tabular}", ""])


def _escaped(text: str) -> str:
    return text.replace("_", r"\_")


def _csv(columns: Iterable[str], rows: Iterable[tuple]) -> str:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerows([columns, *rows])
    return text.getvalue()
