"""The report of a study: verdict, table, curves, then everything that a reader needs to doubt it. HTML and Markdown.

Both are made from results.json alone, in seconds.
"""

import math
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from xfresearch.files import write_text
from xfresearch.pages.charts import Curve, line_chart, styles
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
    "earlier points have a learning rate that has not decayed yet, so a run of that length would save more."
)
INTERVALS_ABOUT = "Intervals are of one arm; p and verdicts are corrected for the number of arms, not of sizes."
DETAILS = ("size", "arm", "bootstrap interval", "correlation of pairs", "p of equivalence (Holm)", "solved for", "FLOPs")
DETAILS += ("of what is matched",)
RATES = ("size", "arm", "learning rate: metric", "sensitivity")
AXES = {"training_flops": "FLOPs of training", "seconds": "seconds of training"}
TITLES = ("arm", "metric", "difference", "95 % interval", "p (Holm)", "verdict", "parameters", "learning rate", "seconds")
TOGETHER = (TITLES[0], *TITLES[2:6])
TOGETHER_ABOUT = (
    "The metric of a seed is its mean over the sizes, which varies less than that of one size. It answers the question if "
    "the difference is much the same at all of them."
)
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
    """A sentence for each arm: what all sizes show together, what each of them shows, and how the difference changes."""
    return [f"{_sentence(outcome, arm)}." for arm in outcome["study"]["arms"] if arm != outcome["study"]["baseline"]]


def _sentence(outcome: Mapping, arm: str) -> str:
    study, sizes = outcome["study"], outcome["sizes"]
    several = len(sizes) > 1
    found = outcome["together"]["arms"].get(arm) if several else next(iter(sizes.values()))["arms"][arm]
    if found is None or "difference" not in found:
        return f"{arm}: no verdict{_reason(outcome, arm)}"
    each, where = found["difference"], f" over {_all_sizes(outcome)}" if several else ""
    line = f"{arm} is {_in_words(found, study)}{where}: {each['mean']:+.4f} {UNITS[study['metric']]} "
    line += f"({each['low']:+.4f} to {each['high']:+.4f})"
    by_size = [f"{here['arms'][arm]['verdict']} at {name}" for name, here in sizes.items()] if several else []
    return "; ".join([line, *by_size, *_growth(outcome, arm), *_edge(outcome, arm)])


def _reason(outcome: Mapping, arm: str) -> str:
    """Why an arm has no verdict: a failure of the arm or of the baseline at some size."""
    several = len(outcome["sizes"]) > 1
    for name in dict.fromkeys((arm, outcome["study"]["baseline"])):
        for size, here in outcome["sizes"].items():
            if name in here["failures"]:
                whose = "" if name == arm else f" without {name}"
                return f"{whose}{f' at {size}' if several else ''}: {here['failures'][name]}"
    return ""


def _in_words(arm: Mapping, study: Mapping) -> str:
    """The verdict of an arm at a size."""
    words = WORDS[arm["verdict"]].format(baseline=study["baseline"], margin=study["margin"])
    if arm["verdict"] == "equivalent" and arm["p_holm"] < ALPHA:
        words += f", though {'better' if arm['difference']['mean'] < 0 else 'worse'}"
    if arm["verdict"] == "undecided" and arm["p_no_worse"] < ALPHA:
        words += f", but not worse by {study['margin']:g}"
    return words


def _growth(outcome: Mapping, arm: str) -> list[str]:
    """How the difference of an arm changes with the size, if it is known."""
    if not (trend := outcome["trends"].get(arm)):
        return []
    over = outcome["study"]["trend"].rpartition(".")[2].replace("_", " ")
    sizes = f"from {over} of {trend['first']:,.0f} to {trend['last']:,.0f}"
    return [f"{sizes} it changes by {trend['change']:+.4f} ({trend['low']:+.4f} to {trend['high']:+.4f})"]


def _edge(outcome: Mapping, arm: str) -> list[str]:
    """A warning if the best learning rate may lie beyond those that were tried."""
    here = next((here["arms"][arm] for here in outcome["sizes"].values() if here["arms"][arm]["edge"]), None)
    if not here:
        return []
    return [f"its best learning rate, {here['rate']:g}, is {_which(here)} that was tried, so a better one may exist"]


def _which(arm: Mapping) -> str:
    return "the smallest" if arm["edge"] == "low" else "the largest"


def picture(outcome: Mapping) -> str:
    """The differences of all arms at all sizes as an SVG element; '' if no arm has one."""
    study, groups = outcome["study"], {}
    for arm in study["arms"]:
        found = {size: here["arms"][arm] for size, here in outcome["sizes"].items() if "difference" in here["arms"][arm]}
        if found:
            if own := outcome["together"]["arms"].get(arm):
                found[_all_sizes(outcome)] = own
            each = {name: (own["difference"], own["verdict"]) for name, own in found.items()}
            groups[arm] = [Interval(name, d["mean"], d["low"], d["high"], verdict) for name, (d, verdict) in each.items()]
    label = f"{UNITS[study['metric']]} beside {study['baseline']}: less is better. Lines are 95 % intervals"
    return intervals(study["question"], groups, study["margin"], label) if groups else ""


def rows(outcome: Mapping, size: str) -> list[tuple[str, ...]]:
    """The table of a size, the baseline first."""
    study, here = outcome["study"], outcome["sizes"][size]
    names = [study["baseline"], *(name for name in here["arms"] if name != study["baseline"])]
    return [_row(name, here["arms"][name], "no verdict" if name in here["failures"] else "") for name in names]


def _row(name: str, arm: Mapping, failure: str) -> tuple[str, ...]:
    found = _found(arm) if "difference" in arm else ("", "", "", failure)
    if not arm["values"]:
        return (name, "", "", "", "", failure, f"{arm['parameters']:,}", "", "")
    rate = f"{arm['rate']:g}" + (f" ({_which(arm)} tried)" if arm["edge"] else "")
    metric = "" if failure and arm["mean"] is None else f"{arm['mean']:.4f} +- {arm['deviation']:.4f}"
    seconds = "" if arm["seconds"] is None else f"{arm['seconds']:.0f}"
    return (name, metric, *found, f"{arm['parameters']:,}", rate, seconds)


def notes(outcome: Mapping) -> list[str]:
    """What limits the study, in sentences."""
    study, lines = outcome["study"], []
    unit = UNITS[study["metric"]]
    if study["tiny"]:
        lines.append("This is a trial of the command with tiny models: it shows nothing about the question.")
    if study["seeds"] <= SMALL:
        lines.append(f"{study['seeds']} pairs of runs are few: intervals are wide, and bootstrap intervals too narrow.")
    for edge in _edge(outcome, study["baseline"]):
        lines.append(f"{study['baseline']}: {edge}; all differences are from this arm.")
    for name, size in outcome["sizes"].items():
        if noise := size["noise"]:
            lines.append(
                f"{name}: runs of {study['baseline']} that differ in the seed have a deviation of {noise[0]:.4f} {unit} "
                f"({noise[1]:.4f} to {noise[2]:.4f}); {_power(size, study)} {_sampling(size, study['seeds'])}".rstrip()
            )
        mismatches = {arm: each["mismatch"] for arm, each in size["arms"].items() if abs(each["mismatch"]) >= 5e-4}
        left = ", ".join(f"{arm} {value:+.2%}" for arm, value in mismatches.items())
        lines.append(f"{name}: matched {study['match']}" + (f"; left over: {left}." if left else ", to 0.05 %."))
    if outcome["together"]["arms"]:
        power = _power(outcome["together"], study)
        lines.append(f"{_all_sizes(outcome).capitalize()}, where a seed counts with its mean: {power}")
    if study["tune_at"]:
        lines.append(f"Learning rates were chosen at size {study['tune_at']}, and kept at the other sizes.")
    return lines + _of_runs(outcome)


def _of_runs(outcome: Mapping) -> list[str]:
    """How long the runs took, what the seconds of arms are, and whether all runs had the same versions."""
    shares = ", ".join(f"{share:.1%} {name}" for name, share in outcome["shares"].items())
    lines = [f"{outcome['runs']} runs took {outcome['seconds'] / 3600:.1f} hours: {shares}."]
    if machine := outcome["made"].get("timed_on"):
        lines.append(f"Seconds are those of an update, timed in turns with the baseline's, times their number ({machine}).")
    else:
        lines.append("There are no seconds, because updates were not timed: --plan times them.")
    if len(versions := outcome["made"]["versions"]) > 1:
        lines.append(f"Runs had {len(versions)} sets of versions of libraries (below).")
    return lines


def _sampling(size: Mapping, seeds: int) -> str:
    """The part of the noise that is the held-out text's."""
    single, error, of_seeds = size["sampling_error"], size["difference_sampling_error"], size["deviation"] / math.sqrt(seeds)
    if single is None or error is None:
        return ""
    small = ": the text is too small for the seeds (evaluation.final_sequences)" if error > of_seeds else ""
    return (
        f"The sampling error of a run is {single:.4f}. All runs read the same held-out text: of a mean difference it is at "
        f"most {error:.4f}, and the seeds' error {of_seeds:.4f}{small}."
    )


def _power(found: Mapping, study: Mapping) -> str:
    """What the pairs of a size can find, or those of all sizes."""
    unpaired = found["unpaired_deviation"]
    pairing = "" if unpaired is None else f", {unpaired:.4f} if runs were not paired"
    seeds = found["seeds_for_margin"] or "more than a million"
    return (
        f"paired differences {found['deviation']:.4f}{pairing}. {study['seeds']} pairs find a difference of "
        f"{found['detectable']:.4f} with a chance of 80 %; for {study['margin']:g} it takes {seeds}. An "
        f"arm without a difference is called equivalent with a chance of {found['chance_of_equivalent']:.0%}."
    )


def _all_sizes(outcome: Mapping) -> str:
    return "both sizes" if len(outcome["sizes"]) == 2 else "all sizes"


def together_rows(outcome: Mapping) -> list[tuple[str, ...]]:
    """The table of all sizes together; [] for a study of one size."""
    return [(name, *_found(arm)) for name, arm in outcome["together"]["arms"].items()]


def _found(arm: Mapping) -> tuple[str, str, str, str]:
    """Difference, interval, p and verdict of an arm that has them."""
    each = arm["difference"]
    return f"{each['mean']:+.4f}", f"{each['low']:+.4f} to {each['high']:+.4f}", f"{arm['p_holm']:.2g}", arm["verdict"]


def saved_rows(outcome: Mapping) -> list[tuple[str, ...]]:
    """What each arm saves at the last metric of the baseline, and the baseline at that of the arm."""
    found = []
    for size, here in outcome["sizes"].items():
        for name, arm in here["arms"].items():
            if saved := arm.get("saved"):
                shares = [map(_share, saved[axis]) if axis in saved else ("", "") for axis in AXES]
                found.append((size, name, *(word for pair in shares for word in pair)))
    return found


def _share(share: float | None) -> str:
    return "never reached" if share is None else f"{share:+.1%}"


def markdown(outcome: Mapping) -> str:
    """The report as Markdown."""
    study = outcome["study"]
    parts = [f"# {study['question']}", "", *(f"- {line}" for line in verdicts(outcome)), "", f"Rule: {study['rule']}", ""]
    if together := together_rows(outcome):
        parts += [f"## {_all_sizes(outcome).capitalize()}", "", TOGETHER_ABOUT, "", table(TOGETHER, together), ""]
    for size in outcome["sizes"]:
        parts += [f"## {size}", "", table(TITLES, rows(outcome, size)), "", INTERVALS_ABOUT, ""]
    if study["probes"]:
        parts += ["## Probes", "", table(("size", "arm", *study["probes"]), probe_rows(outcome)), ""]
    if saved := saved_rows(outcome):
        parts += ["## Cost at equal quality", "", SAVED_ABOUT, "", table(SAVED, saved), ""]
    parts += ["## Limits", "", *(f"- {line}" for line in notes(outcome)), "", "## Learning rates", ""]
    parts += [table(RATES, rates(outcome)), "", "## Pairs and sizes", "", table(DETAILS, details(outcome)), ""]
    parts += ["## Design", "", *(f"- {name}: {value}" for name, value in design(outcome))]
    return "\n".join([*parts, *(f"- {name}: {value}" for name, value in made(outcome)), ""])


def made(outcome: Mapping) -> list[tuple[str, str]]:
    """Commits, dates, machines and versions of the runs and of the report, as lines of a name and a value."""
    return [(name, "; ".join(outcome["made"][name])) for name in ("runs", "versions", "report") if name in outcome["made"]]


def details(outcome: Mapping) -> list[tuple[str, ...]]:
    """Of every arm and size: what pairing is worth, and what was solved for."""
    found = []
    for size, here in outcome["sizes"].items():
        for name, arm in here["arms"].items():
            each = arm.get("difference")
            ends = f"{each['bootstrap_low']:+.4f} to {each['bootstrap_high']:+.4f}" if each else ""
            correlation = f"{each['correlation']:.2f}" if each and each["n"] > 2 else ""
            within = f"{arm['p_equivalent']:.2g}" if each else ""
            cost = f"{arm['training_flops']:.3g}", f"{arm['mismatch']:+.2%}"
            found.append((size, name, ends, correlation, within, arm["solved"], *cost))
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
    """The mean over seeds and the half width of its interval, with the number of seeds if some have no value; '' for a probe
    that does not apply."""
    known = [value for value in values if value is not None]
    mean, half = mean_interval(known)
    left_out = f" ({len(known)} of {len(values)} seeds)" if len(known) < len(values) else ""
    return f"{mean:.3f} +- {half:.3f}{left_out}" if known else ""


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
        "together_name": _all_sizes(outcome).capitalize(),
        "together_titles": TOGETHER,
        "together": together_rows(outcome),
        "together_about": TOGETHER_ABOUT,
        "tables": {size: rows(outcome, size) for size in outcome["sizes"]},
        "styles": dict(zip(study["arms"], styles(len(study["arms"])), strict=True)),
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
        "made": made(outcome),
    }


def _charts(outcome: Mapping, size: str) -> list[tuple[str, str]]:
    """(caption, SVG) of the metric by FLOPs and by seconds, with the ends of the intervals."""
    unit, here, found = UNITS[outcome["study"]["metric"]], outcome["sizes"][size]["arms"], []
    arms = outcome["study"]["arms"]
    for axis, label in AXES.items():
        curves = []
        for arm, style in zip(arms, styles(len(arms)), strict=True):
            known = here[arm]["curve"] and here[arm][axis] is not None
            curve_P3 = points(here[arm], axis) if known else np.empty((0, 3))
            curves += _with_ends(curve_P3[len(curve_P3) // 10 :], style)
        if curves:
            found.append((f"{unit} by {label}", line_chart(f"{size}: {unit} by {label}", curves, {})))
    return found


def _with_ends(curve_P3: np.ndarray, style: Mapping[str, str]) -> list[Curve]:
    """A curve, and thin ones at the ends of its intervals."""
    if not len(curve_P3):
        return []
    x_P, y_P, half_P = curve_P3.T
    ends = [Curve(np.stack([x_P, y_P + sign * half_P], 1), width=0.6, **style) for sign in (-1, 1)]
    return [Curve(curve_P3[:, :2], width=1.4, marked=True, **style), *ends]
