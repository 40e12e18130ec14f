"""How a notebook and a terminal show an object: its main facts, not its data."""

from base64 import b64encode
from collections.abc import Iterable, Mapping, Sequence
from html import escape

from xfresearch.pages.colours import LIGHT
from xfresearch.runtime.tables import lines
from xfresearch.runtime.terminal import one_line

MOST = 8  # names in a line, and rows of a table
LETTERS = 180  # of a fact
HEIGHT = 280  # of a picture, in pixels: with the facts above it fits a screen
PAPER = f"background: {LIGHT['paper']}; max-height: {HEIGHT}px; max-width: 100%"


class Card:
    """An object that is shown as a title, a few facts and, in a notebook, at most one picture."""

    def _title(self) -> str:
        return type(self).__name__

    def _facts(self) -> Mapping[str, str]:
        raise NotImplementedError

    def _rows(self) -> Sequence[Sequence[str]]:
        """The rows of a table below the facts in a notebook, the titles of its columns first."""
        return ()

    def _picture(self) -> tuple[str, str] | None:
        """A title and an SVG element, for notebooks."""
        return None

    def __repr__(self) -> str:
        return f"{one_line(self._title())}\n{lines({name: _cut(text) for name, text in self._facts().items()})}"

    def _repr_html_(self) -> str:
        """For notebooks: fits a screen, and loads nothing."""
        facts = _html_table([(name, _cut(text)) for name, text in self._facts().items()])
        titles, *rows = self._rows() or [()]
        table = _html_table(rows[:MOST], titles) if rows else ""
        more = f"<p>{len(rows) - MOST:,} more</p>" if len(rows) > MOST else ""
        picture = self._picture()
        image = _image(*picture) if picture else ""
        return f"<div><b>{escape(one_line(self._title()))}</b>{facts}{table}{more}{image}</div>"


def some(names: Sequence[str]) -> str:
    """Names in one line, and how many more there are."""
    more = f", {len(names) - MOST} more" if len(names) > MOST else ""
    return ", ".join(names[:MOST]) + more


def _cut(text: str) -> str:
    text = one_line(text)
    return text if len(text) <= LETTERS else f"{text[: LETTERS - 3]}..."


def _html_table(rows: Iterable[Sequence[str]], titles: Sequence[str] = ()) -> str:
    head = "".join(f"<th>{escape(title)}</th>" for title in titles)
    cells = ("".join(f'<td style="text-align: left">{escape(one_line(cell))}</td>' for cell in row) for row in rows)
    return f"<table>{f'<thead><tr>{head}</tr></thead>' if head else ''}{''.join(f'<tr>{row}</tr>' for row in cells)}</table>"


def _image(title: str, svg: str) -> str:
    """An image of its own, so that neither styles nor ids of the notebook and the picture meet."""
    svg = str(svg) if "xmlns=" in svg else str(svg).replace("<svg", '<svg xmlns="http://www.w3.org/2000/svg"', 1)
    encoded = b64encode(svg.encode()).decode()
    return f'<img alt="{escape(title)}" style="{PAPER}" src="data:image/svg+xml;base64,{encoded}">'
