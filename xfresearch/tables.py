"""Tables for the terminal."""


def table(columns: dict[str, list[str]]) -> str:
    """The columns as text, right-aligned, with two spaces between them."""
    widths = {title: max(map(len, [title, *cells])) for title, cells in columns.items()}
    rows = zip(*([title, *cells] for title, cells in columns.items()), strict=True)
    return "\n".join(
        "  ".join(f"{cell:>{widths[title]}}" for title, cell in zip(columns, row, strict=True)) for row in rows
    )
