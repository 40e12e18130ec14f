"""Contract 9: every variant survives every room. A room gives a result, or refuses in one line."""

from dataclasses import replace

import pytest

from tests.contracts.rooms import ROOMS, with_words
from tests.contracts.variants import ALL, marked, random_params
from tests.tiny_runs import tiny_config
from xfresearch import LanguageModel, UserError

# Daily: variants that differ in what a room asks a sublayer for.
NAMES = ["base", "layout=macaron", "layout=hyper_connections", "attention.kind=value_residual"]
SLOW = {"analyze patching", "analyze trace", "analyze lens", "analyze tuned_lens", "rome", "memit", "finetune"}


@pytest.mark.parametrize("name", marked(NAMES))
def test_every_room_gives_a_result_or_refuses_in_one_line(name):
    config = ALL[name]
    lm = LanguageModel(config, random_params(config, seed=5), None, replace(tiny_config("gpt2"), model=config))
    wrong = {}
    for room in ROOMS:
        if room.startswith("convert ") or name in NAMES and room in SLOW:  # test_conversions.py has all conversions
            continue
        try:
            ROOMS[room](with_words(lm))
        except UserError as refused:
            if "\n" in str(refused) or not str(refused):
                wrong[room] = str(refused)
        except Exception as bug:  # noqa: BLE001  every room is named, not the first one alone
            wrong[room] = repr(bug)
    assert not wrong
