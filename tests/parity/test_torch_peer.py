"""The model in PyTorch that `bench update --against torch` times: its losses are those of ours."""

import json
import sys

import numpy as np
import pytest

from tests.parity.weights import MISSING
from tests.tolerances import TOLERANCE
from xfresearch import bench
from xfresearch.benchmarks import torch_model

pytest.importorskip("torch", reason=MISSING.format("torch"))
pytestmark = pytest.mark.parity
SMALL = ["--config.model.depth=2", "--config.batch_size=2", "--config.sequence_length=32", "--config.optimizer.warmup=1"]
GROUPED = ("--config.model.blocks.main.attention.kv_heads=2", "--config.model.tie_embeddings=True")
CASES = {
    "gpt2": ["configs/gpt2.py:tiny"],
    "llama": ["configs/llama.py:tiny"],
    "grouped": ["configs/llama.py:tiny", *GROUPED],
    "bfloat16": ["configs/llama.py:tiny", "--config.model.dtype=bfloat16"],
}


@pytest.fixture(autouse=True)
def one_thread(monkeypatch):
    """PyTorch's threads wait for each other at every operation, for seconds if other tests keep the cores busy."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


def rows(tmp_path, case: str, against: str = "torch") -> list[dict]:
    flags = ["--rounds", "4", "--against", against, "--torch-python", sys.executable]
    bench.main(["update", "--config", *CASES[case], *SMALL, *flags, "--json", str(tmp_path / "figures.json")])
    return json.loads((tmp_path / "figures.json").read_text())["rows"]


@pytest.mark.parametrize("case", CASES)
def test_losses_of_updates_are_equal(tmp_path, case):
    """Also after updates at the full learning rate, so gradients and AdamW are equal."""
    ours, theirs = rows(tmp_path, case)
    assert not theirs["error"] and theirs["ratio"] > 0 and theirs["ms"] > 0
    assert ours["losses"][4] < 0.8 * ours["losses"][0]
    allowed = 10 * TOLERANCE["bfloat16" if case == "bfloat16" else "float32"]  # five updates add up
    np.testing.assert_allclose(theirs["losses"][:5], ours["losses"], rtol=allowed)


def test_a_compiled_model_has_the_same_losses(tmp_path):
    ours, theirs = rows(tmp_path, "llama", "torch_compile")
    assert not theirs["error"] and theirs["compile_seconds"] > 0
    np.testing.assert_allclose(theirs["losses"][:5], ours["losses"], rtol=10 * TOLERANCE["float32"])


@pytest.mark.parametrize("field", ["losses", "rates"])
def test_a_model_that_is_another_one_is_an_error_row(tmp_path, monkeypatch, capsys, field):
    if field == "losses":  # of tokens, before the first update
        real = torch_model.losses
        monkeypatch.setattr(torch_model, "losses", lambda *arguments: real(*arguments) + 2e-3)
    else:
        monkeypatch.setattr(torch_model, "learning_rate", lambda *_: 0.0)
    theirs = rows(tmp_path, "gpt2")[1]
    assert "of tokens differ by" in theirs["error"] if field == "losses" else "of updates differ" in theirs["error"]
    assert theirs["ratio"] is None and "differ by" in capsys.readouterr().out
