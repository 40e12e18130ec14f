"""Contract 9: every variant survives every room. A room gives a result, or refuses in the words of docs/data/rooms.json."""

import pytest

from tests.contracts import outcomes
from tests.contracts.outcomes import outcome
from tests.contracts.rooms import EVERY, QUICK, ROOMS

# Daily: variants that differ in what a room asks a sublayer for, in rooms that are quick.
NAMES = ["base", "layout=macaron", "layout=hyper_connections", "attention.kind=value_residual"]
NAMES += ["two stacks: all-attention"]
CASES = [pytest.param(name, QUICK, id=f"{name}-quick") for name in NAMES]
CASES += [pytest.param(name, list(ROOMS), id=name, marks=pytest.mark.long) for name in EVERY]


@pytest.fixture(scope="module")
def recorded():
    return outcomes.read()


def test_the_record_has_every_variant_and_room(recorded):
    """Rooms that take long may be missing: `make rooms` goes on."""
    assert list(recorded) == list(EVERY)
    assert all({*QUICK} <= {*row} <= {*ROOMS} for row in recorded.values())


def test_several_streams_are_refused_where_terms_are_followed():
    words = outcome("analyze lens", "layout=hyper_connections")
    assert words.startswith("lens does not apply") and "blocks.0.attention writes to several residual streams" in words


@pytest.mark.parametrize("name, rooms", CASES)
def test_every_room_gives_a_result_or_refuses_in_one_line(name, rooms, recorded):
    wrong = {}
    for room in rooms:
        try:
            result = outcome(room, name)
        except AssertionError as bug:  # every room is named, not the first one alone
            wrong[room] = str(bug)
        else:
            if (kept := recorded.get(name, {}).get(room, result)) != result:
                wrong[room] = f"{result!r}, and the record has {kept!r}: python -m tests.contracts.outcomes {name!r}"
    assert not wrong
