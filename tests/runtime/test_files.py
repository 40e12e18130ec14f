"""Files appear whole or not at all, and are on the disk before they get their name."""

import errno
import json
import os

import numpy as np
import pytest

from xfresearch.runtime import files
from xfresearch.runtime.errors import UserError
from xfresearch.runtime.files import check_output, move_damaged, read_object, write_bytes, write_json, write_rows


@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path, monkeypatch, call):
    def fail(*_):
        raise OSError(errno.EIO, "Input/output error")

    write_bytes(tmp_path / "a", b"old")
    monkeypatch.setattr(os, call, fail)
    with pytest.raises(OSError, match="Input/output error"):
        write_bytes(tmp_path / "a", b"new")
    assert (tmp_path / "a").read_bytes() == b"old" and len(list(tmp_path.iterdir())) == 1


def test_content_is_on_the_disk_before_the_name_and_the_name_at_the_end(tmp_path, monkeypatch):
    done = []
    sync, replace = os.fsync, os.replace
    monkeypatch.setattr(os, "fsync", lambda file: done.append(os.readlink(f"/proc/self/fd/{file}")) or sync(file))
    monkeypatch.setattr(os, "replace", lambda old, new: done.append("renamed") or replace(old, new))
    write_bytes(tmp_path / "a", b"new")
    temporary, renamed, folder = done
    assert temporary.startswith(f"{tmp_path}/.a.") and (renamed, folder) == ("renamed", str(tmp_path))


def test_damage_is_moved_to_another_disk_too(tmp_path, monkeypatch, capsys):
    """checkpoints/ may be a link to another disk, where a rename is an error."""
    checkpoint = tmp_path / "checkpoints" / "10"
    checkpoint.mkdir(parents=True)
    (checkpoint / "array").write_text("damaged")

    def rename(self, target):
        raise OSError(errno.EXDEV, "Invalid cross-device link")

    monkeypatch.setattr(type(files.Path(tmp_path)), "rename", rename)
    target = move_damaged(checkpoint)
    assert (target / "array").read_text() == "damaged" and target == tmp_path / "damaged" / "10-0"
    assert not checkpoint.exists() and str(target) in capsys.readouterr().err


@pytest.mark.parametrize("content", [b"", b"[1]", b"\xff{", b"[" * 100_000])
def test_what_is_no_json_object_is_one_line(tmp_path, content):
    (tmp_path / "a.json").write_bytes(content)
    with pytest.raises(UserError, match=rf"^{tmp_path}/a.json: [^\n]+$"):
        read_object(tmp_path / "a.json")


@pytest.mark.parametrize("kind", [float, np.float32, np.float64])
def test_a_number_that_is_not_finite_is_null(tmp_path, kind):
    values = [kind("nan"), kind("inf"), kind(0.5)]
    write_json(tmp_path / "a.json", {"loss": values})
    write_rows(tmp_path / "b.json", {"a": values})
    refuse = {"parse_constant": lambda name: pytest.fail(name)}
    assert json.loads((tmp_path / "a.json").read_text(), **refuse) == {"loss": [None, None, 0.5]}
    assert json.loads((tmp_path / "b.json").read_text(), **refuse) == {"rows": {"a": [None, None, 0.5]}}


def test_a_tilde_that_the_shell_left_is_the_home_directory(tmp_path, monkeypatch):
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setenv("HOME", str(tmp_path))
    check_output("--json", "~/new/r.json")
    assert list((tmp_path / "new").iterdir()) == []
    with pytest.raises(UserError, match="it is a directory"):
        check_output("--json", "~/new")
    write_json("~/new/r.json", {})
    assert read_object(tmp_path / "new" / "r.json") == {} and list((tmp_path / "here").iterdir()) == []
