"""The report of a study: verdict, table, curves, then everything that a reader needs to doubt it. HTML and Markdown.

Both are made from results.json alone, in seconds.
"""

import math
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from xfresearch.files import write_text
from xfresearch.pages.charts import RUN_COLOURS, Curve, line_chart
from xfresearch.pages.html import write_page
from xfresearch.pages.intervals import Interval, intervals
from xfresearch.statistics import mean_interval
from xfresearch.studies.outcome import points
from xfresearch.studies.statistics import ALPHA, SMALL

UNITS = {"bits_per_byte": "bits per byte", "loss": "nats per token", "accuracy": "share of errors"}
SAVED = ("size", "arm", "FLOPs: the arm saves", "baseline saves", "seconds: the arm saves", "baseline saves")
SAVED_ABOUT = (
    "The share of the whole cost that an arm saves if it stops at the last metric of the baseline, and the share that the "
    "baseline saves if it stops at that of the arm. Both are read off the curves (on evaluation.sequences sequences). Their "
    "earlier points have a learning rate that has not decayed yet, so a run of that length would save more. Seconds depend "
    "on what else the machine did."
)
INTERVALS_ABOUT = "Intervals are of one arm; p and verdicts are corrected for the number of arms."
DETAILS = ("size", "arm", "bootstrap interval", "correlation of pairs", "solved for", "of what is matched")
RATES = ("size", "arm", "learning rate: metric", "sensitivity")
AXES = {"training_flops": "FLOPs of training", "seconds": "seconds of training"}
TITLES = ("arm", "metric", "difference", "95 % interval", "p (Holm)", "verdict", "parameters", "learning rate", "seconds")
WORDS = {
    "better": "better than {baseline}",
    "worse": "worse than {baseline}",
    "equivalent": "equivalent to {baseline} (within {margin:g})",
    "undecided": "not shown to differ from {baseline}, nor to be equivalent",
}


def write(folder, outcome: Mapping) -> None:
    """report.html and report.md."""
    write_text(folder / "report.md", markdown(outcome))
    write_page(folder / "report.html", Path(__file__).parent / "study.html.jinja", **page(outcome))


def verdicts(outcome: Mapping) -> list[str]:
    """A sentence for each arm: what the largest size shows, and whether the sizes agree."""
    study, sizes = outcome["study"], outcome["sizes"]
    unit, largest = UNITS[study["metric"]], list(sizes)[-1]
    lines = []
    for arm in study["arms"]:
        if arm == study["baseline"]:
            continue
        failures = sizes[largest]["failures"]
        if arm in failures or study["baseline"] in failures:
            failed = arm if arm in failures else study["baseline"]
            lines.append(f"{arm}: no verdict{'' if failed == arm else f' without {failed}'}: {failures[failed]}.")
            continue
        found = sizes[largest]["arms"][arm]
        each = found["difference"]
        at_largest = f" at {largest}" if len(sizes) > 1 else ""
        line = f"{arm} is {_in_words(found, study)}{at_largest}: {each['mean']:+.4f} {unit} "
        line += f"({each['low']:+.4f} to {each['high']:+.4f})"
        others = [f"{_verdict_at(here, arm)} at {name}" for name, here in sizes.items() if name != largest]
        lines.append("; ".join([line, *others, *_growth(outcome, arm), *_edge(found)]) + ".")
    return lines


def _in_words(arm: Mapping, study: Mapping) -> str:
    """The verdict of an arm at a size."""
    words = WORDS[arm["verdict"]].format(baseline=study["baseline"], margin=study["margin"])
    if arm["verdict"] == "equivalent" and arm["p_holm"] < ALPHA:
        words += f", though {'better' if arm['difference']['mean'] < 0 else 'worse'}"
    if arm["verdict"] == "undecided" and arm["p_no_worse"] < ALPHA:
        words += f", but not worse by {study['margin']:g}"
    return words


def _verdict_at(here: Mapping, arm: str) -> str:
    """The verdict of an arm at another size, or why it has none."""
    failure = here["failures"].get(arm, "")
    return here["arms"][arm].get("verdict") or f"no verdict{f' ({failure})' if failure else ''}"


def _growth(outcome: Mapping, arm: str) -> list[str]:
    """How the difference of an arm changes with the size, if it is known."""
    if not (trend := outcome["trends"].get(arm)):
        return []
    over = outcome["study"]["trend"].rpartition(".")[2].replace("_", " ")
    sizes = f"from {over} of {trend['first']:,.0f} to {trend['last']:,.0f}"
    return [f"{sizes} it changes by {trend['change']:+.4f} ({trend['low']:+.4f} to {trend['high']:+.4f})"]


def _edge(arm: Mapping) -> list[str]:
    """A warning if the best learning rate may lie beyond those that were tried."""
    if not arm["edge"]:
        return []
    which = "smallest" if arm["edge"] == "low" else "largest"
    return [f"its best learning rate, {arm['rate']:g}, is the {which} that was tried, so a better one may exist"]


def picture(outcome: Mapping) -> str:
    """The differences of all arms at all sizes as an SVG element; '' if no arm has one."""
    study, groups = outcome["study"], {}
    for arm in study["arms"]:
        found = {size: here["arms"][arm] for size, here in outcome["sizes"].items() if "difference" in here["arms"][arm]}
        if found:
            each = {size: (own["difference"], own["verdict"]) for size, own in found.items()}
            groups[arm] = [Interval(size, d["mean"], d["low"], d["high"], verdict) for size, (d, verdict) in each.items()]
    label = f"{UNITS[study['metric']]} beside {study['baseline']}: less is better. Lines are 95 % intervals"
    return intervals(study["question"], groups, study["margin"], label) if groups else ""


def rows(outcome: Mapping, size: str) -> list[tuple[str, ...]]:
    """The table of a size, the baseline first."""
    study, here = outcome["study"], outcome["sizes"][size]
    names = [study["baseline"], *(name for name in here["arms"] if name != study["baseline"])]
    return [_row(name, here["arms"][name], "no verdict" if name in here["failures"] else "") for name in names]


def _row(name: str, arm: Mapping, failure: str) -> tuple[str, ...]:
    each = arm.get("difference")
    interval = f"{each['low']:+.4f} to {each['high']:+.4f}" if each else ""
    found = (f"{each['mean']:+.4f}", interval, f"{arm['p_holm']:.2g}", arm["verdict"]) if each else ("", "", "", failure)
    if not arm["values"]:
        return (name, "", "", "", "", failure, f"{arm['parameters']:,}", "", "")
    rate = f"{arm['rate']:g}" + (f" (the {'smallest' if arm['edge'] == 'low' else 'largest'} tried)" if arm["edge"] else "")
    metric = "" if failure and arm["mean"] is None else f"{arm['mean']:.4f} +- {arm['deviation']:.4f}"
    return (name, metric, *found, f"{arm['parameters']:,}", rate, f"{arm['seconds']:.0f}")


def notes(outcome: Mapping) -> list[str]:
    """What limits the study, in sentences."""
    study, lines = outcome["study"], []
    unit = UNITS[study["metric"]]
    if study["tiny"]:
        lines.append("This is a trial of the command with tiny models: it shows nothing about the question.")
    if study["seeds"] <= SMALL:
        lines.append(f"{study['seeds']} pairs of runs are few: intervals are wide, and bootstrap intervals too narrow.")
    for name, size in outcome["sizes"].items():
        if noise := size["noise"]:
            lines.append(
                f"{name}: runs of {study['baseline']} that differ in the seed have a deviation of {noise[0]:.4f} {unit} "
                f"({noise[1]:.4f} to {noise[2]:.4f}); paired differences {size['deviation']:.4f}{_pairing(size)}. "
                f"{_sampling(size, study['seeds'])}"
                f"{study['seeds']} pairs find a difference of {size['detectable']:.4f} with a chance of 80 %; for "
                f"{study['margin']:g} it takes {size['seeds_for_margin']}. An arm without a difference is called equivalent "
                f"with a chance of {size['chance_of_equivalent']:.0%}."
            )
        mismatches = {arm: each["mismatch"] for arm, each in size["arms"].items() if abs(each["mismatch"]) >= 5e-4}
        left = ", ".join(f"{arm} {value:+.2%}" for arm, value in mismatches.items())
        lines.append(f"{name}: matched {study['match']}" + (f"; left over: {left}." if left else ", to 0.05 %."))
    overhead = outcome["overhead"]
    if study["tune_at"]:
        lines.append(f"Learning rates were chosen at size {study['tune_at']}, and kept at the other sizes.")
    if overhead == overhead:
        hours = outcome["seconds"] / 3600
        runs = f"{outcome['runs']} runs took {hours:.1f} hours"
        lines.append(f"{runs}, {overhead:.1%} of it outside of updates and held-out metrics.")
    return lines


def _sampling(size: Mapping, seeds: int) -> str:
    """The part of the noise that is the held-out text's."""
    single, error, of_seeds = size["sampling_error"], size["difference_sampling_error"], size["deviation"] / math.sqrt(seeds)
    if single is None or error is None:
        return ""
    small = ": the text is too small for the seeds (evaluation.final_sequences)" if error > of_seeds else ""
    return (
        f"The sampling error of a run is {single:.4f}. All runs read the same held-out text: of a mean difference it is at "
        f"most {error:.4f}, and the seeds' error {of_seeds:.4f}{small}. "
    )


def _pairing(size: Mapping) -> str:
    """What pairing is worth."""
    known = [arm["unpaired_deviation"] for arm in size["arms"].values() if arm.get("unpaired_deviation") is not None]
    return f", {np.median(known):.4f} if runs were not paired" if known else ""


def saved_rows(outcome: Mapping) -> list[tuple[str, ...]]:
    """What each arm saves at the last metric of the baseline, and the baseline at that of the arm."""
    found = []
    for size, here in outcome["sizes"].items():
        for name, arm in here["arms"].items():
            shares = [share for axis in arm.get("saved", {}).values() for share in axis]
            if shares:
                found.append((size, name, *("never reached" if share is None else f"{share:+.1%}" for share in shares)))
    return found


def markdown(outcome: Mapping) -> str:
    """The report as Markdown."""
    study = outcome["study"]
    parts = [f"# {study['question']}", "", *(f"- {line}" for line in verdicts(outcome)), "", f"Rule: {study['rule']}", ""]
    for size in outcome["sizes"]:
        parts += [f"## {size}", "", table(TITLES, rows(outcome, size)), "", INTERVALS_ABOUT, ""]
    if study["probes"]:
        parts += ["## Probes", "", table(("size", "arm", *study["probes"]), probe_rows(outcome)), ""]
    if saved := saved_rows(outcome):
        parts += ["## Cost at equal quality", "", SAVED_ABOUT, "", table(SAVED, saved), ""]
    parts += ["## Limits", "", *(f"- {line}" for line in notes(outcome)), "", "## Learning rates", ""]
    parts += [table(RATES, rates(outcome)), "", "## Pairs and sizes", "", table(DETAILS, details(outcome)), ""]
    parts += ["## Design", "", *(f"- {name}: {value}" for name, value in design(outcome))]
    return "\n".join([*parts, *(f"- {name}: {value}" for name, value in outcome.get("made", {}).items()), ""])


def details(outcome: Mapping) -> list[tuple[str, ...]]:
    """Of every arm and size: what pairing is worth, and what was solved for."""
    found = []
    for size, here in outcome["sizes"].items():
        for name, arm in here["arms"].items():
            each = arm.get("difference")
            ends = f"{each['bootstrap_low']:+.4f} to {each['bootstrap_high']:+.4f}" if each else ""
            correlation = f"{each['correlation']:.2f}" if each else ""
            found.append((size, name, ends, correlation, arm["solved"], f"{arm['mismatch']:+.2%}"))
    return found


def design(outcome: Mapping) -> list[tuple[str, str]]:
    """The design as lines of a name and a value."""
    study = outcome["study"]
    solved = f", by {study['solve']}" if study["solve"] else ""
    tuned = f" at size {study['tune_at']}" if study["tune_at"] else " at each size"
    lines = [("base", study["base"]), ("all arms", " ".join(study["options"])), ("matched", f"{study['match']}{solved}")]
    lines += [("learning rates", f"{', '.join(f'{rate:g}' for rate in study['rates'])}, tried{tuned}")]
    lines += [("seeds", str(study["seeds"])), ("margin", f"{study['margin']:g} {UNITS[study['metric']]}")]
    for kind in ("sizes", "arms", "cells"):
        lines += [(f"{kind[:-1]} {name}", " ".join(each) or "the base") for name, each in study[kind].items()]
    return lines


def probe_rows(outcome: Mapping) -> list[tuple[str, ...]]:
    """The mean of each probe with the half width of its interval, of every arm."""
    found = []
    for size, here in outcome["sizes"].items():
        for name, arm in here["arms"].items():
            found.append((size, name, *(_with_half(arm["probes"].get(probe, [])) for probe in outcome["study"]["probes"])))
    return found


def _with_half(values: list) -> str:
    """The mean over seeds and the half width of its interval; '' for a probe that does not apply."""
    mean, half = mean_interval([math.nan if value is None else value for value in values])
    return "" if mean != mean else f"{mean:.3f} +- {half:.3f}"


def rates(outcome: Mapping) -> list[tuple[str, str, str, str]]:
    """The learning rates that every arm tried, and their sensitivity: the mean rise over the best (statistics.py)."""
    found, tuned_at = [], outcome["study"]["tune_at"]
    for size, here in outcome["sizes"].items():
        for name, arm in here["arms"].items():
            if tuned_at not in ("", size):
                continue
            tried = sorted(arm["tried"].items(), key=lambda each: float(each[0]))
            words = ", ".join(f"{float(rate):g}: {_known(value)}" for rate, value in tried)
            found.append((size, name, words, "" if arm["sensitivity"] is None else f"{arm['sensitivity']:.4f}"))
    return found


def _known(value: float | None) -> str:
    return "diverged" if value is None or not math.isfinite(value) else f"{value:.4f}"


def table(titles, lines) -> str:
    """A table in Markdown."""
    return "\n".join("| " + " | ".join(map(str, line)) + " |" for line in (titles, ["---"] * len(titles), *lines))


def page(outcome: Mapping) -> dict:
    """The values of the template."""
    study = outcome["study"]
    return {
        "study": study,
        "verdicts": verdicts(outcome),
        "picture": picture(outcome),
        "titles": TITLES,
        "tables": {size: rows(outcome, size) for size in outcome["sizes"]},
        "colours": {arm: RUN_COLOURS[number % len(RUN_COLOURS)] for number, arm in enumerate(study["arms"])},
        "charts": {size: _charts(outcome, size) for size in outcome["sizes"]},
        "saved_titles": SAVED,
        "saved_about": SAVED_ABOUT,
        "saved": saved_rows(outcome),
        "rate_titles": RATES,
        "unit": UNITS[study["metric"]],
        "probe_titles": ("size", "arm", *study["probes"]),
        "probes": probe_rows(outcome) if study["probes"] else [],
        "notes": notes(outcome),
        "rates": rates(outcome),
        "intervals_about": INTERVALS_ABOUT,
        "detail_titles": DETAILS,
        "details": details(outcome),
        "design": design(outcome),
        "made": outcome.get("made", {}),
    }


def _charts(outcome: Mapping, size: str) -> list[tuple[str, str]]:
    """(caption, SVG) of the metric by FLOPs and by seconds, with the ends of the intervals."""
    unit, here, found = UNITS[outcome["study"]["metric"]], outcome["sizes"][size]["arms"], []
    for axis, label in AXES.items():
        curves = []
        for number, arm in enumerate(outcome["study"]["arms"]):
            curve_P3 = points(here[arm], axis) if here[arm]["curve"] else np.empty((0, 3))
            curves += _with_ends(curve_P3[len(curve_P3) // 10 :], RUN_COLOURS[number % len(RUN_COLOURS)])
        if curves:
            found.append((f"{unit} by {label}", line_chart(f"{size}: {unit} by {label}", curves, {})))
    return found


def _with_ends(curve_P3: np.ndarray, colour: str) -> list[Curve]:
    """A curve, and thin ones at the ends of its intervals."""
    if not len(curve_P3):
        return []
    x_P, y_P, half_P = curve_P3.T
    ends = [Curve(np.stack([x_P, y_P + sign * half_P], 1), colour, 0.6) for sign in (-1, 1)]
    return [Curve(curve_P3[:, :2], colour, 1.4, True), *ends]
