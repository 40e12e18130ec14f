"""A table of rows that have different keys, as runs and sweeps return it. `pandas.DataFrame(rows)` takes it as it is."""

import html
from typing import Any

import numpy as np

from xfresearch.runtime.tables import format_number, table

SHOWN = 20  # rows of a table that is printed; half of them are the first, half the last


class Rows(list[dict[str, Any]]):
    """A list of rows, {column: value}. `rows["loss"]` is a column."""

    @property
    def columns(self) -> list[str]:
        """The keys of all rows, in the order in which they first come."""
        return list(dict.fromkeys(key for row in self for key in row))

    def __getitem__(self, key: Any) -> Any:
        """A column [rows]: numbers, with NaN where a row has none, or objects, with None. An integer or a slice: rows."""
        if not isinstance(key, str):
            return Rows(super().__getitem__(key)) if isinstance(key, slice) else super().__getitem__(key)
        if key not in self.columns:
            raise KeyError(f"{key}: the columns are {', '.join(self.columns)}")
        values = [row.get(key) for row in self]
        if all(isinstance(value, int | float | None) for value in values):
            return np.array([np.nan if value is None else value for value in values])
        items = np.empty(len(values), object)
        items[:] = values
        return items

    def where(self, **values: object) -> "Rows":
        """The rows that have these values: `rows.where(kind="evaluation")`."""
        return Rows(row for row in self if all(row.get(name) == value for name, value in values.items()))

    def _cells(self) -> dict[str, list[str]]:
        """{column: text of each row that is shown}, without columns that hold dicts and lists."""
        half = SHOWN // 2
        shown = self if len(self) <= SHOWN else [*self[:half], *self[-half:]]
        plain = [name for name in self.columns if not any(isinstance(row.get(name), dict | list) for row in shown)]
        return {name: [_text(row.get(name)) for row in shown] for name in plain}

    def __repr__(self) -> str:
        if not self:
            return "no rows"
        lines = table(self._cells()).splitlines()
        if len(self) > SHOWN:
            lines.insert(1 + SHOWN // 2, f"... {len(self) - SHOWN:,} more rows ...")
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        """For notebooks."""
        cells = self._cells()
        head = "".join(f"<th>{html.escape(name)}</th>" for name in cells)
        shown = zip(*cells.values(), strict=True)
        rows = "".join(f"<tr>{''.join(f'<td>{html.escape(cell)}</td>' for cell in row)}</tr>" for row in shown)
        more = f"<p>{len(self):,} rows, of which {SHOWN} are shown</p>" if len(self) > SHOWN else ""
        return f"<table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>{more}"


def _text(value: object) -> str:
    return "" if value is None else format_number(value) if isinstance(value, float) else str(value)
