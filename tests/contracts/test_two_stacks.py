"""Contract 9 for models with an encoder: each room gives a result, or refuses in one line."""

from contextlib import suppress
from dataclasses import replace

import pytest

from tests.contracts.rooms import ROOMS
from tests.contracts.two_stacks import MODELS, SOURCE
from tests.contracts.variants import random_params
from tests.editing.words import WORDS, WordTokenizer
from tests.tiny_runs import tiny_config
from xfresearch import LanguageModel
from xfresearch.models.model_config import second_stack
from xfresearch.runtime.errors import UserError
from xfresearch.surgery.refused import Refused

OPEN = ("drawing",)  # rooms that take any model
WITH_A_SOURCE = {"capture": "this model has no such value", "generate": "source is missing"}  # hook_* are of one stack


@pytest.fixture(scope="module")
def lm() -> LanguageModel:
    config = replace(MODELS["experts"], vocab_size=len(WORDS))
    run = replace(tiny_config("gpt2"), model=config, source_length=SOURCE)
    return LanguageModel(config, random_params(config, seed=5), WordTokenizer(), run)


@pytest.mark.parametrize("room", ROOMS)
def test_a_room_takes_a_model_with_an_encoder_or_refuses_it_in_one_line(room, lm):
    if room in OPEN:
        ROOMS[room](lm)
        return
    if room.startswith("convert "):  # both stacks at once: applies, or one layer of a stack is in the way
        with suppress(Refused):
            ROOMS[room](lm)
        return
    with pytest.raises(UserError) as refused:
        ROOMS[room](lm)
    assert WITH_A_SOURCE.get(room, second_stack(lm.config)) in str(refused.value) and "\n" not in str(refused.value)
