"""The tables of a study's report, made of results.json alone. The baseline of a study is an arm, too."""

import math
from collections.abc import Mapping
from typing import NamedTuple

from xfresearch.runtime.summaries import mean_interval
from xfresearch.runtime.tables import PLUS_MINUS

UNITS = {"bits_per_byte": "bits per byte", "loss": "nats per token", "accuracy": "share of errors"}
NO_VERDICT = "no verdict"
DIFFERENCE = ("difference", "95 % interval", "p of no difference", "p of equivalence", "verdict")
LADDER_ABOUT = (
    "The mean of the differences, which varies less than each of them. It answers the question only if they are similar."
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
DETAILS_ABOUT = (
    "A difference is the mean of the pairs less the rise. It has an error by the seeds, which its interval shows, and one "
    "by the held-out text, which all runs share and its interval does not show."
)


class Table(NamedTuple):
    title: str
    about: str
    columns: tuple[str, ...]
    rows: list[tuple[str, ...]]


def main_tables(outcome: Mapping) -> list[Table]:
    """The tables of results: over all sizes together, at each size, of probes, and of saved cost. Empty tables are left
    out."""
    first, *others = [of_size(outcome, size) for size in outcome["sizes"]]
    sizes = first, *(table._replace(about="") for table in others)
    return [table for table in (ladder(outcome), *sizes, laws(outcome), probes(outcome), saved(outcome)) if table.rows]


def ladder(outcome: Mapping) -> Table:
    """All rungs together; no rows for a study of one."""
    rows = []
    for name, arm in outcome["ladder"].items() if len(outcome["sizes"]) > 1 else ():
        each = arm["difference"]
        shapes = [arm["changes"][axis]["shape"] if axis in arm["changes"] else "" for axis in ("sizes", "budgets")]
        interval = f"{each['low']:+.4f} to {each['high']:+.4f}"
        rows.append((name, f"{each['mean']:+.4f}", interval, f"{arm['p_corrected']:.2g}", arm["verdict"], *shapes))
    columns = ("arm", "difference", "95 % interval", "p of no difference", "verdict", "along sizes", "along budgets")
    return Table(all_sizes(outcome).capitalize(), LADDER_ABOUT, columns, rows)


def laws(outcome: Mapping) -> Table:
    """L(N, D) of each arm, and its difference from the baseline beyond the ladder."""
    rows = []
    for name, law in outcome["laws"].items():
        each = law["beyond"]
        numbers = [f"{law[key]:.3g}" for key in ("E", "A", "B", "alpha", "beta")]
        rows.append((name, *numbers, f"{each['difference']:+.4f}", f"{each['low']:+.4f} to {each['high']:+.4f}"))
    about = ""
    if rows:
        about = "L(N, D) = E + A N^-alpha + B D^-beta for N parameters and D tokens. The last columns are its difference "
        about += f"from the baseline's at N = {each['parameters']:.3g}, D = {each['tokens']:.3g}, with the noise of runs."
    columns = ("arm", "E", "A", "B", "alpha", "beta", "difference beyond", "95 % interval")
    return Table("Law of the losses", about, columns, rows)


def of_size(outcome: Mapping, size: str) -> Table:
    """All arms at a size, the baseline first."""
    study, here = outcome["study"], outcome["sizes"][size]
    names = [study["baseline"], *(name for name in here["arms"] if name != study["baseline"])]
    compared = {*here["failures"], *names[1:]}
    rows = [_row(name, here["arms"][name], NO_VERDICT if name in compared else "") for name in names]
    columns = ("arm", "metric", *DIFFERENCE, "parameters", "learning rate", "seconds")
    return Table(size, METRIC_ABOUT.format(unit=UNITS[study["metric"]], statistics=outcome["statistics"]), columns, rows)


def _row(name: str, arm: Mapping, otherwise: str) -> tuple[str, ...]:
    """The columns of an arm. otherwise: its verdict if it has none."""
    cells = _difference(arm) if "difference" in arm else ("", "", "", "", otherwise)
    if not arm["values"]:
        return (name, "", *cells, f"{arm['parameters']:,}", "", "")
    rate = f"{arm['rate']:g}" + (f" ({edge_in_words(arm)} tried)" if arm["edge"] else "")
    metric = "" if arm["mean"] is None else f"{arm['mean']:.4f} ({arm['deviation']:.4f})"
    seconds = "" if arm["seconds"] is None else f"{arm['seconds']:.0f}"
    return (name, metric, *cells, f"{arm['parameters']:,}", rate, seconds)


def _difference(arm: Mapping) -> tuple[str, ...]:
    """The columns DIFFERENCE of an arm that has them."""
    each = arm["difference"]
    p_values = f"{arm['p_corrected']:.2g}", f"{arm['p_equivalent']:.2g}"
    return f"{each['mean']:+.4f}", f"{each['low']:+.4f} to {each['high']:+.4f}", *p_values, arm["verdict"]


def probes(outcome: Mapping) -> Table:
    """The mean of each probe with the half width of its interval, of every arm."""
    names, rows = outcome["study"]["probes"], []
    for size, here in outcome["sizes"].items():
        for arm, measured in here["arms"].items():
            rows.append((size, arm, *(_with_half(measured["probes"].get(name, [])) for name in names)))
    about = [PROBES_ABOUT, *(text for probes, text in ABOUT_EACH.items() if set(probes) & set(names))]
    return Table("Probes", " ".join(about), ("size", "arm", *names), rows if names else [])


def _with_half(values: list) -> str:
    """The mean over seeds and the half width of its interval, with the number of seeds if some have no value; '' for a probe
    that does not apply."""
    known = [value for value in values if value is not None]
    mean, half = mean_interval(known)
    width = f" +- {half:.3f}" if len(known) > 1 else ""
    left_out = f" ({len(known)} of {len(values)} seeds)" if len(known) < len(values) else ""
    return f"{mean:.3f}{width}{left_out}" if known else ""


def saved(outcome: Mapping) -> Table:
    """The share of the cost that each arm saves at the baseline's last metric, and the baseline at the arm's last metric."""
    columns = ("size", "arm", "FLOPs: the arm saves", "baseline saves", "seconds: the arm saves", "baseline saves")
    rows = []
    for size, here in outcome["sizes"].items():
        for name, arm in here["arms"].items():
            if shares := arm.get("saved"):
                pairs = [map(_share, shares[axis]) if axis in shares else ("", "") for axis in ("training_flops", "seconds")]
                rows.append((size, name, *(word for pair in pairs for word in pair)))
    return Table("Cost at equal quality", SAVED_ABOUT, columns, rows)


def _share(share: float | None) -> str:
    return "never reached" if share is None else f"{share:+.1%}"


def appendix(outcome: Mapping) -> list[Table]:
    """The tables with which a reader can check the results. Versions of the rule are left out if there is only one."""
    return [table for table in (versions(outcome), rates(outcome), details(outcome)) if table.rows]


def versions(outcome: Mapping) -> Table:
    """The versions of the design and their verdicts."""
    every = outcome["versions"]
    rows: list[tuple[str, ...]] = []
    for number, each in enumerate(every, 1) if len(every) > 1 else ():
        name = f"{number}" + (f", of {each['of']}" if each["of"] else "")
        said = " ".join(each["verdicts"] or ["none: it did not end"])
        rows.append((name, each["date"], "; ".join(each["changes"]) or "the first", str(each["seen"]["runs"]), said))
    columns = ("version", "written", "what changed", "runs that existed, of its own", "what it said")
    return Table("Versions of the rule", "", columns, rows)


def rates(outcome: Mapping) -> Table:
    """The learning rates that every arm tried, and their sensitivity: the mean rise over the best (statistics.py)."""
    rows: list[tuple[str, ...]] = []
    tuned_at = outcome["study"]["tune_at"]
    for size, here in outcome["sizes"].items():
        for name, arm in here["arms"].items():
            if tuned_at and size not in tuned_at:
                continue
            tried = sorted(arm["tried"].items(), key=lambda each: float(each[0]))
            words = ", ".join(f"{float(rate):g}: {_mean(values)}" for rate, values in tried)
            rows.append((size, name, words, "" if arm["sensitivity"] is None else f"{arm['sensitivity']:.4f}"))
    about = "Means over the runs of each rate, with their number if it is not 1. "
    about += "Sensitivity is the mean rise of the metric over the best rate of the grid."
    return Table("Learning rates", about, ("size", "arm", "learning rate: metric", "sensitivity"), rows)


def _mean(values: list) -> str:
    if any(value is None or not math.isfinite(value) for value in values):
        return "diverged"
    number = f" ({len(values)})" if len(values) > 1 else ""
    return f"{sum(values) / len(values):.4f}{number}"


def details(outcome: Mapping) -> Table:
    """For every arm and size: the gain by pairing, the errors of the difference, and the option that was solved for."""
    errors = ("rise", "bootstrap interval", "correlation of pairs", "deviation of pairs", "error by seeds", "error by text")
    columns = ("size", "arm", *errors, "solved for", "FLOPs", "of what is matched")
    rows = []
    for size, here in outcome["sizes"].items():
        for name, arm in here["arms"].items():
            cost = f"{arm['training_flops']:.3g}", f"{arm['mismatch']:+.2%}"
            rows.append((size, name, *_errors(arm), arm["solved"], *cost))
    return Table("Pairs and sizes", DETAILS_ABOUT, columns, rows)


def _errors(arm: Mapping) -> tuple[str, ...]:
    if not (each := arm.get("difference")):
        return ("",) * 6
    correlation = f"{each['correlation']:.2f}" if each["n"] > 2 else ""
    by_text = arm["difference_sampling_error"]
    errors = f"{each['deviation']:.4f}", f"{seeds_error(each):.4f}", "" if by_text is None else f"{by_text:.4f}"
    bootstrap = f"{each['bootstrap_low']:+.4f} to {each['bootstrap_high']:+.4f}"
    return f"{each['rise']:+.4f}", bootstrap, correlation, *errors


def seeds_error(difference: Mapping) -> float:
    """The standard error of a mean difference by its seeds."""
    return difference["deviation"] / math.sqrt(difference["n"])


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
