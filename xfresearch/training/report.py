"""report.html: what a run did and how well it did it, in one static file that asks the network for nothing."""

import io
import os
import re
from pathlib import Path

import numpy as np
from etils import epath

from xfresearch.training.metrics import read_metrics

# Pictures are drawn in these stand-in colours, which then become the page's own, so that they follow its dark mode.
INK, MUTED, RULE, MODEL, TRAINING = "#010101", "#020202", "#030303", "#040404", "#050505"
PAGE_COLOURS = {INK: "ink", MUTED: "muted", RULE: "rule", MODEL: "model", TRAINING: "training"}
POINTS = 300  # of a drawn curve: longer ones are averaged


def write_report(
    workdir,
    *,
    config: dict,
    machine: dict,
    marks: dict[str, float],
    result: dict,
    sample: str | None,
    prompt: str | None,
    commands: dict[str, str],
) -> epath.Path:
    """Writes `workdir`/report.html from the run's metrics.jsonl and what is given; returns its path.

    config: nested; the resolved one. marks: bits per byte by name. result: numbers of the last evaluation, with
    `bits_per_byte` (`accuracy` alone of labels), and under `time` the share of time by kind. sample: what the model wrote
    after `prompt`; None of labels. commands: what to type next, by what it does.
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
        bars=_bars(marks, result),
        pictures=_pictures(read_metrics(path.with_name("metrics.jsonl")), config, marks),
        facts={name: value for name, value in result.items() if name not in (headline, "time")},
        headline=headline.replace("_", " "),
        figure=result.get(headline),
        time={kind: share for kind, share in result.get("time", {}).items() if share > 0},
        sample=sample,
        prompt=prompt,
        commands=commands,
    )
    fresh = path.with_name(f".report.{os.getpid()}.tmp")
    fresh.write_bytes(html.encode("utf8", "replace"))
    fresh.replace(path)
    return path


def short(value) -> str:
    """A value as a reader wants it: 12.3k, 1.812, 3e-5; anything but a number as it is."""
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
    """Control characters, which a model of bytes may write, as their pictures."""
    return re.sub(r"[\x00-\x08\x0b-\x1f\x7f]", lambda m: chr(0x2421 if m[0] == "\x7f" else 0x2400 + ord(m[0])), text)


def _bars(marks: dict[str, float], result: dict) -> list[tuple[str, float, float, bool]]:
    """(name, bits per byte, percent of the longest bar, is it the model?) from the worst to the best."""
    rows = [(name, bits, False) for name, bits in marks.items()]
    if "bits_per_byte" in result:
        rows.append(("this model", result["bits_per_byte"], True))
    longest = max((bits for _, bits, _ in rows), default=1.0)
    return [(name, bits, 100 * bits / longest, ours) for name, bits, ours in sorted(rows, key=lambda row: -row[1])]


def _pictures(rows: list[dict], config: dict, marks: dict[str, float]) -> list[tuple[str, str, str]]:
    """(title, caption, SVG) of every curve that the rows hold."""
    tokens, of_text = config["batch_size"] * config["sequence_length"], any("bits_per_byte" in row for row in rows)
    beside = ("Bits per byte", "by step, beside the marks" if marks else "by step", "bits_per_byte", 1, marks, False)
    of_labels = ("Accuracy", "of held-out labels, by step", "accuracy", 1, {}, False)
    wanted = (
        beside if of_text else of_labels,
        ("Loss", f"nats per {'token' if of_text else 'label'}, by tokens seen", "loss", tokens, {}, False),
        ("Learning rate", "by step", "learning_rate", 1, {}, True),
        ("Tokens per second", "of training, by step", "tokens_per_second", 1, {}, True),
        ("Busiest expert", "its load over an even share, a line for each layer, by step", "busiest", 1, {}, True),
    )
    rows = [row | {"busiest": _busiest(row["router_load"])} if "router_load" in row else row for row in rows]
    return [
        (title, caption, _picture(title, curves, levels, from_zero))
        for title, caption, key, scale, levels, from_zero in wanted
        if (curves := {kind: curve for kind in ("train", "evaluation") if len(curve := _curve(rows, kind, key, scale))})
    ]


def _busiest(loads: dict[str, list[list[float]]]) -> list[float]:
    """Of each layer, the load of its busiest expert over that of an even share."""
    return [max(load) * len(load) for layers in loads.values() for load in layers]


def _curve(rows: list[dict], kind: str, key: str, scale: float) -> np.ndarray:
    """[points, 1 + lines]: where and what, without numbers that are not finite, averaged down to POINTS."""
    rows = [row for row in rows if row["kind"] == kind and row.get(key) is not None]
    found = [(row["step"] * scale, *np.atleast_1d(row[key])) for row in rows]
    if len(found) <= POINTS:
        return np.array(found, float)
    return np.stack([part.mean(0) for part in np.array_split(np.array(found, float), POINTS)])


def _picture(title: str, curves: dict[str, np.ndarray], marks: dict[str, float], from_zero: bool) -> str:
    """One small line chart as an SVG element in the page's own colours."""
    import matplotlib
    from matplotlib.figure import Figure
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "xfresearch", "font.size": 9}):
        figure = Figure(figsize=(4.2, 2.6))
        axes = figure.add_axes((0.12, 0.105, 0.86, 0.855))
        for kind, colour, width in (("train", TRAINING, 1.0), ("evaluation", MODEL, 1.8)):
            if kind in curves:
                dots = "o" if kind == "evaluation" and len(curves[kind]) <= 40 else None
                axes.plot(
                    curves[kind][:, 0], curves[kind][:, 1:], color=colour, linewidth=width, marker=dots, markersize=3.2
                )
        _draw_marks(axes, curves, marks)
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


def _draw_marks(axes, curves, marks: dict[str, float]) -> None:
    """Each mark as a dashed level, and the view cut above the highest: what a model says before it has learned
    anything would flatten everything else."""
    if not marks:
        return
    for name, bits in marks.items():
        axes.axhline(bits, color=MUTED, linewidth=0.8, dashes=(3, 3))
        place = axes.get_yaxis_transform()  # across the picture by its width, up it by bits
        axes.text(1, bits, name, transform=place, ha="right", va="bottom", color=MUTED, fontsize=8)
    lowest = min(min(curve[:, 1].min() for curve in curves.values()), *marks.values())
    axes.set_ylim(lowest - 0.25, max(marks.values()) + 0.5)


def _page_svg(figure, title: str) -> str:
    from markupsafe import Markup, escape

    buffer = io.StringIO()
    figure.savefig(
        buffer, format="svg", transparent=True, metadata=dict.fromkeys(("Creator", "Date", "Format", "Type"))
    )
    svg = buffer.getvalue()
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r' id="[\w.]+_\d+"', "", svg)  # matplotlib numbers its groups anew in every picture of the page
    for stand_in, name in PAGE_COLOURS.items():
        svg = svg.replace(stand_in, f"var(--{name})")
    return Markup(svg.replace("<svg", f'<svg role="img" aria-label="{escape(title)}"', 1))
