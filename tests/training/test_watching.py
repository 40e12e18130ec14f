"""Profiles by config and on request, and the kinds of time between the starts of a run."""

import os
from pathlib import Path

import jax
import pytest

from xfresearch.options.run_options import LogConfig
from xfresearch.training import monitoring
from xfresearch.training.monitoring import Profile
from xfresearch.training.workdir import unproductive_time


@pytest.fixture
def traces(monkeypatch):
    """The profiler's calls in order: directory of a trace, results that are waited for, end of the trace."""
    seen = []
    monkeypatch.setattr(jax.profiler, "start_trace", lambda path: seen.append(str(path)))
    monkeypatch.setattr(jax, "block_until_ready", lambda results: seen.append(f"results of {results}"))
    monkeypatch.setattr(jax.profiler, "stop_trace", lambda: seen.append("end"))
    return seen


def steps(profile: Profile, first: int, last: int, traces: list) -> list:
    """`traces`, with the numbers of the updates added in between."""
    for step in range(first, last + 1):
        profile.before(step)
        traces.append(step)
        profile.after(step, step)
    return traces


def test_a_trace_covers_the_updates_of_the_config(tmp_path, traces):
    profile = Profile(tmp_path, LogConfig(profile_start=3, profile_steps=2))
    assert steps(profile, 1, 6, traces) == [1, 2, f"{tmp_path}/profile", 3, 4, "results of 4", "end", 5, 6]


def test_a_request_starts_one_trace(tmp_path, traces, monkeypatch):
    monkeypatch.setattr(monitoring, "POLL_SECONDS", 0)
    (tmp_path / "profile.request").touch()  # a request to an earlier process, not to this one
    profile = Profile(tmp_path, LogConfig(profile_steps=1))
    steps(profile, 1, 2, traces)
    later = (tmp_path / "profile.request").stat().st_mtime + 5
    os.utime(tmp_path / "profile.request", (later, later))
    assert steps(profile, 3, 5, traces) == [1, 2, f"{tmp_path}/profile", 3, "results of 3", "end", 4, 5]
    (tmp_path / "profile.request").unlink()
    assert steps(profile, 6, 7, traces)[-4:] == [4, 5, 6, 7]
    (tmp_path / "profile.request").touch()
    os.utime(tmp_path / "profile.request", (later - 5000, later - 5000))  # the clock was set back
    assert steps(profile, 8, 9, traces)[-5:] == [f"{tmp_path}/profile", 8, "results of 8", "end", 9]


def test_a_run_that_ends_during_a_trace_closes_it(tmp_path, traces):
    profile = Profile(tmp_path, LogConfig(profile_start=2, profile_steps=9))
    steps(profile, 1, 3, traces)
    profile.close()
    profile.close()
    assert traces == [1, f"{tmp_path}/profile", 2, 3, "end"]


def test_a_profile_for_a_bucket_is_written_locally_and_copied(tmp_path, traces, monkeypatch):
    monkeypatch.setattr(monitoring, "in_bucket", lambda path: True)
    profile = Profile(tmp_path, LogConfig(profile_start=1, profile_steps=1))
    profile.before(1)
    written = Path(traces[0])
    (written / "plugins" / "profile").mkdir(parents=True)
    (written / "plugins" / "profile" / "host.xplane.pb").write_bytes(b"trace")
    profile.after(1, None)
    assert (tmp_path / "profile" / "plugins" / "profile" / "host.xplane.pb").read_bytes() == b"trace"
    assert not written.exists()


def start(seconds: float, gap: float = 0.0, finished: bool = False) -> dict:
    return {"seconds": seconds, "gap": gap, "finished_before": finished}


@pytest.mark.parametrize(
    "starts, until, lost, down",
    [
        ([start(100.0)], 100.0, 0, 0),
        # Saved at 150, lived until 170, started again at 200: 20 s of work are lost, 30 s were down.
        ([start(100.0), start(200.0, gap=30.0)], 150.0, 20, 30),
        # Killed twice before it could save again: at 170 and at 250.
        ([start(100.0), start(200.0, gap=30.0), start(260.0, gap=10.0)], 150.0, 70, 40),
        # The checkpoint has counted the restarts before it.
        ([start(100.0), start(200.0, gap=30.0), start(260.0, gap=10.0)], 240.0, 10, 10),
        # Saved at 150, after the last row of 140 and while it was told to stop; started again at 200.
        ([start(100.0), start(200.0, gap=60.0)], 150.0, 0, 50),
        # It finished at 170; then nothing ran for a day.
        ([start(100.0), start(86570.0, gap=86400.0, finished=True)], 160.0, 10, 0),
    ],
)
def test_time_between_starts_is_lost_or_down(starts, until, lost, down):
    assert unproductive_time(starts, until) == {"lost": lost, "down": down}
