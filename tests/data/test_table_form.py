"""The form of CSV and TSV files: whatever a program writes is read again, and a text that is not quoted stays as it is."""

import csv
import io
import random

import pytest

from xfresearch.data.corpus_files import read_documents
from xfresearch.data.table_form import form_of
from xfresearch.runtime.errors import UserError


def texts(count: int, letters: str, seed: int = 0) -> list[str]:
    rng = random.Random(seed)
    return ["".join(rng.choices(letters, k=rng.randrange(1, 30))) for _ in range(count)]


def read(path, content: str, field: str = "text") -> list[str]:
    path.write_bytes(content.encode())
    return [text.decode() for text in read_documents(path, field)]


@pytest.mark.parametrize("quoting", [csv.QUOTE_MINIMAL, csv.QUOTE_ALL, csv.QUOTE_NONNUMERIC])
@pytest.mark.parametrize("suffix", ["csv", "tsv"])
@pytest.mark.parametrize("separator", [",", ";", "\t", "|"])
def test_a_written_table_is_read_again(tmp_path, separator, suffix, quoting):
    for seed in range(20):
        rows = texts(40 if seed else 4000, 'ab ,;|\t"\n\u4e2d', seed)
        sink = io.StringIO()
        writer = csv.writer(sink, delimiter=separator, quoting=quoting)
        writer.writerows([("id", "text"), *enumerate(rows)])
        assert read(tmp_path / f"a.{suffix}", sink.getvalue()) == rows
        stated = f"sep={separator}\r\n{sink.getvalue()}"
        assert read(tmp_path / f"a.{suffix}", stated) == rows


def test_quotation_marks_of_a_tsv_that_quotes_nothing_are_text(tmp_path):
    for seed in range(40):
        rows = [text.replace('""', '"') for text in texts(50, 'ab ,;|"\u4e2d', seed)]
        plain = "".join(f"{a}\t{b}\n" for a, b in [("id", "text"), *enumerate(rows)])
        assert read(tmp_path / "a.tsv", plain) == rows
        assert read(tmp_path / "a.tsv", plain.split("\n", 1)[1], "2") == rows


def test_a_text_with_doubled_marks_takes_no_next_row(tmp_path):
    """Read as quoted, the first two rows of this dialogue were one row of two values."""
    rows = ['"Hello,', 'she said."', '"a ""stone"" wall"', "the end"]
    assert read(tmp_path / "a.tsv", "text\tn\n" + "".join(f"{text}\t{n}\n" for n, text in enumerate(rows))) == rows


def test_a_first_quoted_value_below_the_head_is_no_text(tmp_path):
    """The error says how to tell what marks mean, and the file is then read so."""
    rows = [(str(n), f"text {n}") for n in range(9_000)]
    last = '9\t"he said ""yes"""\n'
    plain = "".join(f"{a}\t{b}\n" for a, b in rows)
    with pytest.raises(UserError, match="a.tsv:9002: a value in quotation marks with doubled ones"):
        read(tmp_path / "a.tsv", f"id\ttext\n{plain}{last}")
    assert read(tmp_path / "a.tsv", f'"id"\t"text"\n{plain}{last}')[-1] == 'he said "yes"'
    published = f'id\ttext\n1\t"to begin with\n{plain}{last}'
    assert read(tmp_path / "a.tsv", published)[-1] == '"he said ""yes"""'


@pytest.mark.parametrize("head, kind, named, separator", [
    ("text\na; b\nc; d\n", "csv", True, ","),  # one column
    ("id;text\n1;a\n2\n", "csv", True, ";"),  # a row is wrong, and the names are not
    ("a, b\nc, d\n", "tsv", False, "\t"),  # a sentence of a TSV has commas
    ("1;a\n2;b, c\n", "csv", False, ";"),
    ("1,a;b\n2,c;d\n", "csv", False, ","),
    ("Hello; you\nand me\n", "csv", False, ","),
    ('"id";"text, or not"\n1;a\n', "csv", True, ";"),
    ("sep=|\nid,a|text\n", "csv", True, "|"),
])  # fmt: skip
def test_the_separator_is_that_of_the_first_row_and_of_all_others(head, kind, named, separator):
    assert form_of(head, True, kind, named).separator == separator


def test_a_row_in_which_all_columns_are_one_is_no_text(tmp_path):
    """The names of a table of another separator were given as the name of a field, and its raw rows were read."""
    for separator in ";\t|":
        with pytest.raises(UserError, match="fields present: id, text; did you mean 'text'"):
            read(tmp_path / "a.csv", f"id{separator}text\n1{separator}a\n", f"id{separator}text")
    with pytest.raises(UserError, match=r"a.csv:1: no field .text.; the only one is id\^text: columns are") as raised:
        read(tmp_path / "a.csv", "id^text\n1^a\n")
    assert "did you mean" not in str(raised.value)
    assert read(tmp_path / "a.csv", "sep=^\nid^text\n1^a\n") == ["a"]


def test_a_place_counts_the_line_that_states_the_separator(tmp_path):
    with pytest.raises(UserError, match=r"a.csv:4: the row has 3 values, separated by '\^'; the first one has 2"):
        read(tmp_path / "a.csv", "sep=^\nid^text\n1^a\n2^b^c\n")
