"""Writes the generated parts of the documentation: python -m docs.write. tests/test_docs.py checks that they are current."""

from pathlib import Path

from xfresearch.config_io import describe

PAGE = Path(__file__).parent / "configuration.md"
MARK = "## Every key\n\n"


def current() -> str:
    """docs/configuration.md with its table of keys as the code has it now."""
    return PAGE.read_text().split(MARK)[0] + MARK + describe()


if __name__ == "__main__":
    PAGE.write_text(current())
