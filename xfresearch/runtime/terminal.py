"""Text on terminals and pages. Text that others wrote (names, samples, keys, paths, messages) may hold control characters,
with which a terminal hides or forges lines, or asks for input. `visible` is the only function that makes them visible.

Commands write to standard output and standard error through `Filtered`, and pages pass through `visible` as a whole, so no
print, warning or traceback goes around it. Progress bars move the cursor: `bar` writes past the filter, with titles that are
filtered.
"""

import re
import sys
import warnings
from contextlib import contextmanager
from typing import Any

# C0 without newline and tab, DEL, C1, the marks that reorder text, and separators of lines.
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ufeff]")

_SYMBOLS = {chr(code): chr(0x2400 + code) for code in range(32)} | {"\x7f": "\u2421"}


def visible(text: str) -> str:
    """`text` with a symbol in place of each control character of ASCII, and an escape (\\u202e) in place of the others.
    Newlines and tabs stay."""
    return _CONTROL.sub(lambda found: _SYMBOLS.get(found[0]) or ascii(found[0])[1:-1], text)


def one_line(text: str) -> str:
    """`text` on one line, with its control characters made visible: for messages and cells of tables."""
    return visible(re.sub(r"\s*\n\s*", " ", text).replace("\t", " "))


class Filtered:
    """A text stream that makes control characters visible before they reach `stream`. It has all attributes of `stream`."""

    def __init__(self, stream):
        self.stream = stream

    def write(self, text: str) -> int:
        self.stream.write(visible(text))
        return len(text)

    def writelines(self, lines) -> None:
        for line in lines:
            self.write(line)

    def __getattr__(self, name):
        return getattr(self.stream, name)


@contextmanager
def filtered():
    """Filters standard output and standard error in the `with` block."""
    before = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = map(Filtered, before)
    try:
        yield
    finally:
        sys.stdout, sys.stderr = before


def in_notebook() -> bool:
    """Whether a kernel of Jupyter shows what this process prints."""
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    return shell is not None and "IPKernelApp" in shell.config


def shows_bars() -> bool:
    """Whether standard error can show a progress bar."""
    return sys.stderr.isatty() or in_notebook()


def bar(*things, desc: str = "", **options):
    """A tqdm progress bar: on standard error, or in a notebook as a widget if ipywidgets is installed. `options` are those
    of tqdm."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that ipywidgets is missing: then the bar is text
        from tqdm.autonotebook import tqdm
    if options.get("disable", False) is None:
        options["disable"] = not shows_bars()
    return tqdm(*things, desc=one_line(desc) or None, **{"file": unfiltered(sys.stderr)} | options)


def unfiltered(stream: Any) -> Any:
    """The stream behind a filter, for text of ours that moves the cursor."""
    return stream.stream if isinstance(stream, Filtered) else stream
