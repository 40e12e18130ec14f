"""The tables of a study, made of results.json: those of its report, and for other programs runs.csv (a line for each run),
differences.csv and differences.tex (a line for each arm at each rung)."""

import csv
import io
import math
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

from xfresearch.runtime.files import write_text
from xfresearch.runtime.summaries import mean_interval
from xfresearch.runtime.tables import PLUS_MINUS
from xfresearch.studies.allocation import Trial
from xfresearch.studies.design import Rung
from xfresearch.studies.measurement import less_is_better

UNITS = {"bits_per_byte": "bits per byte", "loss": "nats per token", "accuracy": "share of errors"}
NO_VERDICT = "no verdict"
DIFFERENCE = ("difference", "95 % interval", "p of no difference", "p of equivalence", "verdict")
RUN = ("rung", "size", "tokens_per_parameter", "arm", "parameters", "tokens", "learning_rate", "seed", "use", "metric")
OF_AN_ARM = ("rung", "arm", "parameters", "tokens", "difference", "low", "high", "error", "p", "p_equivalent", "verdict")
LADDER_ABOUT = (
    "The mean of the differences, which varies less than each of them. It answers the question only if they are similar."
)
LAW_ABOUT = (
    "L(N, D) = E + A N^-alpha + B D^-beta for N parameters and D tokens. The last columns are its difference from the "
    "baseline's at N = {parameters:.3g}, D = {tokens:.3g}, with the noise of runs."
)
METRIC_ABOUT = (
    "The metric is {unit}, where less is better, with the standard deviation of runs in brackets. {statistics} Seconds are "
    "of all updates."
)
PROBES_ABOUT = f"Means over the runs that decide; {PLUS_MINUS}."
ABOUT_EACH = {  # probes: what a reader has to know of them
    ("copying", "recall"): "Copying and recall are nats that a model saves for each token: more is better.",
    ("induction",): "More is better for induction.",
    ("induction", "sink"): "Memory slots and learned sinks take weight from tokens, so induction and sink fall with them.",
}
SAVED_ABOUT = (
    "The share of the baseline's cost that an arm saves if it stops at the last metric of the baseline, and the share of "
    "the arm's cost that the baseline saves if it stops at that of the arm. Both are read off the curves (on "
    "evaluation.sequences sequences). Their earlier points have a learning rate that has not decayed yet, so a run of that "
    "length would save more."
)
RATES_ABOUT = (
    "Means over the runs of each rate, with their number if it is not 1. Sensitivity is the mean rise of the metric over "
    "the best rate of the grid."
)
DETAILS_ABOUT = (
    "A difference is the mean of the pairs less the rise. It has an error by the seeds, which its interval shows, and one "
    "by the held-out text, which all runs share and its interval does not show."
)


class Table(NamedTuple):
    title: str
    about: str
    columns: tuple[str, ...]
    rows: list[tuple[str, ...]]

    def markdown(self) -> list[str]:
        """A section."""
        about = [self.about, ""] if self.about else []
        return [f"## {self.title}", "", in_markdown(self.columns, self.rows), "", *about]


def main_tables(outcome: Mapping) -> list[Table]:
    """The tables of results: over all sizes together, at each size, of probes, and of saved cost. Empty tables are left
    out."""
    first, *others = [_of_size(outcome, size) for size in outcome["sizes"]]
    sizes = first, *(table._replace(about="") for table in others)
    return [table for table in (_ladder(outcome), *sizes, _laws(outcome), _probes(outcome), _saved(outcome)) if table.rows]


def appendix(outcome: Mapping) -> list[Table]:
    """The tables with which a reader can check the results. Versions of the rule are left out if there is only one."""
    return [table for table in (_versions(outcome), _rates(outcome), _details(outcome)) if table.rows]


def _of_arms(outcome: Mapping, title: str, about: str, columns: Iterable[str], cells: Callable) -> Table:
    """A table with a row for each arm at each size; cells(size, arm) are its columns after the names of both, and none of
    them leave it out."""
    every = [(size, name, cells(size, arm)) for size, here in outcome["sizes"].items() for name, arm in here["arms"].items()]
    return Table(title, about, ("size", "arm", *columns), [(size, name, *each) for size, name, each in every if each])


def _ladder(outcome: Mapping) -> Table:
    """All rungs together; no rows for a study of one."""
    rows = []
    for name, arm in outcome["ladder"].items() if len(outcome["sizes"]) > 1 else ():
        each = arm["difference"]
        shapes = [arm["changes"][axis]["shape"] if axis in arm["changes"] else "" for axis in ("sizes", "budgets")]
        rows.append((name, f"{each['mean']:+.4f}", interval(each), f"{arm['p_corrected']:.2g}", arm["verdict"], *shapes))
    columns = ("arm", "difference", "95 % interval", "p of no difference", "verdict", "along sizes", "along budgets")
    return Table(all_sizes(outcome).capitalize(), LADDER_ABOUT, columns, rows)


def _laws(outcome: Mapping) -> Table:
    """L(N, D) of each arm, and its difference from the baseline beyond the ladder."""
    rows, about = [], ""
    for name, law in outcome["laws"].items():
        each = law["beyond"]
        about = LAW_ABOUT.format(**each)
        numbers = [f"{law[key]:.3g}" for key in ("E", "A", "B", "alpha", "beta")]
        rows.append((name, *numbers, f"{each['difference']:+.4f}", interval(each)))
    columns = ("arm", "E", "A", "B", "alpha", "beta", "difference beyond", "95 % interval")
    return Table("Law of the losses", about, columns, rows)


def _of_size(outcome: Mapping, size: str) -> Table:
    """All arms at a size, the baseline first."""
    study, here = outcome["study"], outcome["sizes"][size]
    names = [study["baseline"], *(name for name in here["arms"] if name != study["baseline"])]
    without = {*here["failures"], *names[1:]}
    rows = [_row(name, here["arms"][name], NO_VERDICT if name in without else "") for name in names]
    columns = ("arm", "metric", *DIFFERENCE, "parameters", "learning rate", "seconds")
    return Table(size, METRIC_ABOUT.format(unit=UNITS[study["metric"]], statistics=outcome["statistics"]), columns, rows)


def _row(name: str, arm: Mapping, otherwise: str) -> tuple[str, ...]:
    """The columns of an arm. otherwise: its verdict if it has none."""
    cells: tuple[str, ...] = ("", "", "", "", otherwise)
    if each := arm.get("difference"):
        p_values = f"{arm['p_corrected']:.2g}", f"{arm['p_equivalent']:.2g}"
        cells = f"{each['mean']:+.4f}", interval(each), *p_values, arm["verdict"]
    if not arm["values"]:
        return (name, "", *cells, f"{arm['parameters']:,}", "", "")
    rate = f"{arm['rate']:g}" + (f" ({edge_in_words(arm)} tried)" if arm["edge"] else "")
    metric = "" if arm["mean"] is None else f"{arm['mean']:.4f} ({arm['deviation']:.4f})"
    return (name, metric, *cells, f"{arm['parameters']:,}", rate, _known(arm["seconds"], ".0f"))


def _probes(outcome: Mapping) -> Table:
    """The mean of each probe with the half width of its interval, of every arm."""
    names = outcome["study"]["probes"]
    about = [PROBES_ABOUT, *(text for probes, text in ABOUT_EACH.items() if set(probes) & set(names))]

    def cells(size: str, arm: Mapping) -> list[str]:
        return [_with_half(arm["probes"].get(name, [])) for name in names]

    return _of_arms(outcome, "Probes", " ".join(about), names, cells)


def _with_half(values: list) -> str:
    """The mean over seeds and the half width of its interval, with the number of seeds if some have no value; '' for a probe
    that does not apply."""
    known = [value for value in values if value is not None]
    mean, half = mean_interval(known)
    width = f" +- {half:.3f}" if len(known) > 1 else ""
    left_out = f" ({len(known)} of {len(values)} seeds)" if len(known) < len(values) else ""
    return f"{mean:.3f}{width}{left_out}" if known else ""


def _saved(outcome: Mapping) -> Table:
    """The share of the cost that each arm saves at the baseline's last metric, and the baseline at the arm's last metric."""
    columns = ("FLOPs: the arm saves", "baseline saves", "seconds: the arm saves", "baseline saves")

    def cells(size: str, arm: Mapping) -> list[str]:
        shares = arm.get("saved") or {}
        pairs = [shares.get(axis, ("", "")) for axis in ("training_flops", "seconds")] if shares else []
        return [_share(share) for pair in pairs for share in pair]

    return _of_arms(outcome, "Cost at equal quality", SAVED_ABOUT, columns, cells)


def _share(share: float | str | None) -> str:
    return "never reached" if share is None else share if isinstance(share, str) else f"{share:+.1%}"


def _versions(outcome: Mapping) -> Table:
    """The versions of the design and their verdicts."""
    every = outcome["versions"]
    rows: list[tuple[str, ...]] = []
    for number, each in enumerate(every, 1) if len(every) > 1 else ():
        name = f"{number}" + (f", of {each['of']}" if each["of"] else "")
        said = " ".join(each["verdicts"] or ["none: it did not end"])
        rows.append((name, each["date"], "; ".join(each["changes"]) or "the first", str(each["seen"]["runs"]), said))
    columns = ("version", "written", "what changed", "runs that existed, of its own", "what it said")
    return Table("Versions of the rule", "", columns, rows)


def _rates(outcome: Mapping) -> Table:
    """The learning rates that every arm tried, and their sensitivity: the mean rise over the best (estimates.py)."""
    tuned_at = outcome["study"]["tune_at"] or outcome["sizes"]

    def cells(size: str, arm: Mapping) -> tuple[str, ...]:
        tried = sorted(arm["tried"].items(), key=lambda each: float(each[0]))
        words = ", ".join(f"{float(rate):g}: {_mean(values)}" for rate, values in tried)
        return (words, _known(arm["sensitivity"], ".4f")) if size in tuned_at else ()

    return _of_arms(outcome, "Learning rates", RATES_ABOUT, ("learning rate: metric", "sensitivity"), cells)


def _mean(values: list) -> str:
    if any(value is None or not math.isfinite(value) for value in values):
        return "diverged"
    number = f" ({len(values)})" if len(values) > 1 else ""
    return f"{sum(values) / len(values):.4f}{number}"


def _details(outcome: Mapping) -> Table:
    """For every arm and size: the gain by pairing, the errors of the difference, and the option that was solved for."""
    errors = ("rise", "bootstrap interval", "correlation of pairs", "deviation of pairs", "error by seeds", "error by text")
    columns = (*errors, "solved for", "FLOPs", "of what is matched")

    def cells(size: str, arm: Mapping) -> tuple[str, ...]:
        own = [""] * len(errors)
        if each := arm.get("difference"):
            bootstrap = f"{each['bootstrap_low']:+.4f} to {each['bootstrap_high']:+.4f}"
            by_text = _known(arm["difference_sampling_error"], ".4f")
            own = [f"{each['rise']:+.4f}", bootstrap, f"{each['correlation']:.2f}" if each["n"] > 2 else ""]
            own += [f"{each['deviation']:.4f}", f"{seeds_error(each):.4f}", by_text]
        return (*own, arm["solved"], f"{arm['training_flops']:.3g}", f"{arm['mismatch']:+.2%}")

    return _of_arms(outcome, "Pairs and sizes", DETAILS_ABOUT, columns, cells)


def seeds_error(difference: Mapping) -> float:
    """The standard error of a mean difference by its seeds."""
    return difference["deviation"] / math.sqrt(difference["n"])


def interval(each: Mapping) -> str:
    return f"{each['low']:+.4f} to {each['high']:+.4f}"


def _known(value: float | None, form: str) -> str:
    return "" if value is None else f"{value:{form}}"


def edge_in_words(arm: Mapping) -> str:
    """Of the learning rates that were tried, where the best one lies."""
    return "the smallest" if arm["edge"] == "low" else "the largest"


def all_sizes(outcome: Mapping) -> str:
    if outcome["study"]["budgets"]:
        return f"all {len(outcome['sizes'])} rungs"
    return "both sizes" if len(outcome["sizes"]) == 2 else "all sizes"


def in_markdown(columns, rows) -> str:
    """A table in Markdown."""
    return "\n".join("| " + " | ".join(map(str, line)) + " |" for line in (columns, ["---"] * len(columns), *rows))


def write_runs(folder, outcome: Mapping, results: Mapping[Trial, Mapping]) -> None:
    """runs.csv, in a study's directory. The metric is such that less is better; '' for a run that diverged."""
    metric, rows = outcome["study"]["metric"], []
    for trial, result in results.items():
        here = outcome["sizes"][trial.cell.rung]
        arm = here["arms"][trial.cell.arm]
        value = less_is_better(metric, result["evaluation"].get(metric))
        rung = Rung(trial.cell.rung, here["size"], here["budget"])
        rows.append((*of_run(rung, trial, arm["parameters"], arm["tokens"]), value if value == value else ""))
    write_text(folder / "runs.csv", _csv(RUN, rows))


def of_run(rung: Rung, trial: Trial, parameters: int, tokens: int) -> tuple:
    """The columns RUN of a run, without the metric."""
    use = "chooses the rate" if trial.tunes else "decides"
    named = (rung.name, rung.size, rung.budget or "", trial.cell.arm, parameters, tokens)
    return (*named, trial.rate, trial.seed, use)


def write_differences(folder, outcome: Mapping) -> None:
    """differences.csv and differences.tex."""
    rows = differences(outcome)
    write_text(folder / "differences.csv", _csv(OF_AN_ARM, rows))
    write_text(folder / "differences.tex", _latex(outcome, rows))


def differences(outcome: Mapping) -> list[tuple]:
    """A row for each arm but the baseline at each rung, with the columns OF_AN_ARM; without a verdict, '' as figures."""
    rows, baseline = [], outcome["study"]["baseline"]
    for rung, here in outcome["sizes"].items():
        for name, arm in here["arms"].items():
            figures: tuple = ("",) * 6
            if each := arm.get("difference"):
                error = each.get("error", "")  # t tests of pairs, from before the ladder, keep none
                figures = each["mean"], each["low"], each["high"], error, arm["p_corrected"], arm["p_equivalent"]
            if name != baseline:
                rows.append((rung, name, arm["parameters"], arm["tokens"], *figures, arm.get("verdict", NO_VERDICT)))
    return rows


def _latex(outcome: Mapping, rows: Iterable[tuple]) -> str:
    """A table for a paper, with the rules of booktabs."""
    lines = [r"\begin{tabular}{llrrl}", r"\toprule", r"rung & arm & difference & 95\,\% interval & verdict \\", r"\midrule"]
    for rung, arm, _, _, mean, low, high, *_, verdict in rows:
        figures = " & " if verdict == NO_VERDICT else f"${mean:+.4f}$ & $[{low:+.4f}, {high:+.4f}]$"
        lines.append(rf"{_escaped(rung)} & {_escaped(arm)} & {figures} & {verdict} \\")
    about = f"% beside {_escaped(outcome['study']['baseline'])}; less is better"
    return "\n".join([about, *lines, r"\bottomrule", r"\end{tabular}", ""])


def _escaped(text: str) -> str:
    return text.replace("_", r"\_")


def _csv(columns: Iterable[str], rows: Iterable[tuple]) -> str:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows([columns, *rows])
    return text.getvalue()
