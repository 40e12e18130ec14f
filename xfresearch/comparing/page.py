"""A comparison as one static HTML page: the tables of the terminal, and the curves over each other."""

from pathlib import Path

from xfresearch.comparing import text
from xfresearch.comparing.collecting import Comparison
from xfresearch.comparing.runs import AXES, Run, curve
from xfresearch.pages.charts import Curve, line_chart, styles, thinned
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


def charts(runs: list[Run], measure: str, unit: str) -> dict[str, list[tuple[str, str, str]]]:
    """{axis: (title, caption, SVG) of each chart for which a run has values}."""
    by_axis: dict = {}
    for axis, label in AXES.items():
        by_axis[axis] = []
        for kind, title in KINDS.items():
            points = [thinned(curve(run, kind, measure, axis)) for run in runs]
            curves = [
                Curve(own, style["colour"], 1.3, kind == "evaluation", style["dashes"])
                for own, style in zip(points, styles(len(runs)), strict=True)
                if len(own)
            ]
            if curves:
                chart = line_chart(f"{title} by {label}", curves, {}, top=top(curves))
                by_axis[axis].append((title, f"{unit}, by {label}", chart))
    return by_axis


def top(curves: list[Curve]) -> float | None:
    """The end of the y axis: the highest loss after the first tenth of a curve. The losses before it would flatten the
    rest of the chart."""
    highest = [own.points[len(own.points) // 10 :, 1].max() for own in curves]
    lowest = min(own.points[:, 1].min() for own in curves)
    return max(highest) + 0.05 * (max(highest) - lowest) or None
