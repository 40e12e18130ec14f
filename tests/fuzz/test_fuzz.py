"""Damaged inputs are read, or refused in one line, within seconds and little memory. `long` tries over 10,000 of them."""

import pytest

from tests.fuzz.targets import TARGETS
from tests.simulated import results_on_devices

SLOW = ("safetensors", "config.json of llama", "config.json of gpt2", "prompt", "checkpoint")  # a model is built or read
DAILY = {name: (0, 12 if name in SLOW else 80) for name in TARGETS}
MORE = {name: (1000, 350 if name in SLOW else 1600) for name in TARGETS}


@pytest.mark.parametrize("numbers", [DAILY, pytest.param(MORE, marks=pytest.mark.long)], ids=["daily", "long"])
@pytest.mark.parametrize("target", TARGETS)
def test_damaged_input_is_read_or_refused_in_one_line(target, numbers):
    first, count = numbers[target]
    found = results_on_devices(1, "-m", "tests.fuzz.worker", target, str(first), str(count), timeout=3600)
    assert not found["failures"], "\n\n".join(f"input {number}: {text}" for number, text in found["failures"][:5])
    assert found["accepted"] + found["refused"] == count


def test_as_many_inputs_as_promised():
    """docs/promises.md"""
    assert sum(count for _, count in DAILY.values()) >= 500 and sum(count for _, count in MORE.values()) >= 10_000
