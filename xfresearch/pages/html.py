"""Static HTML pages: one file each, which loads nothing from the network."""

import math
import re
from pathlib import Path

from xfresearch.pages.colours import theme
from xfresearch.runtime.files import write_bytes
from xfresearch.runtime.terminal import visible

LETTERS = ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k"))


def write_page(path, template: Path, **values) -> None:
    """Writes the page that `template`, a Jinja file, makes of `values`. Templates include page.css.jinja for their style."""
    write_bytes(path, page(template, **values))


def page(template: Path, **values) -> bytes:
    """The page that `template` makes of `values`."""
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader([template.parent, Path(__file__).parent]),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"short": short}
    environment.globals |= {"theme": theme()}
    return visible(environment.get_template(template.name).render(values)).encode("utf8", "replace")


def short(value) -> str:
    """A value as short text: 12.3k, 1.812, 3e-5. Anything but a number stays as it is."""
    if isinstance(value, list | tuple):
        return ", ".join(map(short, value)) or "none"
    if isinstance(value, bool | str | None) or not isinstance(value, int | float):
        return str(value)
    if math.isfinite(value) and abs(value) >= 1e4:
        rounded = float(f"{value:.3g}")  # before the letter is chosen: 999,700 is 1M
        size, letter = next(each for each in LETTERS if abs(rounded) >= each[0])
        return f"{rounded / size:.3g}{letter}"
    if isinstance(value, int):
        return f"{value:,}"
    if 0 < abs(value) < 1e-3:
        return re.sub(r"(\.0)?e-0", "e-", f"{value:.1e}")
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
