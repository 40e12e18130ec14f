"""report.html: results, curves, config and machine of a run, in one static file that loads nothing from the network."""

import io
import os
import re
from pathlib import Path

import numpy as np
from etils import epath

from xfresearch.training.metrics import read_metrics

# Charts are drawn in these placeholder colours. CSS variables then replace them, so that charts follow the dark mode.
INK, MUTED, RULE, MODEL, TRAINING = "#010101", "#020202", "#030303", "#040404", "#050505"
PAGE_COLOURS = {INK: "ink", MUTED: "muted", RULE: "rule", MODEL: "model", TRAINING: "training"}
POINTS = 300  # the most points of a curve: longer ones are averaged


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
    import jinja2

    path = epath.Path(workdir) / "report.html"
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"short": short, "visible": visible}
    headline = "accuracy" if sample is None else "bits_per_byte"
    html = environment.get_template("report.html.jinja").render(
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
    temporary = path.with_name(f".report.{os.getpid()}.tmp")
    temporary.write_bytes(html.encode("utf8", "replace"))
    temporary.replace(path)
    return path


def short(value) -> str:
    """A value as short text: 12.3k, 1.812, 3e-5. Anything but a number stays as it is."""
    if isinstance(value, list | tuple):
        return ", ".join(map(short, value)) or "none"
    if isinstance(value, bool | str | None) or not isinstance(value, int | float):
        return str(value)
    for size, letter in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e4, "k")):
        if abs(value) >= size:
            return f"{value / min(size, 1e3 if letter == 'k' else size):.3g}{letter}"
    if isinstance(value, int):
        return f"{value:,}"
    if 0 < abs(value) < 1e-3:
        return re.sub(r"(\.0)?e-0", "e-", f"{value:.1e}")
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def visible(text: str) -> str:
    """`text` with control characters, which a byte-level model may generate, replaced by their Unicode symbols."""
    return re.sub(r"[\x00-\x08\x0b-\x1f\x7f]", lambda m: chr(0x2421 if m[0] == "\x7f" else 0x2400 + ord(m[0])), text)


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
    return [
        (title, caption, _chart(title, curves, levels, from_zero))
        for title, caption, key, scale, levels, from_zero in wanted
        if (curves := {kind: curve for kind in ("train", "evaluation") if len(curve := _curve(rows, kind, key, scale))})
    ]


def _busiest(loads: dict[str, list[list[float]]]) -> list[float]:
    """For each layer, the load of its busiest expert divided by an even share."""
    return [max(load) * len(load) for layers in loads.values() for load in layers]


def _curve(rows: list[dict], kind: str, key: str, scale: float) -> np.ndarray:
    """[points, 1 + lines]: x and the value of each line, for rows with finite values, averaged to POINTS rows."""
    rows = [row for row in rows if row["kind"] == kind and row.get(key) is not None]
    found = [(row["step"] * scale, *np.atleast_1d(row[key])) for row in rows]
    if len(found) <= POINTS:
        return np.array(found, float)
    return np.stack([part.mean(0) for part in np.array_split(np.array(found, float), POINTS)])


def _chart(title: str, curves: dict[str, np.ndarray], baselines: dict[str, float], from_zero: bool) -> str:
    """A line chart as an SVG element in the colours of the page."""
    import matplotlib
    from matplotlib.figure import Figure
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "xfresearch", "font.size": 9}):
        figure = Figure(figsize=(4.2, 2.6))
        axes = figure.add_axes((0.12, 0.105, 0.86, 0.855))
        for kind, colour, width in (("train", TRAINING, 1.0), ("evaluation", MODEL, 1.8)):
            if kind in curves:
                marker = "o" if kind == "evaluation" and len(curves[kind]) <= 40 else None
                x, y = np.split(curves[kind], [1], axis=1)
                axes.plot(x[:, 0], y, color=colour, linewidth=width, marker=marker, markersize=3.2)
        _draw_baselines(axes, curves, baselines)
        axes.margins(x=0.02)
        if from_zero:
            axes.set_ylim(bottom=0)
        axes.spines[["top", "right", "left"]].set_visible(False)
        axes.spines["bottom"].set_color(RULE)
        axes.grid(axis="y", color=RULE, linewidth=0.6)
        axes.set_axisbelow(True)
        axes.tick_params(length=0, labelcolor=MUTED, pad=4)
        for axis, count in ((axes.xaxis, 5), (axes.yaxis, 5)):
            axis.set_major_locator(MaxNLocator(count))
            axis.set_major_formatter(FuncFormatter(lambda value, _: short(float(value))))
        return _page_svg(figure, title)


def _draw_baselines(axes, curves, baselines: dict[str, float]) -> None:
    """Draws each baseline as a dashed line and ends the y axis just above the highest. The first losses of an untrained
    model would otherwise flatten the rest of the chart."""
    if not baselines:
        return
    for name, bits in baselines.items():
        axes.axhline(bits, color=MUTED, linewidth=0.8, dashes=(3, 3))
        transform = axes.get_yaxis_transform()  # x is a fraction of the width, y is in bits
        axes.text(1, bits, name, transform=transform, ha="right", va="bottom", color=MUTED, fontsize=8)
    lowest = min(min(curve[:, 1].min() for curve in curves.values()), *baselines.values())
    axes.set_ylim(lowest - 0.25, max(baselines.values()) + 0.5)


def _page_svg(figure, title: str) -> str:
    """The figure as an SVG element, with the CSS variables of the page for its colours."""
    from markupsafe import Markup, escape

    buffer = io.StringIO()
    figure.savefig(
        buffer, format="svg", transparent=True, metadata=dict.fromkeys(("Creator", "Date", "Format", "Type"))
    )
    svg = buffer.getvalue()
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r' id="[\w.]+_\d+"', "", svg)  # matplotlib uses the same ids in every chart of the page
    for placeholder, name in PAGE_COLOURS.items():
        svg = svg.replace(placeholder, f"var(--{name})")
    return Markup(svg.replace("<svg", f'<svg role="img" aria-label="{escape(title)}"', 1))
