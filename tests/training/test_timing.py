"""How long updates take: two configs in turns, and one on random tokens."""

import pytest

from xfresearch.training import timing


@pytest.mark.parametrize(
    "seconds, turns, ratio",
    [
        ({"base": [1, 1, 2], "arm": [3, 2, 2]}, 3, 2.0),
        ({"base": [1, 1, 2, 2], "arm": [4, 3, 2, 2]}, 4, 2.0),  # after three turns, only one of them was fast
        ({"base": [1, *[2] * 8], "arm": [2] * 9}, 9, 2.0),
    ],
)
def test_there_are_turns_until_two_of_each_are_fast(monkeypatch, seconds, turns, ratio):
    left = {name: iter(each) for name, each in seconds.items()}
    called = []
    monkeypatch.setattr(timing, "seconds_per_update", lambda name: called.append(name) or next(left[name]))
    assert timing.relative_seconds("arm", "base") == ratio
    assert called == ["base", "arm"] * turns


def test_rounds_change_their_order():
    """So that each timer is equally often at each place, and of three none runs twice in a row."""
    called = []
    timers = [lambda: called.append("a") or 1.0, lambda: called.append("b") or 2.0, lambda: called.append("c") or 3.0]
    seconds_NR, _ = timing.timed_rounds(timers, 3)
    assert "".join(called) == "abcbcacab"
    assert seconds_NR.tolist() == [[1.0] * 3, [2.0] * 3, [3.0] * 3]
