"""Damaged inputs are read, or refused in one line, within seconds and little memory. `long` tries over 35,000 of them."""

import pytest

from tests.fuzz.targets import TARGETS
from tests.simulated import results_on_devices

SLOW = ("safetensors", "config.json of llama", "config.json of gpt2", "prompt", "checkpoint")  # a model is built or read
SLOW += ("results.json of a study",)  # pages are drawn
HOSTILE = {"hostile parquet": 1000, "hostile arrow": 1000, "hostile templates": 1500, "hostile tokenizers": 1500}
DAILY = {name: 12 if name in SLOW or name in HOSTILE else 60 for name in TARGETS}
MORE = {name: 350 if name in SLOW else 1600 for name in TARGETS} | HOSTILE


@pytest.mark.parametrize(
    "first, counts",
    [(0, DAILY), *(pytest.param(1000, {name: count}, marks=pytest.mark.long) for name, count in MORE.items())],
    ids=["daily", *MORE],
)
def test_damaged_input_is_read_or_refused_in_one_line(first, counts):
    arguments = [f"{name}={count}" for name, count in counts.items()]
    results = results_on_devices(1, "-m", "tests.fuzz.worker", str(first), *arguments, timeout=3600)
    failures = [f"{name} {number}: {text}" for name, result in results.items() for number, text in result["failures"]]
    assert not failures, "\n\n".join(failures[:5])
    assert {name: result["accepted"] + result["refused"] for name, result in results.items()} == counts


def test_as_many_inputs_as_promised():
    """docs/promises.md"""
    assert sum(DAILY.values()) >= 1200 and sum(MORE.values()) >= 35_900 and sum(HOSTILE.values()) >= 5000
