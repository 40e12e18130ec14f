"""Contract 9: every variant survives every room. A room gives a result, or refuses in one line."""

from dataclasses import replace

import pytest

from tests.contracts.rooms import ROOMS, with_words
from tests.contracts.variants import ALL, random_params
from tests.tiny_runs import tiny_config
from xfresearch import LanguageModel, UserError

# Daily: variants that differ in what a room asks a sublayer for, in rooms that are quick.
NAMES = ["base", "layout=macaron", "layout=hyper_connections", "attention.kind=value_residual"]
SLOW = {"analyze patching", "analyze trace", "analyze lens", "analyze tuned_lens", "rome", "memit", "finetune"}
CASES = [pytest.param(name, [room for room in ROOMS if room not in SLOW], id=f"{name}-quick") for name in NAMES]
CASES += [pytest.param(name, list(ROOMS), id=name, marks=pytest.mark.long) for name in ALL]


def model_of(name: str) -> LanguageModel:
    config = ALL[name]
    lm = LanguageModel(config, random_params(config, seed=5), None, replace(tiny_config("gpt2"), model=config))
    return with_words(lm)


def test_several_streams_are_refused_where_terms_are_followed():
    with pytest.raises(UserError, match="^lens does not apply .*: blocks.0.attention writes to several residual streams"):
        ROOMS["analyze lens"](model_of("layout=hyper_connections"))


@pytest.mark.parametrize("name, rooms", CASES)
def test_every_room_gives_a_result_or_refuses_in_one_line(name, rooms):
    wrong = {}
    for room in rooms:
        try:
            ROOMS[room](model_of(name))
        except UserError as refused:
            if "\n" in str(refused) or not str(refused):
                wrong[room] = str(refused)
        except Exception as bug:  # noqa: BLE001  every room is named, not the first one alone
            wrong[room] = repr(bug)
    assert not wrong
