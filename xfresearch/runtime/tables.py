"""Tables and numbers for the terminal."""

from collections.abc import Mapping, Sequence

from xfresearch.runtime.terminal import one_line

PLUS_MINUS = "+- is half of the 95 % interval"  # everywhere; a standard error has a column of that name


def table(columns: dict[str, list[str]]) -> str:
    """The columns as text, right-aligned, with two spaces between them."""
    columns = {one_line(title): [one_line(cell) for cell in cells] for title, cells in columns.items()}
    widths = {title: max(map(len, [title, *cells])) for title, cells in columns.items()}
    rows = zip(*([title, *cells] for title, cells in columns.items()), strict=True)
    return "\n".join(
        "  ".join(f"{cell:>{widths[title]}}" for title, cell in zip(columns, row, strict=True)) for row in rows
    )


def to_columns(titles: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> dict[str, list[str]]:
    """{title: cells} of a table's rows."""
    return {title: [row[i] for row in rows] for i, title in enumerate(titles)}


def count(number: float, billion: str = "B") -> str:
    """A count with three digits, as of parameters or tokens: 840 k, 12.3 M, 7.24 B. Of bytes and FLOPs, a `billion` is G."""
    rounded = float(f"{number:.3g}")  # 999,600 is 1 M
    for size, prefix in ((1e18, "E"), (1e15, "P"), (1e12, "T"), (1e9, billion), (1e6, "M"), (1e3, "k")):
        if rounded >= size:
            return f"{rounded / size:.3g} {prefix}"
    return f"{rounded:g}"


def format_number(value: float | None) -> str:
    """A number with four decimals, '-' for None."""
    return "-" if value is None else f"{value:.4f}" if abs(value) < 1000 else f"{value:.4g}"


def lines(parts: Mapping[str, str]) -> str:
    """Lines 'name  text', with the texts in one column."""
    return "\n".join(f"{name:<10} {text}" for name, text in parts.items())
