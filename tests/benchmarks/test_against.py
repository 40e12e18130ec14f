"""Rows that are timed side by side: their ratios are of pairs, and a model with other losses is an error."""

import pytest

from xfresearch.benchmarks import flags, peers, torch_model, update


class Made:
    """A timer with made-up seconds and losses."""

    compile_seconds = 1.0

    def __init__(self, seconds, losses=(2.0, 1.0)):
        self.seconds, self.losses = iter(seconds), list(losses)

    def __call__(self):
        return next(self.seconds)

    def memory_bytes(self):
        return 8


@pytest.fixture(scope="module")
def config():
    return flags.read("configs/gpt2.py:tiny", [])


def rows(config, timers: dict, apart: bool = False) -> list[dict]:
    return update.measured({name: lambda t=t: update.TimedUpdate(config, t) for name, t in timers.items()}, 3, apart)


def test_a_ratio_is_the_median_over_pairs_of_a_round(config):
    """Ratios 4, 3 and 1: their median is 3, and the ratio of the medians 4 / 3."""

    def timers():
        return {"first": Made([4.0, 9.0, 3.0]), "other": Made([1.0, 3.0, 3.0])}

    _, other = rows(config, timers())
    assert (other["ratio"], other["ratio_low"], other["ratio_high"]) == (3.0, 2.0, 3.5)
    _, apart = rows(config, timers(), apart=True)
    assert apart["ratio"] == apart["ratio_low"] == pytest.approx(4 / 3)


@pytest.mark.parametrize("losses, differs", [((2.0, 1.0005), False), ((2.0, 1.002), True), ((2.01, 1.0), True)])
def test_other_losses_of_updates_are_an_error_row(config, capsys, losses, differs):
    result = rows(config, {"first": Made([1.0] * 3), "torch": Made([1.0] * 3, losses)})
    assert bool(result[1]["error"]) == differs and (result[1]["ratio"] is None) == differs
    update.report(result, config)
    assert ("losses of updates differ by" in capsys.readouterr().out) == differs


def test_other_losses_of_tokens_are_not_timed(config, tmp_path):
    import numpy as np

    np.save(tmp_path / "expected.npy", np.array([5.0, 6.0]))
    for moved, differs in ((5e-4, False), (7e-4, True)):
        np.save(tmp_path / "losses.npy", np.array([5.0, 6.0 - moved]))
        assert bool(torch_model.tokens_differ(tmp_path)) == differs


def test_the_time_of_a_config_with_fewer_tokens_is_compared_per_token(config):
    half = flags.read("configs/gpt2.py:tiny", ["--config.batch_size=4"])
    configs = {"first": config, "half": half}
    starts = {name: lambda c=c: update.TimedUpdate(c, Made([1.0] * 3)) for name, c in configs.items()}
    assert update.measured(starts, 3, False)[1]["ratio"] == 0.5


def test_runs_of_one_program_count_one_by_one(config):
    (row,) = update.measured({"three": lambda: update.TimedUpdate(config, Made([3.0] * 3), runs=3)}, 3, False)
    assert row["seconds"] == [1.0] * 3


def test_the_process_of_a_checkout_does_not_compile(monkeypatch):
    """The first one does, and ends before the second one starts, which is timed."""
    started = []

    class Started:
        def __init__(self, *_):
            assert all(each.killed for each in started)
            self.killed, self.start = False, {"compile_seconds": 6.0 - 5 * len(started)}
            started.append(self)

        def kill(self):
            self.killed = True

    monkeypatch.setattr(peers, "Peer", Started)
    peer = peers.checkout_peer(str(peers.ROOT), ["--config", "configs/gpt2.py:tiny"])
    assert peer is started[1] and not peer.killed and peer.start["compile_seconds"] == 6.0
