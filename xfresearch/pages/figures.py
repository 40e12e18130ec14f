"""Figures and tables as data: titles, captions, axes, values and intervals. `svg` draws a figure."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from xfresearch.pages.charts import Curve, line_chart
from xfresearch.pages.heat_map import heat_map


class HeatMap(NamedTuple):
    """A picture of a matrix, with its first row at the bottom."""

    title: str
    caption: str
    values: np.ndarray  # [rows, columns]; NaN where there is no value
    rows: str  # what a row is
    columns: str
    low: float | None = None  # ends of the colours; None for those of the values
    high: float | None = None
    names: tuple[str, ...] = ()  # of the columns; without them, their numbers
    texts: tuple[tuple[str, ...], ...] | str | None = None  # in the cells: texts, or the format of the values, as in '.2f'

    def svg(self) -> str:
        """The picture as an SVG element."""
        return heat_map(self.title, self.values, self.rows, self.columns, self.low, self.high, self.names, self.cells())

    def cells(self) -> tuple[tuple[str, ...], ...] | None:
        """The texts in the cells."""
        if isinstance(self.texts, str):
            return tuple(tuple(format(value, self.texts) for value in row) for row in self.values)
        return self.texts


class Shown(NamedTuple):
    """How a figure of every layer and head is shown."""

    title: str
    caption: str
    low: float | None = None  # ends of the colours; None for those of the values
    high: float | None = None


SHARE, SIGNED = (0.0, None), (-1.0, 1.0)  # ends of the colours of what begins at 0, and of cosines


def heat_maps(data: Mapping[str, Any], shown: Mapping[str, Shown]) -> list[HeatMap]:
    """A picture of each of the `shown` figures [N, H] that is in the data."""
    known = {name: how for name, how in shown.items() if name in data}
    return [HeatMap(*how[:2], data[name], "layer", "head", *how[2:]) for name, how in known.items()]


class LineChart(NamedTuple):
    """A picture of curves, which have their intervals with them."""

    title: str
    caption: str
    x: str  # what the x axis counts
    curves: Sequence[Curve]
    levels: Mapping[str, float] = {}  # dashed lines by their names
    bottom: float | None = None  # ends of the y axis; None for those of the curves
    top: float | None = None
    second: tuple[str, float] | None = None  # a second x axis, above: its name, and its value per unit of the first

    def svg(self) -> str:
        """The picture as an SVG element."""
        drawn: str = line_chart(self.title, self.curves, self.levels, self.bottom, self.top, self.second, self.x)
        return drawn


class Table(NamedTuple):
    """Rows of text and numbers."""

    title: str
    caption: str
    columns: tuple[str, ...]
    rows: list[tuple[Any, ...]]


def table(title: str, caption: str, columns: Iterable[str], rows: Iterable[Iterable[Any]]) -> Table:
    """A table whose numbers have at most 4 digits after the point."""
    return Table(title, caption, tuple(columns), [tuple(map(_cell, row)) for row in rows])


def _cell(value: Any) -> Any:
    return round(float(value), 4) if isinstance(value, float | np.floating | np.ndarray) else value


def table_of(title: str, caption: str, row: str, labels: Iterable[Any], columns: Mapping[str, Any]) -> Table:
    """A table with a row for each of the labels, and {title of a column: its numbers}."""
    lines = zip(map(str, labels), *columns.values(), strict=True)
    return table(title, caption, (row, *columns), lines)
