"""Contract 9: every variant survives every room. A room gives a result, or refuses in one line that is true of the model."""

import re
from dataclasses import fields, is_dataclass
from itertools import cycle

import jax
import pytest

from tests.contracts.rooms import EVERY, OF_CONVERSION, QUICK, ROOMS, model_of
from xfresearch.runtime.errors import UserError

# Daily each variant in one quick room, in turn, and the base in the rooms that take longer.
DAILY = [*zip(EVERY, cycle(QUICK), strict=False), *(("base", room) for room in ROOMS if room not in QUICK)]
OF_ROOMS = {option for options in OF_CONVERSION.values() for option in options} | {"rank", "gauge", "prompt", "tokens"}


def options_of(config) -> set[tuple[str, str]]:
    """(name, value) of all options of a model, and of its groups with a kind."""
    if isinstance(config, dict | tuple | list):
        values = config.values() if isinstance(config, dict) else config
        return set().union(*map(options_of, values))
    if not is_dataclass(config):
        return set()
    own = {field.name: getattr(config, field.name) for field in fields(config)}
    kinds = {(name, repr(value.kind)) for name, value in own.items() if getattr(value, "kind", "")}
    return {(name, repr(value)) for name, value in own.items()} | kinds | set().union(*map(options_of, own.values()))


def outcome(room: str, name: str) -> str:
    """The words of the refusal, '' for a result. Any other error, and words that are untrue of the model, fail the test."""
    lm = model_of(name)
    try:
        ROOMS[room](lm)
    except UserError as refused:
        words = str(refused)
        assert words and "\n" not in words
        given = set(re.findall(r"\b(\w+)=('[^']*'|[\w.]+)", re.sub(r"\(the family has [^)]*\)", "", words)))
        untrue = {pair for pair in given - options_of(lm.config) if pair[0] not in OF_ROOMS}
        assert not untrue, f"{room} of {name}: {words}"
        return words
    return ""


def test_several_streams_are_refused_where_terms_are_followed():
    words = outcome("analyze lens", "layout=hyper_connections")
    assert words.startswith("lens does not apply") and "blocks.0.attention writes to several residual streams" in words


def test_the_daily_rooms_have_every_variant_and_every_room():
    variants, rooms = zip(*DAILY, strict=True)
    assert {*variants} == {*EVERY} and {*rooms} == {*ROOMS}


@pytest.mark.parametrize("name, room", DAILY)
def test_a_room_gives_a_result_or_refuses_in_one_true_line(name, room):
    outcome(room, name)


@pytest.mark.long
@pytest.mark.parametrize("name", EVERY)
def test_every_room_gives_a_result_or_refuses_in_one_true_line(name):
    for room in ROOMS:
        outcome(room, name)
    jax.clear_caches()  # LLVM ends a process with too many programs
