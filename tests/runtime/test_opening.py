"""The one way to open a file."""

import os
import subprocess
import sys

import pytest

from tests import special_files
from xfresearch.runtime.errors import UserError
from xfresearch.runtime.files import read_bytes
from xfresearch.runtime.opening import name_of, open_to_read


@pytest.mark.parametrize("kind", special_files.KINDS)
def test_nothing_but_a_regular_file_is_opened(tmp_path, kind):
    special_files.make(kind, tmp_path / "a")
    with special_files.at_most(5), pytest.raises((UserError, OSError)) as raised:
        open_to_read(tmp_path / "a")
    if kind not in ("loop", "dangling"):  # there is no file: an error of the system, which the caller words
        assert str(raised.value) == f"{tmp_path}/a: it must be a regular file"


def test_an_open_file_stays_the_same(tmp_path):
    """Whatever takes its name: its kind was asked of the file, and a library reads the same one."""
    (tmp_path / "a").write_text("first")
    with open_to_read(tmp_path / "a") as file:
        special_files.make("pipe", tmp_path / "a")
        with special_files.at_most(5), open(name_of(file)) as again:
            assert again.read() == "first"
        assert os.get_blocking(file.fileno())


def test_a_pipe_that_the_shell_hands_over_is_read(tmp_path):
    code = "from xfresearch.generate import read_text; print(read_text('--prompt-file', '/dev/stdin'))"
    asked = [sys.executable, "-c", code]
    answer = subprocess.run(asked, input="a\nprompt", capture_output=True, text=True, timeout=60, check=True)
    assert answer.stdout == "a\nprompt\n"


def test_a_file_that_is_read_whole_has_a_limit(tmp_path):
    (tmp_path / "a").write_bytes(b"12345")
    assert read_bytes(tmp_path / "a", 5) == b"12345"
    with pytest.raises(UserError, match="the file has 5 bytes: it must have at most 4$"):
        read_bytes(tmp_path / "a", 4)
