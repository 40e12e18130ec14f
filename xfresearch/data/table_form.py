"""How a CSV or TSV file separates and quotes its values: found from its beginning, and not from what will be read of it."""

import csv
import io
import re
from typing import Literal, NamedTuple

from xfresearch.runtime.errors import UserError

SEPARATORS = {"csv": ",;\t|", "tsv": "\t,;|"}  # the first is that of the file's name
WORDS = "columns are separated by ',', ';', '|' or a tab, or by the character X of a first line 'sep=X'"
_STATED = re.compile(r'"?sep=([^"\r\n])"?(?:\r\n|\r|\n)', re.I)  # as Excel reads it
_MARKED = re.compile(r'"[^"]*"')
_DOUBLED = re.compile(r'"[^"]*(?:""[^"]*)+"')  # a value with quotation marks, as a program quotes it
Quoting = Literal[0, 3]


class Form(NamedTuple):
    separator: str
    quoting: Quoting  # of the csv module: a quotation mark quotes (QUOTE_MINIMAL), or is text (QUOTE_NONE)
    sure: bool  # the beginning shows which
    stated: bool  # by the first line, which is no row

    def check(self, row: list[str], where: str) -> None:
        """Raises UserError if a value was quoted by a program, where nothing above it shows that quotation marks quote."""
        if not self.sure and any(map(_DOUBLED.fullmatch, row)):
            what = "a value in quotation marks with doubled ones in it, and no such value in the first 64 KiB"
            raise UserError(f"{where}: {what}: put the names of the columns in quotation marks if marks quote")


class _Rows(NamedTuple):
    rows: list[list[str]]  # without blank ones
    even: bool  # all have as many values, and their quotation marks are valid


def form_of(head: str, whole: bool, kind: str, named: bool) -> Form:
    """The form of a CSV or TSV (`kind`) that begins with `head`. `whole`: there is no more. `named`: its first row names
    the columns."""
    if stated := _STATED.match(head):
        separator = stated[1]
        return Form(separator, *_quoting(head[stated.end() :], whole, separator, named), True)
    found = {each: _quoting(head, whole, each, named) for each in SEPARATORS[kind]}
    tables = {each: _parsed(head, whole, each, quoting) for each, (quoting, _) in found.items()}
    several = [each for each, table in tables.items() if table.rows and len(table.rows[0]) > 1]
    even = [each for each in several if tables[each].even]
    # The names of columns have no separators in them; a first row that is text may have. A TSV without names has tabs.
    chosen = even or several if named else even if kind == "csv" else []
    separator = next(iter(chosen), SEPARATORS[kind][0])
    return Form(separator, *found[separator], False)


def _quoting(head: str, whole: bool, separator: str, named: bool) -> tuple[Quoting, bool]:
    """Beside tabs a quotation mark is text, as sentences are published, unless a program that quotes wrote the file: only so
    have all rows as many values, or no value goes over lines and names stand in marks, or marks in a value are doubled."""
    if separator != "\t":
        return csv.QUOTE_MINIMAL, True
    quoted, plain = (_parsed(head, whole, separator, each) for each in (csv.QUOTE_MINIMAL, csv.QUOTE_NONE))
    marked = named and any(map(_MARKED.fullmatch, plain.rows[0])) if plain.rows else False
    doubled = any(_DOUBLED.fullmatch(value) for row in plain.rows for value in row)
    same = quoted.even and len(quoted.rows) == len(plain.rows)
    if quoted.even and not plain.even or same and (marked or doubled):
        return csv.QUOTE_MINIMAL, True
    return csv.QUOTE_NONE, not same


def _parsed(head: str, whole: bool, separator: str, quoting: Quoting) -> _Rows:
    rows, valid = [], True
    reader = csv.reader(io.StringIO(head, newline=""), delimiter=separator, strict=True, quoting=quoting)
    try:
        for row in reader:
            rows.append(row)
    except csv.Error:
        valid = not whole  # the end of the head may be within quotation marks
    else:
        rows = rows if whole else rows[:-1]
    rows = [row for row in rows if row]
    return _Rows(rows, valid and len({len(row) for row in rows}) == 1)
