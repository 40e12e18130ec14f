"""Figures of pages as Matplotlib's, for papers and slides: as wide as one or two columns of a page, as PDF and PNG.

Fonts are embedded as TrueType, which publishers ask for. Colours are those of the pages, in the light theme.
"""

import io
import warnings
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import numpy as np

from xfresearch.pages.charts import draw_lines
from xfresearch.pages.colours import LIGHT
from xfresearch.pages.figures import HeatMap, LineChart
from xfresearch.pages.heat_map import LABELS, LETTERS, LETTERS_OF_NAME, colour, ends, line
from xfresearch.runtime.errors import UserError

if TYPE_CHECKING:  # without it, `import xfresearch` does not wait for Matplotlib
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

WIDTHS = {1: 3.25, 2: 6.75}  # inches of so many columns, as in the template of ICML
HEIGHT = 0.62  # of a line chart, in widths of one column
DPI = 300
SHADES = 256  # of a heat map
LOOK: Any = {"pdf.fonttype": 42, "font.size": 8, "axes.titlesize": 8, "axes.titlelocation": "left"}
LOOK |= {"text.parse_math": False}  # a token may have a $


def plots(pictures: Iterable[HeatMap | LineChart], columns: int = 1) -> dict[str, "Figure"]:
    """{title: Matplotlib's figure} of pictures, as wide as `columns` of a page. Raises UserError unless that is 1 or 2."""
    if columns not in WIDTHS:
        raise UserError(f"columns={columns} is not allowed: it must be 1 or 2")
    return {picture.title: _plot(picture, WIDTHS[columns]) for picture in pictures}


def files(pictures: Iterable[HeatMap | LineChart]) -> dict[str, bytes]:
    """{name: content} of figure_0.pdf, figure_0.png and so on, as wide as one column."""
    made: dict[str, bytes] = {}
    for number, figure in enumerate(plots(pictures).values()):
        made |= {f"figure_{number}.{kind}": saved(figure, kind) for kind in ("pdf", "png")}
    return made


def saved(figure: "Figure", kind: str) -> bytes:
    """The file of a figure. The same figure gives the same bytes, at any time."""
    import matplotlib

    buffer = io.BytesIO()
    metadata = {"CreationDate": None} if kind == "pdf" else {"Software": None}
    with matplotlib.rc_context(LOOK), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph")  # a token may be in any script: a box stands for what the font lacks
        figure.savefig(buffer, format=kind, dpi=DPI, metadata=metadata)
    return buffer.getvalue()


def _plot(picture: HeatMap | LineChart, width: float) -> "Figure":
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context(LOOK):
        figure = Figure(figsize=(width, HEIGHT * WIDTHS[1]), layout="constrained")
        axes = figure.add_subplot(title=picture.title)
        if isinstance(picture, LineChart):
            draw_lines(axes, *picture[3:], along=picture.x)
        else:
            _draw_cells(axes, picture)
    return figure


def _draw_cells(axes: "Axes", picture: HeatMap) -> None:
    """Draws a heat map with its colours and their scale."""
    from matplotlib.colors import ListedColormap, Normalize, to_rgba

    values = np.asarray(picture.values, np.float64)
    low, high = ends(values, picture.low, picture.high)
    shades = [colour(value, low, high) for value in np.linspace(low, high, SHADES)]
    colours = ListedColormap([to_rgba(LIGHT[name], opacity) for name, opacity in shades])
    cells = axes.pcolormesh(values, cmap=colours, norm=Normalize(low, high), edgecolors=LIGHT["rule"], linewidth=0.2)
    axes.set(xlabel=picture.columns, ylabel=picture.rows)
    for axis, names in ((axes.xaxis, [line(name, LETTERS_OF_NAME) for name in picture.names]), (axes.yaxis, [])):
        count = values.shape[axis is axes.xaxis]
        shown = range(0, count, 1 if names else -(-count // LABELS))
        axis.set_ticks([number + 0.5 for number in shown], [names[number] if names else str(number) for number in shown])
    axes.tick_params(length=0)
    axes.tick_params(axis="x", labelrotation=90 if picture.names else 0)
    for (row, column), text in np.ndenumerate(np.array(picture.cells() or np.empty((0, 0)))):
        if not np.isnan(values[row, column]):
            axes.text(column + 0.5, row + 0.5, line(text, LETTERS), ha="center", va="center", fontsize=6)
    axes.figure.colorbar(cells, ax=axes)
