"""Claims on a directory of a bucket, here on a disk: its times are those of files."""

import os
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from etils import epath

from xfresearch.runtime.errors import UserError
from xfresearch.training import claims as claims_module
from xfresearch.training import workdir
from xfresearch.training.claims import PREFIX, claimed

TIMES = {"renew": 1.0, "stale": 6.0}  # files of epath have whole seconds


@pytest.fixture(autouse=True)
def exits(monkeypatch) -> list[int]:
    """The codes with which the process would have ended: a busy machine may not renew a claim of some seconds in time."""
    codes = []
    monkeypatch.setattr(claims_module.os, "_exit", codes.append)
    return codes


def claims(folder) -> list[str]:
    return [file.name for file in folder.glob(f"{PREFIX}*")]


def test_a_claim_is_removed_at_the_end(tmp_path):
    with claimed(epath.Path(tmp_path), **TIMES):
        assert len(claims(tmp_path)) == 1
    assert not claims(tmp_path)


def test_a_directory_whose_process_is_alive_is_refused(tmp_path):
    folder = epath.Path(tmp_path)
    with claimed(folder, **TIMES):
        message = r"another process is training in it \(.*, process \d+\)"
        with pytest.raises(UserError, match=message), claimed(folder, **TIMES):
            pass
        assert len(claims(tmp_path)) == 1  # the first process keeps its own


def test_the_claim_of_a_process_that_died_is_waited_for_and_removed(tmp_path):
    dead = tmp_path / f"{PREFIX}dead"
    dead.write_text("node, process 1")
    began = time.time()
    with claimed(epath.Path(tmp_path), renew=0.5, stale=2.0):
        assert not dead.exists() and len(claims(tmp_path)) == 1
    assert 2.0 <= time.time() - began < 20.0
    dead.write_text("node, process 1")
    os.utime(dead, (0, 0))
    with claimed(epath.Path(tmp_path), **TIMES):
        assert not dead.exists()


def test_of_processes_that_begin_together_at_most_one_trains(tmp_path):
    inside, most, together = [], [], threading.Barrier(4)

    def train():
        together.wait()
        try:
            with claimed(epath.Path(tmp_path), **TIMES):
                inside.append(1)
                most.append(len(inside))
                time.sleep(2.5)
                inside.pop()
        except UserError:
            pass

    with ThreadPoolExecutor(4) as threads:
        for each in [threads.submit(train) for _ in range(4)]:
            each.result()
    assert max(most, default=1) == 1 and not claims(tmp_path)


def test_a_claim_that_is_removed_after_it_was_listed_is_no_error(tmp_path, monkeypatch):
    listings = [{".claim-other": 1.0}, {".claim-other": 2.0}, {}]  # it was renewed once; its file is not there
    monkeypatch.setattr(claims_module, "_others", lambda *_: listings.pop(0))
    with claimed(epath.Path(tmp_path), renew=0.1, stale=6.0):
        assert not listings


@pytest.mark.parametrize("what", ["fails", "hangs"])
def test_a_process_that_cannot_renew_its_claim_exits(tmp_path, monkeypatch, capsys, exits, what):
    began, reached = time.monotonic(), threading.Event()
    with claimed(epath.Path(tmp_path), renew=0.1, stale=1.0):
        monkeypatch.setattr(claims_module._Claim, "write", lambda _: 1 / 0 if what == "fails" else reached.wait(60))
        while not exits and time.monotonic() - began < 30:
            time.sleep(0.01)
        assert time.monotonic() - began > 0.8
        reached.set()
    assert set(exits) == {75} and not claims(tmp_path)
    assert ("could not be renewed: division by zero" in capsys.readouterr().err) == (what == "fails")


def test_a_process_that_was_suspended_does_not_take_its_claim_back(tmp_path, monkeypatch):
    claim, now = claims_module._Claim(epath.Path(tmp_path) / f"{PREFIX}mine", renew=0.01, stale=6.0), claims_module._now
    claim.file.unlink()  # by the process that trains there now
    monkeypatch.setattr(claims_module, "_now", lambda: now() + 500)
    monkeypatch.setattr(claims_module.os, "_exit", sys.exit)
    with pytest.raises(SystemExit, match="75"):
        claim.keep_renewing()
    assert not claims(tmp_path)


def test_a_run_in_a_bucket_claims_its_directory(tmp_path, monkeypatch):
    monkeypatch.setattr(workdir, "in_bucket", lambda path: True)
    with workdir.locked(tmp_path):
        assert len(claims(tmp_path)) == 1 and not (tmp_path / ".lock").exists()
