"""Differences with their intervals as an SVG element: one row for each, zero as a line, and a band that counts as no
difference."""

import math
from collections.abc import Iterable
from html import escape
from typing import NamedTuple

from xfresearch.pages.colours import LIGHT

MIDDLE = 330  # width of the axis
SIDE = 110  # the least width beside it, for the ends of its title
LETTER = 0.57  # width of a letter of a wide sans-serif font, in sizes of the font
ROW, GROUP, AXIS = 18, 8, 44  # heights of a row, between groups, and of the axis below
TICKS = 5


class Interval(NamedTuple):
    """A row of a group, such as a size of an arm."""

    name: str
    value: float
    low: float
    high: float
    words: str = ""  # to the right of it
    whole: bool = False  # whether it is about the other rows of the group, such as their mean


def intervals(title: str, groups: dict[str, list[Interval]], margin: float, unit: str) -> str:
    """The picture of {name: its rows}. Values within +-margin are in the band."""
    left = _width(groups, 12)
    right = _width([_words(row) for rows in groups.values() for row in rows], 10.5)
    ends = [end for rows in groups.values() for row in rows for end in (row.low, row.high)]
    low, high = min([*ends, -1.5 * margin]), max([*ends, 1.5 * margin])
    room = 0.05 * (high - low)

    def x(value: float) -> float:
        return left + MIDDLE * (value - low + room) / (high - low + 2 * room)

    height = sum(len(rows) * ROW + GROUP for rows in groups.values())
    parts = [
        f'<rect x="{x(-margin):.1f}" y="0" width="{x(margin) - x(-margin):.1f}" height="{height}" fill="{LIGHT["wash"]}"/>',
        f'<path d="M{x(0):.1f} 0V{height}" fill="none" stroke="{LIGHT["muted"]}" stroke-dasharray="3 3"/>',
    ]
    y = GROUP / 2
    for name, rows in groups.items():
        middle = y + len(rows) * ROW / 2
        parts.append(_text(8, middle + 4, name, "start", "ink", 12))
        for row in rows:
            parts.append(_row(row, y + ROW / 2, x))
            parts.append(_text(left + MIDDLE + 8, y + ROW / 2 + 4, _words(row), "start", size=10.5))
            y += ROW
        y += GROUP
    parts += [_text(x(tick), height + 16, f"{tick:+.3g}" if tick else "0", "middle") for tick in _ticks(low, high)]
    parts.append(_text(left + MIDDLE / 2, height + 34, unit, "middle"))
    width, height = left + MIDDLE + right, height + AXIS
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" role="img" aria-label="{escape(title)}" width="{width}" '
        f'height="{height:g}" viewBox="0 0 {width} {height:g}" font-family="system-ui, sans-serif">{"".join(parts)}</svg>\n'
    )


def _width(texts: Iterable[str], size: float) -> int:
    """Of a column of texts, in pixels."""
    return max(SIDE, 16 + math.ceil(LETTER * size * max(map(len, texts))))


def _row(row: Interval, y: float, x) -> str:
    colour, width = (LIGHT["model"], 3) if row.whole else (LIGHT["run1"], 2)
    line = f'<path d="M{x(row.low):.1f} {y:g}H{x(row.high):.1f}" fill="none" stroke="{colour}" stroke-width="{width}"/>'
    dot = f'<circle cx="{x(row.value):.1f}" cy="{y:g}" r="{width + 2}" fill="{colour}"/>'
    return line + dot


def _words(row: Interval) -> str:
    return ": ".join(filter(None, (row.name, row.words)))


def _ticks(low: float, high: float) -> list[float]:
    """Round values between the ends, 0 among them."""
    smallest = 10.0 ** math.floor(math.log10((high - low) / TICKS))
    step = next(smallest * digit for digit in (1, 2, 5, 10) if (high - low) / (smallest * digit) <= TICKS)
    return [number * step for number in range(math.ceil(low / step), math.floor(high / step) + 1)]


def _text(x: float, y: float, text: str, anchor: str, colour: str = "muted", size: float = 11) -> str:
    where = f'x="{x:.1f}" y="{y:.1f}" font-size="{size}" text-anchor="{anchor}"'
    return f'<text {where} fill="{LIGHT[colour]}" stroke="none">{escape(text)}</text>'
