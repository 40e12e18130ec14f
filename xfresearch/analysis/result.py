"""The result of an analysis: data first, pictures second."""

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from etils import epath

from xfresearch.pages.cards import Card, some
from xfresearch.pages.charts import with_interval
from xfresearch.pages.colours import as_file
from xfresearch.pages.figures import HeatMap, LineChart, Table
from xfresearch.pages.html import write_page
from xfresearch.pages.plots import files, plots
from xfresearch.runtime.files import inside, make_directory, write_bytes, write_json
from xfresearch.runtime.summaries import mean_interval, mean_of_known
from xfresearch.runtime.tables import PLUS_MINUS
from xfresearch.runtime.terminal import visible

if TYPE_CHECKING:
    from matplotlib.figure import Figure

COLUMN = 440  # width of a picture that fits into one of the page's two columns


class Part(NamedTuple):
    """What an analysis found in one stack, or in one kind of sublayer: see Result."""

    data: dict[str, Any]
    summary: dict[str, tuple[float, float]]
    pictures: tuple[HeatMap | LineChart, ...] = ()
    tables: tuple[Table, ...] = ()

    def named(self, name: str) -> "Part":
        """The same with 'name/' before the names of the data, and 'name: ' before those of figures, pictures and tables; as
        it is for ''."""
        if not name:
            return self
        data = {f"{name}/{each}": value for each, value in self.data.items()}
        summary = {f"{name}: {each}": value for each, value in self.summary.items()}
        pictures = tuple(each._replace(title=f"{name}: {each.title}") for each in self.pictures)
        return Part(data, summary, pictures, tuple(each._replace(title=f"{name}: {each.title}") for each in self.tables))


def joined(parts: Mapping[str, Part]) -> Part:
    """The parts by their names as one."""
    whole = Part({}, {})
    for name, part in parts.items():
        of = part.named(name)
        both = whole.data | of.data, whole.summary | of.summary
        whole = Part(*both, whole.pictures + of.pictures, whole.tables + of.tables)
    return whole


def over_rows(per_row: Mapping[str, np.ndarray], titles: Mapping[str, str] = {}) -> Part:
    """The figures [rows, ...] of every row as data, `name` with their means and `name_rows`, and as a summary, with the
    intervals over rows; without `titles` by their names."""
    data = {name: mean_of_known(value, 0) for name, value in per_row.items()}
    data |= {f"{name}_rows": value for name, value in per_row.items()}
    means = {name: mean_of_known(value.reshape(len(value), -1), 1) for name, value in per_row.items()}
    return Part(data, {titles.get(name, name.replace("_", " ")): mean_interval(mean) for name, mean in means.items()})


@dataclass(frozen=True, repr=False)
class Result(Card):
    """The result of an analysis.

    name: of the analysis. about: one line on the model and the data. step: of the model. data: {name: array or number}; the
    docstring of the analysis has their shapes. summary: {name: (value, half width of its 95 % interval, NaN without one)}
    of the main figures. files: {name: content} of more pages and data, which `save` writes beside the report.
    """

    name: str
    about: str
    step: int
    data: Mapping[str, np.ndarray | float]
    summary: dict[str, tuple[float, float]]
    pictures: tuple[HeatMap | LineChart, ...] = ()
    tables: tuple[Table, ...] = ()
    files: dict[str, bytes] = field(default_factory=dict)

    def _title(self) -> str:
        return f"Result {self.name}"

    def _facts(self) -> dict[str, str]:
        """The main figures, and the names and shapes of the data."""
        figures = [f"{name} {value:.4g}" for name, (value, _) in self.summary.items()]
        data = [f"{name}{[*np.shape(value)]}" if np.ndim(value) else name for name, value in self.data.items()]
        return {"about": self.about, "step": str(self.step), "summary": some(figures), "data": some(data)}

    def _picture(self) -> tuple[str, str] | None:
        return (self.pictures[0].title, self.pictures[0].svg()) if self.pictures else None

    def figures(self, columns: int = 1) -> "dict[str, Figure]":
        """{title: Matplotlib's figure} of the pictures, as wide as `columns`, 1 or 2, of a printed page."""
        return plots(self.pictures, columns)

    def elements(self) -> dict[str, str]:
        """{title: SVG element} of the pictures, in the colours of the light theme."""
        return {picture.title: picture.svg() for picture in self.pictures}

    def drawings(self) -> list[bytes]:
        """The pictures as SVG files, with a dark theme."""
        return [visible(as_file(svg)).encode() for svg in self.elements().values()]

    def report(self, path: str | os.PathLike[str]) -> None:
        """Writes one static HTML page, which loads nothing from the network."""
        write_report(path, [self])

    def as_dict(self) -> dict[str, Any]:
        """The summary and the numbers of the data, as values of JSON."""
        numbers = self.brief().data
        return {"analysis": self.name, "about": self.about, "step": self.step, "summary": self.summary, "data": numbers}

    def brief(self) -> "Result":
        """The summary and the numbers of the data alone, without the arrays, which may be large."""
        numbers = {name: value for name, value in self.data.items() if np.ndim(value) == 0}
        return Result(self.name, self.about, self.step, numbers, self.summary)

    def save(self, directory: str | os.PathLike[str]) -> None:
        """Writes data.json (numbers), arrays.npz, the pictures, the files and report.html, which has links to the pages."""
        folder = epath.Path(directory)
        make_directory(folder)
        write_json(folder / "data.json", self.as_dict())
        write_arrays(folder / "arrays.npz", {n: np.asarray(v) for n, v in self.data.items() if np.ndim(v)})
        for number, drawing in enumerate(self.drawings()):
            write_bytes(folder / f"picture_{number}.svg", drawing)
        for name, content in files(self.pictures).items():
            write_bytes(folder / name, content)
        for name, content in self.files.items():
            write_bytes(inside(folder, name), content)
        write_report(folder / "report.html", [self], links=_pages(self))


def write_arrays(path: str | os.PathLike[str], arrays: dict[str, np.ndarray]) -> None:
    """Writes a .npz file of the arrays, whole or not at all."""
    import io

    buffer = io.BytesIO()
    named: dict[str, Any] = dict(arrays)
    np.savez_compressed(buffer, **named)
    write_bytes(path, buffer.getvalue())


def write_report(
    path: str | os.PathLike[str],
    results: list[Result],
    series: Sequence[LineChart] = (),
    links: Sequence[str] = (),
) -> None:
    """Writes a page with the last of the results. `series` are charts over the steps of a run; `links` are names of pages
    beside it."""
    template = Path(__file__).parent / "report.html.jinja"
    figures = results[-1].elements()
    wide = [title for title, svg in figures.items() if float(re.findall(r'width="([\d.]+)"', svg)[0]) > COLUMN]
    about = PLUS_MINUS.replace("+-", "±")
    write_page(path, template, result=results[-1], figures=figures, wide=wide, series=series, links=links, plus_minus=about)


def _pages(result: Result) -> list[str]:
    return [name for name in result.files if name.endswith(".html")]


def write_series(directory: str | os.PathLike[str], results: list[Result]) -> None:
    """Writes series.json, {figure: [[step, value, half width of the interval], ...]}, and report.html with its curves."""
    names = list(dict.fromkeys(name for result in results for name in result.summary))
    series = {name: [(r.step, *r.summary[name]) for r in results if name in r.summary] for name in names}
    write_json(epath.Path(directory) / "series.json", series)
    charts = []
    for name, values in series.items():
        points = np.array(values, float)
        if len(points) > 1 and np.isfinite(points[:, 1]).all():
            charts.append(LineChart(name, "with the 95 % interval", "step", tuple(with_interval(points))))
    write_report(epath.Path(directory) / "report.html", results, charts, _pages(results[-1]))
