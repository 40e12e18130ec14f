"""Heat maps as SVG elements in the colours of the page that shows them: a cell is more opaque for a larger value."""

from html import escape

import numpy as np

from xfresearch.pages.html import short

CELL = 18  # the largest size of a cell
WIDTH = 380  # of all cells together
LABELS = 12  # the most labels of an axis


def heat_map(title: str, values, rows: str, columns: str, low: float | None = None, high: float | None = None) -> str:
    """An SVG element of the matrix `values`, with its first row at the bottom; NaN has no cell.

    rows, columns: what they are. low, high: values without colour and of full colour; by default the smallest and the
    largest. If low is negative, 0 has no colour, and negative values have another one."""
    values = np.asarray(values, np.float64)
    count_rows, count_columns = values.shape
    size = min(CELL, WIDTH / count_columns)
    low = float(np.nanmin(values)) if low is None else low
    high = float(np.nanmax(values)) if high is None else high
    left, bottom = 46, count_rows * size + 8
    parts = [_cells(values, size, left, low, high, rows, columns)]
    parts += [_label(left + (c + 0.5) * size, bottom + 11, str(c), "middle") for c in _some(count_columns)]
    parts += [_label(left - 5, 8 + (count_rows - 0.5 - r) * size + 3.5, str(r), "end") for r in _some(count_rows)]
    parts.append(_label(left + count_columns * size / 2, bottom + 25, columns, "middle"))
    middle = 8 + count_rows * size / 2
    parts.append(_label(8, middle, rows, "middle", f' transform="rotate(-90 8 {middle:g})"'))
    parts.append(_legend(left, bottom + 34, low, high))
    width, height = left + max(count_columns * size, 170) + 6, bottom + 52
    head = f'<svg xmlns="http://www.w3.org/2000/svg" class="block" role="img" aria-label="{escape(title)}" '
    size_of = f'width="{width:g}" height="{height:g}" viewBox="0 0 {width:g} {height:g}" '
    return f'{head}{size_of}font-family="system-ui, sans-serif" font-size="9">{"".join(parts)}</svg>'


def _colour(value: float, low: float, high: float) -> tuple[str, float]:
    """Colour and opacity of a value."""
    if low < 0:
        share = value / (high if value > 0 else low) if (high if value > 0 else low) else 0.0
        return ("model" if value > 0 else "training"), min(max(share, 0.0), 1.0)
    return "model", min(max((value - low) / ((high - low) or 1.0), 0.0), 1.0)


def _cells(values, size: float, left: float, low: float, high: float, rows: str, columns: str) -> str:
    count_rows = len(values)
    parts = []
    for (r, c), value in np.ndenumerate(values):
        if np.isnan(value):
            continue
        colour, opacity = _colour(value, low, high)
        place = f'x="{left + c * size:g}" y="{8 + (count_rows - 1 - r) * size:g}" width="{size:g}" height="{size:g}"'
        text = escape(f"{rows} {r}, {columns} {c}: {short(float(value))}")
        look = f'fill="var(--{colour})" fill-opacity="{opacity:.3f}" stroke="var(--rule)" stroke-width=".4"'
        parts.append(f"<rect {place} {look}><title>{text}</title></rect>")
    return "".join(parts)


def _label(x: float, y: float, text: str, anchor: str, more: str = "") -> str:
    return f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}" fill="var(--muted)"{more}>{escape(text)}</text>'


def _some(count: int) -> range:
    """At most LABELS of the numbers below `count`."""
    return range(0, count, -(-count // LABELS))


def _legend(x: float, y: float, low: float, high: float) -> str:
    """A row of colours from the lowest to the highest value."""
    steps = 12
    parts = [_label(x - 5, y + 7, short(low), "end")]
    for number in range(steps):
        colour, opacity = _colour(low + (high - low) * number / (steps - 1), low, high)
        place = f'x="{x + number * 9:g}" y="{y:g}" width="9" height="8"'
        parts.append(f'<rect {place} fill="var(--{colour})" fill-opacity="{opacity:.3f}"/>')
    return "".join(parts) + _label(x + steps * 9 + 5, y + 7, short(high), "start")
