"""Heat maps as SVG elements in the colours of the light theme: a cell is more opaque for a larger value."""

from html import escape

import numpy as np

from xfresearch.pages.colours import LIGHT
from xfresearch.pages.html import short
from xfresearch.runtime.terminal import visible

CELL = 18  # the largest size of a cell
WIDE = 52  # the least width of a cell with a text
LETTERS = 8  # of a text in a cell
LETTERS_OF_NAME = 14
LETTER = 5.4  # the width of a letter
WIDTH = 380  # of all cells together
LABELS = 12  # the most labels of an axis


def heat_map(
    title: str, values, rows: str, columns: str, low: float | None = None, high: float | None = None, names=(), texts=None
) -> str:
    """An SVG element of the matrix `values`, with its first row at the bottom; NaN has no cell.

    rows, columns: what they are. low, high: values without colour and of full colour; by default the smallest and the
    largest. If low is negative, 0 has no colour, and negative values have another one. names: of the columns, instead of
    their numbers; upright under cells without texts. texts: a matrix of texts in the cells. · is a space at the start."""
    values = np.asarray(values, np.float64)
    count_rows, count_columns = values.shape
    size = min(CELL, WIDTH / count_columns)
    names = [line(name, LETTERS_OF_NAME) for name in names]
    under = LETTER * max(map(len, names), default=0) + 4  # the longest name
    wide, high_of_cell = (max(WIDE, under), CELL) if texts is not None else (CELL, CELL) if names else (size, size)
    low, high = ends(values, low, high)
    left, bottom = 46, count_rows * high_of_cell + 8
    parts = [_cells(values, (wide, high_of_cell), left, low, high, (rows, columns), names, texts)]
    labels = list(enumerate(names)) or [(c, str(c)) for c in _some(count_columns)]
    if names and texts is None:
        parts += [_upright(left + (c + 0.5) * wide + 3, bottom + 4, name) for c, name in labels]
        bottom += under - 7
    else:
        parts += [_label(left + (c + 0.5) * wide, bottom + 11, name, "middle") for c, name in labels]
    parts += [_label(left - 5, 8 + (count_rows - 0.5 - r) * high_of_cell + 3.5, str(r), "end") for r in _some(count_rows)]
    parts.append(_label(left + count_columns * wide / 2, bottom + 25, columns, "middle"))
    middle = 8 + count_rows * high_of_cell / 2
    parts.append(_label(8, middle, rows, "middle", f' transform="rotate(-90 8 {middle:g})"'))
    parts.append(_legend(left, bottom + 34, low, high))
    width, height = left + max(count_columns * wide, 170) + 6, bottom + 52
    head = f'<svg xmlns="http://www.w3.org/2000/svg" class="block" role="img" aria-label="{escape(title)}" '
    size_of = f'width="{width:g}" height="{height:g}" viewBox="0 0 {width:g} {height:g}" '
    return f'{head}{size_of}font-family="system-ui, sans-serif" font-size="9">{"".join(parts)}</svg>'


def ends(values: np.ndarray, low: float | None, high: float | None) -> tuple[float, float]:
    """The values without colour and of full colour. Values that are shown as the same number have the same colour: theirs
    are not the ends."""
    ends = float(np.nanmin(values)) if low is None else low, float(np.nanmax(values)) if high is None else high
    return (min(0.0, *ends), max(0.0, *ends)) if short(ends[0]) == short(ends[1]) else ends


def colour(value: float, low: float, high: float) -> tuple[str, float]:
    """Colour, a name of LIGHT, and opacity of a value."""
    if low < 0:
        share = value / (high if value > 0 else low) if (high if value > 0 else low) else 0.0
        return ("model" if value > 0 else "training"), min(max(share, 0.0), 1.0)
    return "model", min(max((value - low) / ((high - low) or 1.0), 0.0), 1.0)


def _cells(values, size: tuple[float, float], left: float, low: float, high: float, axes, names, texts) -> str:
    wide, tall = size
    parts = []
    for (r, c), value in np.ndenumerate(values):
        if np.isnan(value):
            continue
        name, opacity = colour(value, low, high)
        x, y = left + c * wide, 8 + (len(values) - 1 - r) * tall
        text = escape(f"{axes[0]} {r}, {axes[1]} {names[c] if len(names) else c}: {short(float(value))}")
        look = f'fill="{LIGHT[name]}" fill-opacity="{opacity:.3f}" stroke="{LIGHT["rule"]}" stroke-width=".4"'
        parts.append(f'<rect x="{x:g}" y="{y:g}" width="{wide:g}" height="{tall:g}" {look}><title>{text}</title></rect>')
        if texts is not None:
            parts.append(_label(x + wide / 2, y + tall / 2 + 3.5, line(texts[r][c], LETTERS), "middle", ink="ink"))
    return "".join(parts)


def _label(x: float, y: float, text: str, anchor: str, more: str = "", ink: str = "muted") -> str:
    return f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}" fill="{LIGHT[ink]}"{more}>{escape(text)}</text>'


def _upright(x: float, y: float, text: str) -> str:
    """A label that is read from the bottom to the top and ends at y."""
    return _label(x, y, text, "end", f' transform="rotate(-90 {x:g} {y:g})"')


def line(text, letters: int) -> str:
    """The first letters of a text in one line. SVG leaves out a space at the start, so it is shown as a dot."""
    text = visible(str(text).replace("\n", "\\n"))
    return (f"·{text[1:]}" if text.startswith(" ") else text)[:letters]


def _some(count: int) -> range:
    """At most LABELS of the numbers below `count`."""
    return range(0, count, -(-count // LABELS))


def _legend(x: float, y: float, low: float, high: float) -> str:
    """A row of colours from the lowest to the highest value."""
    steps = 12
    parts = [_label(x - 5, y + 7, short(low), "end")]
    for number in range(steps):
        name, opacity = colour(low + (high - low) * number / (steps - 1), low, high)
        place = f'x="{x + number * 9:g}" y="{y:g}" width="9" height="8"'
        parts.append(f'<rect {place} fill="{LIGHT[name]}" fill-opacity="{opacity:.3f}"/>')
    return "".join(parts) + _label(x + steps * 9 + 5, y + 7, short(high), "start")
