"""Files as people have them are read right, or are refused by what they are: the rows of table.txt."""

from pathlib import Path
from typing import NamedTuple

import pytest

from tests.field.doors import DOORS, documents
from tests.field.make import DIALOGUE, JOINED, TEXTS
from xfresearch.runtime.errors import UserError

FOLDER = Path(__file__).parent
MOST_FILES, MOST_BYTES = 200, 20_000


class FileCase(NamedTuple):
    file: str
    door: str
    outcome: str
    what: str


def rows() -> list[FileCase]:
    lines = (FOLDER / "table.txt").read_text().splitlines()
    return [FileCase(*(part.strip() for part in line.split(" | "))) for line in lines if line and not line.startswith("#")]


@pytest.mark.parametrize("row", rows(), ids=lambda row: f"{row.door} {row.file}")
def test_a_file_is_read_right_or_refused_by_its_name(row):
    door, _, argument = row.door.partition(" ")
    path = FOLDER / "files" / row.file
    assert path.exists()
    try:
        result = DOORS[door](path, argument)
    except UserError as error:
        result = f"refused: {error}".replace(str(path), "FILE")
    wanted, rest, _ = row.outcome.partition("...")
    assert result == row.outcome or (rest and result.startswith(wanted) and "\n" not in result)


def test_every_file_is_small_and_has_a_row():
    files = [path for path in (FOLDER / "files").rglob("*") if path.is_file() and path.name != ".gitattributes"]
    assert len(files) <= MOST_FILES and max(path.stat().st_size for path in files) <= MOST_BYTES
    named = [FOLDER / "files" / row.file for row in rows()]
    assert not [file for file in files if not {file, *file.parents} & set(named)]


def test_the_expected_documents_are_those_that_were_written():
    expected = {documents(text.encode() for text in TEXTS), documents([JOINED])}
    expected |= {documents("\t".join(pair).encode() for pair in DIALOGUE).replace("documents", "pairs")}
    assert expected < {row.outcome for row in rows()}
