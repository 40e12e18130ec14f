"""A comparison as one static HTML page: the tables of the terminal, and the curves over each other."""

from pathlib import Path

from xfresearch.comparing import text
from xfresearch.comparing.collecting import Comparison
from xfresearch.comparing.runs import AXES, ComparedRun, curve
from xfresearch.options.run_options import DataConfig
from xfresearch.pages.charts import Curve, styles, thinned
from xfresearch.pages.figures import LineChart
from xfresearch.pages.html import write_page

KINDS = {"train": "Training loss", "evaluation": "Held-out loss"}


def write(path, comparison: Comparison) -> None:
    """Writes the page to a file."""
    data, looks = comparison.data, styles(len(comparison.runs))
    write_page(
        path,
        Path(__file__).parent / "compare.html.jinja",
        names=[run.path for run in comparison.runs],
        colours=[style["colour"] for style in looks],
        dashed=[style["dashes"] != "-" for style in looks],
        differences=text.difference_rows(data),
        loss_titles=("run", *text.LOSS_TITLES),
        losses=[(path, *text.loss_cells(run)) for path, run in data["runs"].items()],
        cost_titles=("run", *text.COST_TITLES),
        costs=[(path, *text.cost_cells(run)) for path, run in data["runs"].items()],
        group_titles=text.GROUP_TITLES,
        groups=text.group_rows(data),
        explanations=text.explanations(data),
        task_titles=text.TASK_TITLES,
        tasks=text.task_rows(data),
        notes=data["notes"],
        axes=AXES,
        charts=charts(comparison.runs, data["measure"], data["unit"]),
    )


def charts(runs: list[ComparedRun], measure: str, unit: str) -> dict[str, list[LineChart]]:
    """{axis: each chart for which a run has values}."""
    by_axis: dict = {}
    of_runs = dict(zip((run.path for run in runs), styles(len(runs)), strict=True))
    texts = dict.fromkeys(held_out_text(run) for run in runs if run.rows)
    shown = [("train", KINDS["train"], runs)]
    for name in texts:  # losses on different texts have nothing in common
        title = KINDS["evaluation"] + (f" on {name}" if len(texts) > 1 else "")
        shown.append(("evaluation", title, [run for run in runs if held_out_text(run) == name]))
    for axis, label in AXES.items():
        by_axis[axis] = []
        for kind, title, chosen in shown:
            points = {run.path: thinned(curve(run, kind, measure, axis)) for run in chosen}
            curves = [
                Curve(own, of_runs[path]["colour"], 1.3, kind == "evaluation", of_runs[path]["dashes"])
                for path, own in points.items()
                if len(own)
            ]
            if curves:
                by_axis[axis].append(LineChart(title, f"{unit}, by {label}", label, curves, top=top(curves)))
    return by_axis


def held_out_text(run: ComparedRun) -> str:
    """The text of a run's evaluations, in words."""
    data, split = run.config.data, run.config.evaluation.split
    field = f", {data.text_field}" if data.text_field != DataConfig.text_field else ""
    return f"{data.corpus[0]}, {split}{field}"


def top(curves: list[Curve]) -> float | None:
    """The end of the y axis: the highest loss after the first tenth of a curve. The losses before it would flatten the
    rest of the chart."""
    highest = [own.points[len(own.points) // 10 :, 1].max() for own in curves]
    lowest = min(own.points[:, 1].min() for own in curves)
    return max(highest) + 0.05 * (max(highest) - lowest) or None
