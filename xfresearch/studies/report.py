"""The report of a study: verdicts, picture, tables, curves, then the details with which a reader can check it.

HTML and Markdown are made from results.json alone, in seconds.
"""

from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path

import numpy as np

from xfresearch.pages.charts import Curve, line_chart, styles
from xfresearch.pages.colours import as_file
from xfresearch.pages.html import write_page
from xfresearch.pages.intervals import Interval, intervals
from xfresearch.runtime.files import remove, write_text
from xfresearch.runtime.terminal import visible
from xfresearch.studies import report_tables
from xfresearch.studies.estimates import points
from xfresearch.studies.matching import LARGEST_MISMATCH
from xfresearch.studies.report_tables import UNITS, all_sizes, edge_in_words, seeds_error
from xfresearch.studies.simultaneous import ALPHA
from xfresearch.studies.verdicts import LEAST_SPREAD, levels

SMALL = 5  # pairs; with so many or fewer, the report says that they are few

MATCHED = {"flops": "FLOPs", "parameters": "parameters", "tokens": "tokens", "seconds": "seconds"}
COSTS = {"training_flops": "FLOPs of training", "seconds": "seconds of training"}
WORDS = {
    "better": "better than {baseline}",
    "worse": "worse than {baseline}",
    "equivalent": "equivalent to {baseline} (within {margin:g})",
    "undecided": "not shown to differ from {baseline}, nor to be equivalent",
    "mixed": "not the same beside {baseline} along the ladder",
}
MADE = ("runs", "together", "versions", "report")  # lines of where, when and with what runs and report were made
SHAPES = {"stays": "stays, within the margin", "unknown": "may grow or shrink"}


def write(folder, outcome: Mapping) -> None:
    """All files that are made of results.json alone: report.html, report.md, and the differences for other programs. Without
    a picture, that of earlier results is removed."""
    parts = parts_of(outcome)
    text = markdown(parts)  # before a file is written
    write_page(folder / "report.html", Path(__file__).parent / "study.html.jinja", **parts)
    write_text(folder / "report.md", visible(text))
    report_tables.write_differences(folder, outcome)
    if parts["picture"]:
        write_text(folder / "differences.svg", as_file(parts["picture"]))
    else:
        remove(folder / "differences.svg")


def parts_of(outcome: Mapping) -> dict:
    """The parts of the report, by the names that its template has for them."""
    study = outcome["study"]
    return {
        "study": study,
        "verdicts": verdicts(outcome),
        "picture": picture(outcome),
        "training": training(outcome),
        "tables": report_tables.main_tables(outcome),
        "styles": dict(zip(study["arms"], styles(len(study["arms"])), strict=True)),
        "charts": {size: _charts(outcome, size) for size in outcome["sizes"]},
        "notes": notes(outcome),
        "appendix": report_tables.appendix(outcome),
        "design": _design(outcome),
        "made": [(name, "; ".join(outcome["made"][name])) for name in MADE if name in outcome["made"]],
    }


def markdown(parts: Mapping) -> str:
    """The report as Markdown."""
    study = parts["study"]
    lines = [f"# {study['question']}", "", *(f"- {line}" for line in parts["verdicts"]), ""]
    lines += [parts["training"], "", f"Rule: {study['rule']}", ""]
    lines += [line for table in parts["tables"] for line in table.markdown()]
    lines += ["## Limits", "", *(f"- {line}" for line in parts["notes"]), ""]
    lines += [line for table in parts["appendix"] for line in table.markdown()]
    lines += ["## Design", "", *(f"- {name}: {value}" for name, value in (*parts["design"], *parts["made"])), ""]
    return "\n".join(lines)


def verdicts(outcome: Mapping) -> list[str]:
    """A sentence for each arm: the verdict over all sizes, the verdict at each size, and how the difference changes."""
    return [f"{_sentence(outcome, arm)}." for arm in outcome["study"]["arms"] if arm != outcome["study"]["baseline"]]


def _sentence(outcome: Mapping, arm: str) -> str:
    study, sizes = outcome["study"], outcome["sizes"]
    several = len(sizes) > 1
    decided = outcome["ladder"].get(arm) if several else next(iter(sizes.values()))["arms"][arm]
    if decided is None or "verdict" not in decided:
        return f"{arm}: no verdict{_reason(outcome, arm)}"
    each, where = decided["difference"], f" over {all_sizes(outcome)}" if several else ""
    line = f"{arm} is {_in_words(decided, study)}{where}: {each['mean']:+.4f} {UNITS[study['metric']]} "
    line += f"({each['low']:+.4f} to {each['high']:+.4f})"
    by_verdict: dict[str, list[str]] = {}
    for name, here in sizes.items() if several else ():
        by_verdict.setdefault(here["arms"][arm]["verdict"], []).append(name)
    by_size = [f"{verdict} at {', '.join(names)}" for verdict, names in by_verdict.items()]
    pairs = decided.get("look", {}).get("pairs", study["seeds"])
    settled = [f"settled after {pairs} of {study['seeds']} pairs"] if pairs < study["seeds"] else []
    return "; ".join([line, *by_size, *_growth(outcome, arm), *settled, *_edge(outcome, arm)])


def _reason(outcome: Mapping, arm: str) -> str:
    """Why an arm has no verdict: a failure of the arm or of the baseline at some size."""
    several = len(outcome["sizes"]) > 1
    for name in dict.fromkeys((arm, outcome["study"]["baseline"])):
        for size, here in outcome["sizes"].items():
            if name in here["failures"]:
                whose = "" if name == arm else f" without {name}"
                return f"{whose}{f' at {size}' if several else ''}: {here['failures'][name]}"
    return ""


def _in_words(decided: Mapping, study: Mapping) -> str:
    """The verdict of an arm at a rung, or over the ladder."""
    words = WORDS[decided["verdict"]].format(baseline=study["baseline"], margin=study["margin"])
    level = decided.get("look", {}).get("level", ALPHA)
    if decided["verdict"] == "equivalent" and decided["p_corrected"] < level:
        words += f", though {'better' if decided['difference']['mean'] < 0 else 'worse'}"
    if decided["verdict"] == "undecided" and decided["p_no_worse"] < level:
        words += f", but not worse by {study['margin']:g}"
    return words


def _growth(outcome: Mapping, arm: str) -> list[str]:
    """How the difference of an arm changes along the ladder, if that is known: of a gain or a cost, by its mean."""
    study, lines = outcome["study"], []
    trend = study["trend"].rpartition(".")[2].replace("_", " ")
    along = {"sizes": trend, "budgets": "tokens for each parameter"}
    over = outcome["ladder"].get(arm, {})
    for axis, each in over.get("changes", {}).items():
        known = each["shape"] in ("grows", "shrinks")
        subject = "difference" if not known else "gain" if over["difference"]["mean"] < 0 else "cost"
        ends = [f"{each[end]:,.0f}" if each["last"] >= 100 else f"{each[end]:.3g}" for end in ("first", "last")]
        change = f"{each['change']:+.4f} ({each['low']:+.4f} to {each['high']:+.4f})"
        word = SHAPES.get(each["shape"], each["shape"])
        lines.append(f"along {along[axis]} from {' to '.join(ends)} the {subject} {word}: {change}")
    return lines


def _edge(outcome: Mapping, arm: str) -> list[str]:
    """A warning for each size at which the best learning rate may lie beyond those that were tried."""
    tuned = list(outcome["study"]["tune_at"] or outcome["sizes"])
    sentences = []
    for size in tuned:
        if (here := outcome["sizes"][size]["arms"][arm])["edge"]:
            rate = f"{here['rate']:g}{f' at {size}' if len(tuned) > 1 else ''}"
            edge = f"{edge_in_words(here)} that was tried"
            sentences.append(f"its best learning rate, {rate}, is {edge}: a better one may exist")
    return sentences


def picture(outcome: Mapping) -> str:
    """The differences of all arms at all sizes as an SVG element; '' if no arm has one."""
    study, groups = outcome["study"], {}
    for arm in study["arms"]:
        decided = {size: here["arms"][arm] for size, here in outcome["sizes"].items() if "difference" in here["arms"][arm]}
        if decided:
            groups[arm] = [_interval(name, own) for name, own in decided.items()]
            if (own := outcome["ladder"].get(arm)) and len(decided) > 1:
                groups[arm].append(_interval(all_sizes(outcome), own)._replace(whole=True))
    label = f"{UNITS[study['metric']]} beside {study['baseline']}: less is better. Lines are 95 % intervals"
    return intervals(study["question"], groups, study["margin"], label) if groups else ""


def _interval(name: str, decided: Mapping) -> Interval:
    difference = decided["difference"]
    return Interval(name, difference["mean"], difference["low"], difference["high"], decided["verdict"])


def training(outcome: Mapping) -> str:
    """Sentences about the training: the runs, the cost that is equal for all arms, and the options that were tuned."""
    study, baselines = outcome["study"], [here["arms"][outcome["study"]["baseline"]] for here in outcome["sizes"].values()]
    sizes = " and ".join(f"{each['parameters']:,} parameters on {each['tokens']:,} tokens" for each in baselines)
    more = " (more, where the best one was at the edge)" if study["extensions"] else ""
    rates = f"the best of {len(study['rates'])} learning rates{more}"
    runs = "one run for each rate" if study["rate_runs"] == 1 else f"{study['rate_runs']} runs for each hopeful rate"
    where = f"at {' and '.join(study['tune_at'])}, and takes it to the others" if study["tune_at"] else "at each size"
    optimizer = outcome["optimizer"]
    trained = f"{sizes}, by {optimizer['kind']} with a weight decay of {optimizer['weight_decay']:g}"
    chosen = f"Each arm has {rates}, with {runs} {where}"
    looks = study.get("looks", ())
    number = f"{'up to ' if looks else ''}{study['seeds']} runs"
    stops = f" An arm that has a verdict at every rung after {' or '.join(map(str, looks))} gets no more." if looks else ""
    return (
        f"{study['baseline']} trains {trained}. {_matched(outcome)} {chosen}; then {number} decide, in pairs that share a "
        f"seed.{stops}"
    )


def _matched(outcome: Mapping) -> str:
    """Sentences about the matched cost: the arms that are not matched on purpose, and the largest mismatch of the others."""
    study = outcome["study"]
    by_arm: dict = {}
    for here in outcome["sizes"].values():
        for arm, each in here["arms"].items():
            by_arm.setdefault(arm, []).append(each["mismatch"])
    free = [arm for arm in by_arm if study["solve_in"].get(arm) == ""]
    largest = max(abs(value) for arm, each in by_arm.items() if arm not in free for value in each)
    line = f"The {MATCHED[study['match']]} of all arms are equal, to {largest:.2%}"
    if largest > LARGEST_MISMATCH:  # which only a tiny study may have
        line = f"The {MATCHED[study['match']]} of arms differ by up to {largest:.0%}"
    if free:
        words = [f"{arm} ({', '.join(f'{value:+.1%}' for value in by_arm[arm])})" for arm in free]
        line += f", except for arms that are not matched: {'; '.join(words)}"
    return f"{line}."


def notes(outcome: Mapping) -> list[str]:
    """The limits of the study, in sentences."""
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
            compared = "error" in size  # else every other arm has failed
            lines.append(f"{line}; {_power(size, study)} {_sampling(size)}".rstrip() if compared else f"{line}.")
    known = {size: here["unigram"] for size, here in outcome["sizes"].items() if here["unigram"] is not None}
    if known:
        values = ", ".join(f"{value:.3f} at {size}" for size, value in known.items())
        lines.append(f"Frequencies alone give {values}; an arm that is not below has learnt nothing, and gets no verdict.")
    lines += [*history(outcome), *rests_on(outcome), *outcome["notes"], *_gained_nothing(outcome)]
    if len(outcome["sizes"]) > 1 and not any(each["changes"] for each in outcome["ladder"].values()):
        lines.append(f"No change is known: it takes sizes that differ by a factor of {LEAST_SPREAD}, and no failed arms.")
    return lines + _of_runs(outcome)


def history(outcome: Mapping) -> list[str]:
    """When the rule was written, and which runs existed by then."""
    versions = outcome["versions"]
    if not versions:
        return ["This study is from before the ledger: nothing shows that its rule was written before its runs."]
    last, seen = versions[-1], versions[-1]["seen"]
    where = f" ({', '.join(seen['directories'])})" if seen["directories"] else ""
    number = seen["runs"] + seen["others"]
    existed = f"{number} runs existed{where}, {seen['runs']} of which it uses" if number else "no run existed by then"
    warning = ": what it says may have been chosen after the fact" if number else ""
    line = f"The rule was written on {last['date']} (digest {last['digest']}), and {existed}{warning}."
    return [line, *([f"It is version {len(versions)}: all are below."] if len(versions) > 1 else [])]


def rests_on(outcome: Mapping) -> list[str]:
    """What the answer depends on: budgets, the choice of rates, and the worth of the margin in tokens."""
    study, margin, lines = outcome["study"], outcome["margin"], []
    if len(study["budgets"]) < 2:
        lines.append("It rests on one number of tokens: whether a difference stays with more is not known.")
    if study["rate_runs"] == 1:
        lines.append("Each learning rate had one run, so a rate may be the best by chance.")
    if study["tune_at"] and len(study["tune_at"]) < 2 < 1 + len(outcome["sizes"]):
        lines.append(f"Learning rates were tried at {study['tune_at'][0]} alone: a difference elsewhere may be due to them.")
    worth = [f"{share:.1%} more tokens at {size}" for size, share in margin["tokens_worth"].items() if share is not None]
    nats = f" is {margin['nats_per_token']:.4f} nats per token" if margin["nats_per_token"] is not None else ""
    words = [nats, f" is worth {', '.join(worth)}" if worth else ""]
    if any(words):
        lines.append(f"The margin of {study['margin']:g} {UNITS[study['metric']]}{' and'.join(filter(None, words))}.")
    return lines


def _gained_nothing(outcome: Mapping) -> list[str]:
    """A warning for each arm that is no better at the next size, with as many tokens for each parameter, where its learning
    rate was not tried."""
    study, lines = outcome["study"], []
    if not study["tune_at"] or study["trend"] != "parameters":
        return []
    by_budget: dict[str, list[str]] = {}
    for rung, here in outcome["sizes"].items():
        by_budget.setdefault(str(here["budget"]), []).append(rung)
    for small, large in (pair for rungs in by_budget.values() for pair in pairwise(rungs)):
        before, after = outcome["sizes"][small], outcome["sizes"][large]
        for arm, each in after["arms"].items():
            first, second = before["arms"][arm]["mean"], each["mean"]
            if large not in study["tune_at"] and None not in (first, second) and second >= first > 0:
                lines.append(
                    f"{arm} has {first:.4f} at {small} and {second:.4f} at {large}: it gains nothing by its size. The rate "
                    f"of {' and '.join(study['tune_at'])} may be a bad one there."
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
        lines.append(f"There are no seconds of {', '.join(untimed)}, because updates were not timed: --time times them.")
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


def _power(power: Mapping, study: Mapping) -> str:
    """The smallest difference that the pairs of a rung can find, in the arm whose differences vary most."""
    seeds = power["seeds_for_margin"] or "more than a million"
    return (
        f"mean differences have an error of at most {power['error']:.4f}. With it, {study['seeds']} pairs find a difference "
        f"of {power['detectable']:.4f} with a chance of 80 %, one of {study['margin']:g} takes {seeds}, and an arm without "
        f"a difference is called equivalent with a chance of {power['chance_of_equivalent']:.0%}."
    )


def _design(outcome: Mapping) -> list[tuple[str, str]]:
    """The design as lines of a name and a value."""
    study = outcome["study"]
    solved = f", by {study['solve']}" if study["solve"] else ""
    matched = study["match"] + (f" to {study['matched_to']}" if study.get("matched_to") else "")
    solved += f" in multiples of {study['multiple']}" if study["solve"] not in ("", "steps") else ""
    tuned = f" at {' and '.join(study['tune_at'])}" if study["tune_at"] else " at each size"
    lines = [("base", study["base"]), ("all arms", " ".join(study["options"])), ("matched", f"{matched}{solved}")]
    lines += [("learning rates", f"{', '.join(f'{rate:g}' for rate in study['rates'])}, tried{tuned}")]
    lines += [("optimizer", " ".join(f"{name}={value}" for name, value in outcome["optimizer"].items()))]
    if study["budgets"]:
        lines += [("tokens for each parameter", ", ".join(f"{each:g}" for each in study["budgets"]))]
    lines += [("seeds", str(study["seeds"])), ("margin", f"{study['margin']:g} {UNITS[study['metric']]}")]
    lines += [(f"matched {arm}", f"by {key}" if key else "not") for arm, key in study["solve_in"].items()]
    if looks := study.get("looks", ()):
        pairs = (*looks, study["seeds"])
        words = [f"{each} pairs at {level:.2%}" for each, level in zip(pairs, levels(pairs), strict=True)]
        lines += [("looks", f"after {', '.join(words)}")]
    for kind in ("sizes", "arms", "cells"):
        lines += [(f"{kind[:-1]} {name}", " ".join(each) or "the base") for name, each in study[kind].items()]
    return lines


def _charts(outcome: Mapping, size: str) -> list[tuple[str, str]]:
    """(caption, SVG) of the metric by FLOPs and by seconds, with bands of the intervals."""
    unit, here, charts = UNITS[outcome["study"]["metric"]], outcome["sizes"][size]["arms"], []
    arms = outcome["study"]["arms"]
    for axis, label in COSTS.items():
        curves = []
        for arm, style in zip(arms, styles(len(arms)), strict=True):
            if here[arm]["curve"] and here[arm][axis] is not None:
                curve_P3 = points(here[arm], axis)
                x_P, y_P, half_P = curve_P3[len(curve_P3) // 10 :].T
                curves.append(Curve(np.stack([x_P, y_P], 1), width=1.4, marked=True, half=half_P, **style))
        if curves:
            charts.append((f"{unit} by {label}", line_chart(f"{size}: {unit} by {label}", curves, {})))
    return charts
