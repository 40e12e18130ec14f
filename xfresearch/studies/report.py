"""The report of a study: verdicts, picture, tables, curves, then everything that a reader needs to doubt it.

HTML and Markdown are made from results.json alone, in seconds.
"""

from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path

import numpy as np

from xfresearch.pages.charts import Curve, line_chart, styles
from xfresearch.pages.html import write_page
from xfresearch.pages.intervals import Interval, intervals
from xfresearch.runtime.files import write_text
from xfresearch.runtime.terminal import visible
from xfresearch.studies import tables
from xfresearch.studies.matching import LARGEST_MISMATCH, LEAST_SPREAD
from xfresearch.studies.outcome import points
from xfresearch.studies.statistics import ALPHA, SMALL
from xfresearch.studies.tables import UNITS, all_sizes, edge_in_words, in_markdown, seeds_error

MATCHED = {"flops": "FLOPs", "parameters": "parameters", "tokens": "tokens", "seconds": "seconds"}
CANCEL = 0.5  # a mean or change over sizes that varies less than this share of what independent sizes give has a note
AXES = {"training_flops": "FLOPs of training", "seconds": "seconds of training"}
WORDS = {
    "better": "better than {baseline}",
    "worse": "worse than {baseline}",
    "equivalent": "equivalent to {baseline} (within {margin:g})",
    "undecided": "not shown to differ from {baseline}, nor to be equivalent",
}


def write(folder, outcome: Mapping) -> None:
    """report.html and report.md."""
    text, values = markdown(outcome), page(outcome)  # both, before one is written
    write_page(folder / "report.html", Path(__file__).parent / "study.html.jinja", **values)
    write_text(folder / "report.md", visible(text))


def verdicts(outcome: Mapping) -> list[str]:
    """A sentence for each arm: what all sizes show together, what each of them shows, and how the difference changes."""
    return [f"{_sentence(outcome, arm)}." for arm in outcome["study"]["arms"] if arm != outcome["study"]["baseline"]]


def _sentence(outcome: Mapping, arm: str) -> str:
    study, sizes = outcome["study"], outcome["sizes"]
    several = len(sizes) > 1
    found = outcome["together"]["arms"].get(arm) if several else next(iter(sizes.values()))["arms"][arm]
    if found is None or "difference" not in found:
        return f"{arm}: no verdict{_reason(outcome, arm)}"
    each, where = found["difference"], f" over {all_sizes(outcome)}" if several else ""
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
    """A warning for each size at which the best learning rate may lie beyond those that were tried."""
    tuned = [outcome["study"]["tune_at"]] if outcome["study"]["tune_at"] else list(outcome["sizes"])
    found = []
    for size in tuned:
        if (here := outcome["sizes"][size]["arms"][arm])["edge"]:
            rate = f"{here['rate']:g}{f' at {size}' if len(tuned) > 1 else ''}"
            found.append(f"its best learning rate, {rate}, is {edge_in_words(here)} that was tried: a better one may exist")
    return found


def picture(outcome: Mapping) -> str:
    """The differences of all arms at all sizes as an SVG element; '' if no arm has one."""
    study, groups = outcome["study"], {}
    for arm in study["arms"]:
        found = {size: here["arms"][arm] for size, here in outcome["sizes"].items() if "difference" in here["arms"][arm]}
        if found:
            if own := outcome["together"]["arms"].get(arm):
                found[all_sizes(outcome)] = own
            each = {name: (own["difference"], own["verdict"]) for name, own in found.items()}
            groups[arm] = [Interval(name, d["mean"], d["low"], d["high"], verdict) for name, (d, verdict) in each.items()]
    label = f"{UNITS[study['metric']]} beside {study['baseline']}: less is better. Lines are 95 % intervals"
    return intervals(study["question"], groups, study["margin"], label) if groups else ""


def training(outcome: Mapping) -> str:
    """What was trained, what is equal, and what was tuned, in sentences."""
    study, baselines = outcome["study"], [here["arms"][outcome["study"]["baseline"]] for here in outcome["sizes"].values()]
    sizes = " and ".join(f"{each['parameters']:,} parameters on {each['tokens']:,} tokens" for each in baselines)
    more = " (more, where the best one was at the edge)" if study["extensions"] else ""
    rates = f"the best of {len(study['rates'])} learning rates{more}"
    where = f"at size {study['tune_at']}, and keeps it at the others" if study["tune_at"] else "at each size"
    optimizer = outcome["optimizer"]
    trained = f"{sizes}, by {optimizer['kind']} with a weight decay of {optimizer['weight_decay']:g}"
    chosen = f"Each arm has {rates}, with one run for each rate {where}"
    return (
        f"{study['baseline']} trains {trained}. {_matched(outcome)} {chosen}; then {study['seeds']} runs decide, in pairs "
        "that share a seed."
    )


def _matched(outcome: Mapping) -> str:
    """What is equal, with the arms that are not matched on purpose, and the largest mismatch of the others."""
    study = outcome["study"]
    found: dict = {}
    for here in outcome["sizes"].values():
        for arm, each in here["arms"].items():
            found.setdefault(arm, []).append(each["mismatch"])
    free = [arm for arm in found if study["solve_in"].get(arm) == ""]
    largest = max(abs(value) for arm, each in found.items() if arm not in free for value in each)
    line = f"The {MATCHED[study['match']]} of all arms are equal, to {largest:.2%}"
    if largest > LARGEST_MISMATCH:  # which only a tiny study may have
        line = f"The {MATCHED[study['match']]} of arms differ by up to {largest:.0%}"
    if free:
        words = [f"{arm} ({', '.join(f'{value:+.1%}' for value in found[arm])})" for arm in free]
        line += f", except for arms that are not matched: {'; '.join(words)}"
    return f"{line}."


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
            line = f"{name}: runs of {study['baseline']} that differ in the seed have a deviation of {noise[0]:.4f} {unit} "
            line += f"({noise[1]:.4f} to {noise[2]:.4f})"
            compared = "deviation" in size  # else every other arm has failed
            lines.append(f"{line}; {_power(size, study)} {_sampling(size)}".rstrip() if compared else f"{line}.")
    if outcome["together"]["arms"]:
        power = _power(outcome["together"], study)
        lines.append(f"{all_sizes(outcome).capitalize()}, where a seed counts with its mean: {power}")
        lines += cancelling(outcome)
    known = {size: here["unigram"] for size, here in outcome["sizes"].items() if here["unigram"] is not None}
    if known:
        values = ", ".join(f"{value:.3f} at {size}" for size, value in known.items())
        lines.append(f"Frequencies alone give {values}; an arm that is not below has learnt nothing, and gets no verdict.")
    if study["tune_at"] and study["trend"] == "parameters" and outcome["trends"]:
        cause = "so a change with the size may be due to the rate; config.tune_at='' tries rates at each size"
        lines.append(f"Learning rates were tried at size {study['tune_at']} alone, {cause}.")
    lines += _gained_nothing(outcome)
    if not outcome["trends"]:
        lines.append(f"There is no trend: it takes sizes that differ by a factor of {LEAST_SPREAD}, and no failed arms.")
    return lines + _of_runs(outcome)


def cancelling(outcome: Mapping) -> list[str]:
    """A warning for each arm of which an interval is narrow because a seed's differences cancel between the sizes: in their
    mean, or in the change from size to size. Where they cancel in one, they add up in the other, so it has both."""
    lines = []
    for arm, found in outcome["together"]["arms"].items():
        sums = {f"mean over {all_sizes(outcome)}": (found["difference"]["deviation"], found["independent"])}
        if trend := outcome["trends"].get(arm):
            sums["change from size to size"] = (trend["deviation"], trend["independent"])
        if not any(deviation < CANCEL * independent["deviation"] for deviation, independent in sums.values()):
            continue
        each = [
            f"the {name} would have a deviation of {independent['deviation']:.4f} in place of {deviation:.4f}, and an "
            f"interval of {independent['low']:+.4f} to {independent['high']:+.4f}"
            for name, (deviation, independent) in sums.items()
        ]
        lines.append(
            f"{arm}: the differences of a seed at the sizes depend on each other, which may be chance with few seeds. If "
            f"they were independent, {'; '.join(each)}."
        )
    return lines


def _gained_nothing(outcome: Mapping) -> list[str]:
    """A warning for each arm that is no better at a size with more parameters, where its learning rate was not tried."""
    study, lines = outcome["study"], []
    if not study["tune_at"] or study["trend"] != "parameters":
        return []
    for (small, before), (large, after) in pairwise(outcome["sizes"].items()):
        for arm, each in after["arms"].items():
            first, second = before["arms"][arm]["mean"], each["mean"]
            if large != study["tune_at"] and None not in (first, second) and second >= first > 0:
                lines.append(
                    f"{arm} has {first:.4f} at {small} and {second:.4f} at {large}: it gains nothing by its size. The rate "
                    f"of size {study['tune_at']} may be a bad one there."
                )
    return lines


def _of_runs(outcome: Mapping) -> list[str]:
    """How long the runs took, what the seconds of arms are, and whether all runs had the same versions."""
    sizes = outcome["sizes"].values()
    shares = ", ".join(f"{share:.1%} {name}" for name, share in outcome["shares"].items())
    lines = [f"{outcome['runs']} runs took {outcome['seconds'] / 3600:.1f} hours: {shares}."]
    untimed = [arm for arm in outcome["study"]["arms"] if any(here["arms"][arm]["seconds"] is None for here in sizes)]
    if machine := outcome["made"].get("timed_on"):
        lines.append(f"Seconds are those of an update, timed in turns with the baseline's, times their number ({machine}).")
    if untimed:
        lines.append(f"There are no seconds of {', '.join(untimed)}, because updates were not timed: --plan times them.")
    if len({line.split(", ", 2)[2] for line in outcome["made"]["runs"]}) > 1:
        lines.append("Runs are of several machines, so the two runs of a pair may be of different ones.")
    if len(versions := outcome["made"]["versions"]) > 1:
        lines.append(f"Runs had {len(versions)} sets of versions of libraries, which the report lists at its end.")
    return lines


def _sampling(size: Mapping) -> str:
    """The error by the held-out text, which all runs share: of a run, and of differences beside their error by seeds."""
    known = [arm for arm in size["arms"].values() if "difference" in arm and arm["difference_sampling_error"] is not None]
    if not known:
        return ""
    errors = [(arm["difference_sampling_error"], seeds_error(arm["difference"])) for arm in known]
    by_text, share = max(text for text, _ in errors), max((text / seeds if seeds else 0.0) for text, seeds in errors)
    small = ": the text is too small for the seeds (evaluation.final_sequences)" if share > 1 else ""
    return (
        f"The error by the held-out text is {size['sampling_error']:.4f} for a run and at most {by_text:.4f} for a mean "
        f"difference, there at most {share:.2f} of the error by the seeds{small}."
    )


def _power(found: Mapping, study: Mapping) -> str:
    """What the pairs of a size can find, or those of all sizes, in the arm whose differences vary most."""
    unpaired = found["unpaired_deviation"]
    pairing = "" if unpaired is None else f" ({unpaired:.4f} if runs were not paired)"
    seeds = found["seeds_for_margin"] or "more than a million"
    return (
        f"paired differences have a deviation of at most {found['deviation']:.4f}{pairing}. With it, {study['seeds']} pairs "
        f"find a difference of {found['detectable']:.4f} with a chance of 80 %, one of {study['margin']:g} takes {seeds}, "
        f"and an arm without a difference is called equivalent with a chance of {found['chance_of_equivalent']:.0%}."
    )


def markdown(outcome: Mapping) -> str:
    """The report as Markdown."""
    study = outcome["study"]
    parts = [f"# {study['question']}", "", *(f"- {line}" for line in verdicts(outcome)), ""]
    parts += [training(outcome), "", f"Rule: {study['rule']}", ""]
    for table in tables.main_tables(outcome):
        parts += _section(table)
    parts += ["## Limits", "", *(f"- {line}" for line in notes(outcome)), ""]
    parts += [*_section(tables.rates(outcome)), *_section(tables.details(outcome)), "## Design", ""]
    return "\n".join([*parts, *(f"- {name}: {value}" for name, value in (*design(outcome), *made(outcome))), ""])


def _section(table: tables.Table) -> list[str]:
    about = [table.about, ""] if table.about else []
    return [f"## {table.title}", "", in_markdown(table.columns, table.rows), "", *about]


def made(outcome: Mapping) -> list[tuple[str, str]]:
    """Commits, dates, machines and versions of the runs and of the report, as lines of a name and a value."""
    return [(name, "; ".join(outcome["made"][name])) for name in ("runs", "versions", "report") if name in outcome["made"]]


def design(outcome: Mapping) -> list[tuple[str, str]]:
    """The design as lines of a name and a value."""
    study = outcome["study"]
    solved = f", by {study['solve']}" if study["solve"] else ""
    solved += f" in multiples of {study['multiple']}" if study["solve"] not in ("", "steps") else ""
    tuned = f" at size {study['tune_at']}" if study["tune_at"] else " at each size"
    lines = [("base", study["base"]), ("all arms", " ".join(study["options"])), ("matched", f"{study['match']}{solved}")]
    lines += [("learning rates", f"{', '.join(f'{rate:g}' for rate in study['rates'])}, tried{tuned}")]
    lines += [("optimizer", " ".join(f"{name}={value}" for name, value in outcome["optimizer"].items()))]
    lines += [("seeds", str(study["seeds"])), ("margin", f"{study['margin']:g} {UNITS[study['metric']]}")]
    lines += [(f"matched {arm}", f"by {key}" if key else "not") for arm, key in study["solve_in"].items()]
    for kind in ("sizes", "arms", "cells"):
        lines += [(f"{kind[:-1]} {name}", " ".join(each) or "the base") for name, each in study[kind].items()]
    return lines


def page(outcome: Mapping) -> dict:
    """The values of the template."""
    study = outcome["study"]
    return {
        "study": study,
        "verdicts": verdicts(outcome),
        "picture": picture(outcome),
        "training": training(outcome),
        "tables": tables.main_tables(outcome),
        "styles": dict(zip(study["arms"], styles(len(study["arms"])), strict=True)),
        "charts": {size: _charts(outcome, size) for size in outcome["sizes"]},
        "notes": notes(outcome),
        "appendix": [tables.rates(outcome), tables.details(outcome)],
        "design": design(outcome),
        "made": made(outcome),
    }


def _charts(outcome: Mapping, size: str) -> list[tuple[str, str]]:
    """(caption, SVG) of the metric by FLOPs and by seconds, with bands of the intervals."""
    unit, here, found = UNITS[outcome["study"]["metric"]], outcome["sizes"][size]["arms"], []
    arms = outcome["study"]["arms"]
    for axis, label in AXES.items():
        curves = []
        for arm, style in zip(arms, styles(len(arms)), strict=True):
            known = here[arm]["curve"] and here[arm][axis] is not None
            curve_P3 = points(here[arm], axis) if known else np.empty((0, 3))
            curves += _with_band(curve_P3[len(curve_P3) // 10 :], style)
        if curves:
            found.append((f"{unit} by {label}", line_chart(f"{size}: {unit} by {label}", curves, {})))
    return found


def _with_band(curve_P3: np.ndarray, style: Mapping[str, str]) -> list[Curve]:
    """A curve with the band of its intervals."""
    x_P, y_P, half_P = curve_P3.T
    return [Curve(np.stack([x_P, y_P], 1), width=1.4, marked=True, half=half_P, **style)] if len(x_P) else []
