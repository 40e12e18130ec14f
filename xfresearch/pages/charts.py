"""Line charts as SVG elements in the colours of the light theme."""

import io
import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from xfresearch.pages.colours import LIGHT, RUN_COLOURS
from xfresearch.pages.html import short

DASHES = ("-", "--", ":")  # of the first runs, and of those that repeat their colours
BAND = 0.15  # opacity
POINTS = 300  # the most points of a curve: longer ones are averaged
ROOT = 'stroke-linejoin="round" stroke-linecap="butt"'
PAINT = re.compile(r"\b(fill|stroke): ([^;]*)(?:; )?")  # in a style attribute


class Curve(NamedTuple):
    """One or several lines of one colour."""

    points: np.ndarray  # [points, 1 + lines]: x and the value of each line
    colour: str  # a name of colours.LIGHT
    width: float = 1.0
    marked: bool = False  # a mark at each point, unless there are many
    dashes: str = "-"  # Matplotlib's name of the line's style
    half: np.ndarray | None = None  # [points]: half of the width of a band around a single line


def styles(count: int) -> list[dict[str, str]]:
    """Colour and dashes of the curves of so many runs or arms."""
    colours, dashes = len(RUN_COLOURS), len(DASHES)
    return [{"colour": RUN_COLOURS[n % colours], "dashes": DASHES[n // colours % dashes]} for n in range(count)]


def thinned(points: Sequence[tuple[float, ...]] | np.ndarray) -> np.ndarray:
    """The points as an array [points, 1 + lines], averaged to POINTS rows if there are more."""
    if len(points) <= POINTS:
        return np.array(points, float)
    return np.stack([part.mean(0) for part in np.array_split(np.array(points, float), POINTS)])


def with_interval(points: np.ndarray) -> list[Curve]:
    """The curves of points [points, 3], which are x, value and the half width of its interval. Without an interval (NaN)
    at some point, only the values."""
    x, value, half = np.asarray(points, float).T
    middle = Curve(np.stack([x, value], 1), "model", 1.6, True)
    ends = [Curve(np.stack([x, value + sign * half], 1), "training", 0.8) for sign in (-1, 1)]
    return [middle, *(ends if np.isfinite(half).all() else [])]


def line_chart(
    title: str,
    curves: Sequence[Curve],
    levels: Mapping[str, float],
    bottom: float | None = None,
    top: float | None = None,
    second: tuple[str, float] | None = None,
    along: str = "",
):
    """A line chart as an SVG element, with a dashed line for each of `levels`. `bottom` and `top` end the y axis.
    `second` is a second x axis, above: its name, and its value per unit of the first. `along` is the name of the first."""
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "xfresearch", "font.size": 9}):
        figure = Figure(figsize=(4.2, 2.6))
        low, high = (0.17 if along else 0.105), (0.86 if second else 0.96)  # room for the names of the x axes
        axes = figure.add_axes((0.12, low, 0.86, high - low))
        draw_lines(axes, curves, levels, bottom, top, second, along)
        return _page_svg(figure, title)


def draw_lines(axes, curves, levels, bottom=None, top=None, second=None, along="") -> None:
    """Draws the chart of line_chart on Matplotlib's axes."""
    axes.set_xlabel(along, color=LIGHT["muted"], fontsize=8, loc="right", labelpad=2)
    for curve in curves:
        marker = "o" if curve.marked and len(curve.points) <= 40 else None
        x, y = np.split(curve.points, [1], axis=1)
        colour = LIGHT[curve.colour]
        axes.plot(
            x[:, 0], y, marker=marker, markersize=3.2, color=colour, linewidth=curve.width, linestyle=curve.dashes
        )
        if curve.half is not None:
            ends = y[:, 0] - curve.half, y[:, 0] + curve.half
            axes.fill_between(x[:, 0], *ends, color=colour, alpha=BAND, linewidth=0)
    for name, level in levels.items():
        axes.axhline(level, color=LIGHT["muted"], linewidth=0.8, dashes=(3, 3))
        width = axes.get_yaxis_transform()  # x is a fraction of the width
        axes.text(1, level, name, color=LIGHT["muted"], fontsize=8, transform=width, ha="right", va="bottom")
    axes.margins(x=0.02)
    axes.set_ylim(bottom=bottom, top=top)
    _style(axes)
    if second:
        _add_second_axis(axes, *second)


def _add_second_axis(axes, name: str, scale: float) -> None:
    """An axis above the chart, in another unit of x."""
    above = axes.secondary_xaxis("top", functions=(lambda x: x * scale, lambda x: x / scale))
    above.spines["top"].set_visible(False)
    above.set_xlabel(name, color=LIGHT["muted"], fontsize=8, loc="right")
    _style_ticks(above, above.xaxis)


def _style(axes) -> None:
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.spines["bottom"].set_color(LIGHT["rule"])
    axes.grid(axis="y", color=LIGHT["rule"], linewidth=0.6)
    axes.set_axisbelow(True)
    _style_ticks(axes, axes.xaxis, axes.yaxis)


def _style_ticks(axes, *each) -> None:
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    axes.tick_params(length=0, labelcolor=LIGHT["muted"], pad=4)
    for axis in each:
        axis.set_major_locator(MaxNLocator(5))
        axis.set_major_formatter(FuncFormatter(lambda value, _: short(float(value))))


def _page_svg(figure, title: str):
    """The figure as an SVG element for a page with others, with its colours as attributes, which CSS can replace."""
    from markupsafe import Markup, escape

    buffer = io.StringIO()
    figure.savefig(
        buffer, format="svg", transparent=True, metadata=dict.fromkeys(("Creator", "Date", "Format", "Type"))
    )
    svg = buffer.getvalue()
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r' id="[\w.]+_\d+"', "", svg)  # matplotlib uses the same ids in every chart of the page
    svg = re.sub(r"<style.*?</style>", "", svg, flags=re.S)  # they would hold for the whole page: ROOT says the same
    svg = re.sub(r'style="([^"]*)"', _plain, svg)
    return Markup(svg.replace("<svg", f'<svg role="img" aria-label="{escape(title)}" {ROOT}', 1))


def _plain(style: re.Match) -> str:
    """A style attribute with its colours as attributes of their own."""
    paints = "".join(f' {paint}="{colour}"' for paint, colour in PAINT.findall(style[1]))
    return f'style="{PAINT.sub("", style[1])}"{paints}'
