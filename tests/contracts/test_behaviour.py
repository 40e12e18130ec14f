"""Every named config has the costs, losses, logits and greedy text that behaviour.json records."""

import json

import pytest

from tests.contracts import behaviour
from tests.daily import daily

RECORDED = json.loads(behaviour.RECORDED.read_text())
DEFAULT_RUN = ("simplified",)


def test_every_named_config_is_recorded():
    assert RECORDED.keys() == set(behaviour.names())


@pytest.mark.parametrize("name", daily(DEFAULT_RUN, behaviour.names()))
def test_a_named_config_behaves_as_recorded(name, tmp_path, x64):
    assert behaviour.differences(behaviour.behaviour(name, tmp_path), RECORDED[name]) == []


def test_a_difference_is_reported():
    recorded = RECORDED["gpt2"]
    changed = recorded | {"losses": [loss * (1 + 1e-11) for loss in recorded["losses"]]}
    assert behaviour.differences(recorded, recorded) == []
    assert len(behaviour.differences(changed, recorded)) == 1
    assert len(behaviour.differences(recorded | {"text": "x"}, recorded)) == 1
