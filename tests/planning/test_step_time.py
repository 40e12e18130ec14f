"""The expectation of a plan: what a similar update reached on the chip, without overlap of collectives."""

import re

import pytest

from tests.contracts.variants import ROOT
from xfresearch.planning import plans, report, topologies
from xfresearch.planning.chips import CHIPS
from xfresearch.planning.step_time import MEASURED, most_similar
from xfresearch.run_config.config_files import parse


def config_of(name: str, *overrides: str):
    return parse(["--config", f"{ROOT}/configs/{name}.py:tiny", "--config.model.vocab_size=264", *overrides])


def plan(machine: str, *overrides: str) -> dict:
    topology = topologies.parse(machine)
    return plans.formula_plan(config_of("llama", *overrides), topology, 1e12, topologies.gpus(topology))


def test_every_measurement_names_its_chip_and_source():
    for row in MEASURED:
        assert row.chip in CHIPS and 0 < row.utilisation < 1
        assert re.search(r"\d{4}-\d\d-\d\d, commit [0-9a-f]{7}", row.source)


@pytest.mark.parametrize(
    "chip, name, overrides, model",
    [
        ("h200", "llama", ["--config.model.dtype=bfloat16"], "gpt2 124M"),
        ("h200", "llama", ["--config.model.dtype=bfloat16", "--config.model.width=1536"], "llama 953M"),
        ("h200", "moe", ["--config.model.dtype=bfloat16"], "moe 510M"),
        ("h200", "llama", [], None),  # in float32
        ("h100", "llama", ["--config.model.dtype=bfloat16"], None),
    ],
)
def test_the_most_similar_model_is_one_with_experts_or_without_of_the_nearest_width(chip, name, overrides, model):
    result = most_similar(chip, config_of(name, *overrides))
    assert (result and result.model) == model


def test_the_expected_step_has_the_measured_utilisation_recomputation_and_all_collectives():
    overrides = ["--config.model.dtype=bfloat16", "--config.mesh.fsdp=2", "--config.training.remat=full"]
    result = plan("h200:2x2", *overrides)
    expected, time = result["expected"], result["time"]
    products = result["flops"]["traced"] / (4 * 989.4e12) / 0.41
    assert result["flops"]["traced"] > 1.2 * result["model_flops"] and time["links"] > 0 and time["network"] > 0
    assert expected["step_seconds"] == pytest.approx(products + time["links"] + time["network"])
    assert expected["utilisation"] == pytest.approx(result["model_flops"] / (4 * 989.4e12) / expected["step_seconds"])
    text = report.text(result)
    assert re.search(r"not overlapped +overlapped +expected\n", text) and "expected: as gpt2 124M (32 x 1024" in text


def test_a_chip_without_measurements_says_so():
    result = plan("h100:2", "--config.model.dtype=bfloat16")
    assert result["expected"] is None and "expected: not measured" in report.text(result)
