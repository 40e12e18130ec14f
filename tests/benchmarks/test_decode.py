"""`bench decode`: a checkout decodes the same tokens, and other tokens are an error."""

import json
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.parity.weights import MISSING
from xfresearch import bench
from xfresearch.benchmarks import decode
from xfresearch.runtime.errors import UserError

ROOT = Path(__file__).parents[2]
TINY = ("decode", "--config", "configs/gpt2.py:tiny", "--config.model.dtype=float32", "--rounds", "2", "--tokens", "5")


def rows(path, *flags) -> list[dict]:
    bench.main([*TINY, *flags, "--json", str(path)])
    return json.loads(path.read_text())["rows"]


def test_a_checkout_samples_the_same_tokens(tmp_path, capsys):
    ours, theirs = rows(tmp_path / "figures.json", "--against", str(ROOT), "--sample")
    assert theirs["model"] == str(ROOT) and theirs["ratio"] > 0 and len(theirs["seconds"]) == 2
    assert ours["tokens/s"] > 0 and ours["floors"] > 0 and ours["ratio"] == 1
    assert "floors" in capsys.readouterr().out


def test_texts_that_differ_are_an_error():
    ours_BL = np.array([[1, 2], [3, 4]])
    decode.require_equal("transformers", ours_BL, ours_BL.copy())
    with pytest.raises(UserError, match="transformers: the texts differ: token 1 of sequence 1 is 5, ours is 4"):
        decode.require_equal("transformers", ours_BL, np.array([[1, 2], [3, 5]]))


@pytest.mark.parametrize(
    "words, message",
    [
        ("decode", "give a WORKDIR or --config"),
        ("decode runs/a --config.model.depth=2", "depth=2 is not allowed without --config"),
        ("decode --config configs/gpt2.py:tiny --config.model.dtype=bfloat16 --against transformers", "float32"),
        ("decode --config configs/gpt2.py:tiny --config.model.dtype=float32 --against nowhere", "path of a checkout"),
        ("decode --config configs/gpt2.py:tiny --config.model.dtype=float32 --against transformers --sample", "--sample"),
    ],
)
def test_errors_name_the_flag(words, message):
    with pytest.raises(UserError, match=message):
        bench.main(words.split())


@pytest.mark.parity
@pytest.mark.parametrize(
    "config, peer",
    [
        ("configs/gpt2.py:tiny", "transformers"),
        ("configs/llama.py:tiny", "transformers"),
        ("configs/gpt2.py:tiny", "transformers_static"),
    ],
)
def test_transformers_decodes_the_same_tokens(tmp_path, monkeypatch, config, peer):
    pytest.importorskip("torch", reason=MISSING.format("torch"))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # PyTorch's threads wait for each other if other tests keep the cores busy
    flags = ["--torch-python", sys.executable, "--batch", "3", "--against", peer]
    bench.main([*TINY[:2], config, *TINY[3:], *flags, "--json", str(tmp_path / "figures.json")])
    assert json.loads((tmp_path / "figures.json").read_text())["rows"][1]["ratio"] > 0
