"""Printed tables."""


def table(columns: dict[str, list[str]]) -> str:
    """Aligned text, numbers to the right."""
    widths = {title: max(map(len, [title, *cells])) for title, cells in columns.items()}
    rows = zip(*([title, *cells] for title, cells in columns.items()), strict=True)
    return "\n".join(
        "  ".join(f"{cell:>{widths[title]}}" for title, cell in zip(columns, row, strict=True)) for row in rows
    )
