"""A comparison as text for the terminal: tables and explanations of their figures."""

import math

from xfresearch.comparing.collecting import Comparison
from xfresearch.pages.html import short
from xfresearch.runtime.tables import PLUS_MINUS, table, to_columns

ABSENT = "-"
COST_TITLES = ("parameters", "FLOPs/token", "steps", "tokens", "seconds", "training loss")
LOSS_TITLES = ("held-out loss", "std. error", "difference", "95 % interval", "p, Holm", "these runs")
GROUP_TITLES = ("first run", "seeds", "each seed's loss", "mean", "+-", "difference", "95 % interval", "the change")
TASK_TITLES = ("task", "metric", "items", "run", "value", "first", "difference", "95 % interval", "higher", "lower",
               "p, Holm", "these runs")  # fmt: skip


def text(comparison: Comparison) -> str:
    """The whole comparison."""
    data = comparison.data
    rows = [(path, *cost_cells(run), *loss_cells(run)) for path, run in data["runs"].items()]
    parts = ["The runs have the same options."]
    if data["differences"]:
        names = [run.path for run in comparison.runs]
        parts = [table(to_columns(("option", *names), difference_rows(data)))]
    parts += [table(to_columns(("run", *COST_TITLES, *LOSS_TITLES), rows)), "\n".join(explanations(data))]
    parts.append(table(to_columns(GROUP_TITLES, group_rows(data))))
    if data["tasks"]:
        parts.append(table(to_columns(TASK_TITLES, task_rows(data))))
    parts += ["\n".join(f"note: {note}" for note in data["notes"])]
    return "\n\n".join(filter(None, parts))


def difference_rows(data: dict) -> list[tuple[str, ...]]:
    """The cells of each option that differs: its name, and its value in each run."""
    return [
        (option, *(repr(values[path]) if path in values else ABSENT for path in data["runs"]))
        for option, values in data["differences"].items()
    ]


def cost_cells(run: dict) -> tuple[str, ...]:
    """The cells of a run under COST_TITLES."""
    tokens = ABSENT if run["tokens"] is None else short(run["tokens"])
    trained = (_known(run["steps"], "{:,.0f}"), tokens, _known(run["seconds"], "{:,.1f}"))
    return (short(run["parameters"]), short(run["flops_per_token"]), *trained, _known(run["training_loss"], "{:.4f}"))


def loss_cells(run: dict) -> tuple[str, ...]:
    """The cells of a run under LOSS_TITLES."""
    own = run["held_out"]
    if own is None:
        return (ABSENT,) * len(LOSS_TITLES)
    loss = (f"{own['value']:.4f}", f"{own['standard_error']:.4f}")
    return (*loss, *(_pair_cells(own["pair"]) if "pair" in own else ("", "", "", "reference")))


def _pair_cells(pair: dict) -> tuple[str, ...]:
    interval = "{:+.4f} to {:+.4f}".format(*pair["interval"])
    return f"{pair['difference']:+.4f}", interval, f"{pair['p_holm']:.2g}", pair["verdict"]


def group_rows(data: dict) -> list[tuple[str, ...]]:
    """The cells of each group of runs that differ in the seed alone, under GROUP_TITLES."""
    rows: list[tuple[str, ...]] = []
    for group in data["groups"]:
        seeds = ", ".join(ABSENT if seed is None else str(seed) for seed in group["seeds"])
        own = (", ".join(f"{loss:.4f}" for loss in group["losses"]) or ABSENT, _known(group["mean"], "{:.4f}"))
        half = "" if math.isnan(group["half"]) else f"{group['half']:.4f}"
        change = f"{group['difference']:+.4f}" if "difference" in group else ""
        interval = "{:+.4f} to {:+.4f}".format(*group["interval"]) if "interval" in group else ""
        rows.append((group["runs"][0], seeds, *own, half, change, interval, group.get("verdict", "reference")))
    return rows


def _known(value: float | None, form: str) -> str:
    return ABSENT if value is None else form.format(value)


def task_rows(data: dict) -> list[tuple[str, ...]]:
    """The cells of each task, metric and run under TASK_TITLES."""
    rows: list[tuple[str, ...]] = []
    for name, metrics in data["tasks"].items():
        for metric, pairs in metrics.items():
            for path, pair in pairs.items():
                difference, interval, p, verdict = _pair_cells(pair)
                numbers = (f"{pair['items']:,}", path, f"{pair['value']:.4f}", f"{pair['reference']:.4f}")
                counts = (f"{pair['higher']:,}", f"{pair['lower']:,}")
                rows.append((name, metric, *numbers, difference, interval, *counts, p, verdict))
    return rows


def explanations(compared: dict) -> list[str]:
    """What the figures of the runs mean."""
    lines = [f"Losses are in {compared['unit']}. FLOPs are those of a forward pass; training needs three times as many."]
    if data := compared["held_out"]:
        units = next(run["held_out"]["units"] for run in compared["runs"].values() if run["held_out"])
        first = next(iter(compared["runs"]))
        lines += [
            f"Held-out loss: {data['corpus']}, {data['split']}, {data['description']}.",
            f"Differences are to {first}, paired over {units:,} {data['unit']}.",
            "Those intervals are over the held-out text: they do not say how much another seed would change.",
            f"Runs that differ in the seed alone are one row of the last table, over seeds: {PLUS_MINUS}.",
        ]
    return lines
