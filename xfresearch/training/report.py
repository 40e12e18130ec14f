"""report.html: results, curves, config and machine of a run, in one static file that loads nothing from the network."""

from pathlib import Path

import numpy as np
from etils import epath

from xfresearch.pages.charts import Curve, line_chart, thinned
from xfresearch.pages.html import write_page
from xfresearch.training.metrics import read_metrics

STYLES = {"train": {"colour": "training"}, "evaluation": {"colour": "model", "width": 1.8, "marked": True}}


def write_report(
    workdir,
    *,
    config: dict,
    machine: dict,
    baselines: dict[str, float],
    result: dict,
    sample: str | None,
    prompt: str | None,
    commands: dict[str, str],
    lineage: list[dict],
) -> epath.Path:
    """Writes `workdir`/report.html from the run's metrics.jsonl and the arguments, and returns its path.

    config: the resolved config as nested dicts. baselines: bits per byte by name. result: numbers of the last
    evaluation, with `bits_per_byte` (with labels: `accuracy` alone), and under `time` the share of each kind of time.
    sample: the text that the model generated after `prompt`; None with labels. commands: {label: shell command} to run
    next. lineage: the trained models that the run started from (workdir.py), the nearest first.
    """
    path = epath.Path(workdir) / "report.html"
    headline = "accuracy" if sample is None else "bits_per_byte"
    write_page(
        path,
        Path(__file__).parent / "report.html.jinja",
        config=config,
        machine=machine,
        bars=_bars(baselines, result),
        charts=_charts(read_metrics(path.with_name("metrics.jsonl")), config, baselines),
        facts={name: value for name, value in result.items() if name not in (headline, "time")},
        headline=headline.replace("_", " "),
        figure=result.get(headline),
        time={kind: share for kind, share in result.get("time", {}).items() if share > 0},
        sample=sample,
        prompt=prompt,
        commands=commands,
        lineage=lineage,
    )
    return path


def _bars(baselines: dict[str, float], result: dict) -> list[tuple[str, float, float, bool]]:
    """(name, bits per byte, percent of the longest bar, whether it is the model), from the worst to the best."""
    rows = [(name, bits, False) for name, bits in baselines.items()]
    if "bits_per_byte" in result:
        rows.append(("this model", result["bits_per_byte"], True))
    longest = max((bits for _, bits, _ in rows), default=1.0)
    return [(name, bits, 100 * bits / longest, ours) for name, bits, ours in sorted(rows, key=lambda row: -row[1])]


def _charts(rows: list[dict], config: dict, baselines: dict[str, float]) -> list[tuple[str, str, str]]:
    """(title, caption, SVG) of every chart for which the rows have values."""
    tokens = config["batch_size"] * config["sequence_length"]  # per update
    of_text = any("bits_per_byte" in row for row in rows)
    caption = "by step, with the compression baselines" if baselines else "by step"
    bits_per_byte = ("Bits per byte", caption, "bits_per_byte", 1, baselines, False)
    accuracy = ("Accuracy", "of held-out labels, by step", "accuracy", 1, {}, False)
    wanted = (
        bits_per_byte if of_text else accuracy,
        ("Loss", f"nats per {'token' if of_text else 'label'}, by tokens seen", "loss", tokens, {}, False),
        ("Learning rate", "by step", "learning_rate", 1, {}, True),
        ("Tokens per second", "of training, by step", "tokens_per_second", 1, {}, True),
        ("Busiest expert", "its load relative to an even share, one line per layer, by step", "busiest", 1, {}, True),
    )
    rows = [row | {"busiest": _busiest(row["router_load"])} if "router_load" in row else row for row in rows]
    charts = []
    for title, caption, key, scale, levels, from_zero in wanted:
        points = {kind: _points(rows, kind, key, scale) for kind in STYLES}
        curves = [Curve(points[kind], **style) for kind, style in STYLES.items() if len(points[kind])]
        if curves:
            bottom, top = _limits(curves, levels, from_zero)
            charts.append((title, caption, line_chart(title, curves, levels, bottom, top)))
    return charts


def _busiest(loads: dict[str, list[list[float]]]) -> list[float]:
    """For each layer, the load of its busiest expert divided by an even share."""
    return [max(load) * len(load) for layers in loads.values() for load in layers]


def _points(rows: list[dict], kind: str, key: str, scale: float) -> np.ndarray:
    """[points, 1 + lines]: x and the value of each line, for rows with finite values, averaged if they are many."""
    rows = [row for row in rows if row["kind"] == kind and row.get(key) is not None]
    return thinned([(row["step"] * scale, *np.atleast_1d(row[key])) for row in rows])


def _limits(curves: list[Curve], levels: dict[str, float], from_zero: bool) -> tuple[float | None, float | None]:
    """The ends of the y axis. Levels end it just above the highest of them: the first losses of an untrained model
    would otherwise flatten the rest of the chart."""
    if not levels:
        return 0 if from_zero else None, None
    lowest = min(min(curve.points[:, 1].min() for curve in curves), *levels.values())
    return lowest - 0.25, max(levels.values()) + 0.5
