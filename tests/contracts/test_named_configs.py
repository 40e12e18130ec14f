"""Contract 8: every named config trains at :tiny with its command and resumes bit for bit from a checkpoint.

The command runs in this process, so that JAX is loaded once. Each config takes some ten seconds, so all are `long`: every
day training/test_loop.py resumes a run with experts, and the documents train three other configs.
"""

import json
import shutil

import pytest

from tests.contracts.variants import ROOT, SHIPPED
from xfresearch.checkpoints import store
from xfresearch.data.tokenizers import load_tokenizer
from xfresearch.run_config.config_files import read_json
from xfresearch.train import main as train_main
from xfresearch.training import loop

STEPS, HALF = 6, 3
OVERRIDES = {
    "steps": STEPS,
    "checkpoint.every": HALF,
    "evaluation.final_sequences": 8,
    "log.tracker": "jsonl",
    "optimizer.kind": "muon",
    "training.ema": 0.9,
    "training.layers": "scan",
    "model.dropout": 0.1,
}


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("cache")


def state_of(workdir) -> dict:
    """The digest of every array of the last checkpoint."""
    meta = json.loads((store.directory(workdir) / str(STEPS) / "meta" / "metadata").read_text())
    return meta["digests"]


@pytest.mark.long
@pytest.mark.parametrize("name", [*SHIPPED, "playground"])
def test_trains_with_its_command_and_resumes_bit_for_bit(name, tmp_path, cache, capsys):
    flags = [f"--config.{key}={value}" for key, value in (OVERRIDES | {"data.cache_dir": cache}).items()]
    result = tmp_path / "result.json"
    train_main(
        ["--config", f"{ROOT}/configs/{name}.py:tiny", "--workdir", str(tmp_path), "--json", str(result), *flags]
    )
    figures = json.loads(result.read_text())
    measured = figures["evaluation"]
    # Data with labels has no bits per byte.
    assert figures["step"] == STEPS and 0 < measured.get("bits_per_byte", measured["loss"]) < 12
    assert "this model" in capsys.readouterr().out and (tmp_path / "report.html").exists()
    unbroken = state_of(tmp_path)
    shutil.rmtree(store.directory(tmp_path) / str(STEPS))
    kept = tmp_path / "tokenizer"
    loop.train(read_json(tmp_path / "config.json"), tmp_path, load_tokenizer(str(kept)) if kept.exists() else None)
    assert state_of(tmp_path) == unbroken
