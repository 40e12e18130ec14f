"""The benchmarks: what they compare, their figures, and their error messages."""

import json
from pathlib import Path

import pytest

from tests.tiny_runs import make_run
from xfresearch import bench
from xfresearch.benchmarks import device_rates, equal_flops, flags, operations, save, side_by_side
from xfresearch.data import pipeline
from xfresearch.run_config.closed_form import costs
from xfresearch.runtime.errors import UserError

ROOT = Path(__file__).parent.parent


@pytest.mark.parametrize(
    "words, message",
    [
        ("variants --only nothing", r"'variants' .*attention\W+cross_entropy\W+grouped_matmul"),
        ("attention --heads 0", "argument --heads: 0 is not allowed: it must be an integer of at least 1"),
        ("attention --heads 4 --kv-heads 3", "--kv-heads=3.* a divisor of --heads=4"),
        ("cross_entropy --rows 8,0", "--rows=8,0.* positive integers"),
        ("grouped_matmul --tokens 0", "argument --tokens: 0 is not allowed: it must be an integer of at least 1"),
        ("grouped_matmul --config.steps=3", ": --config.steps=3"),
        ("update --config configs/gpt2.py:tiny --config.step=3", "there is no key 'step'"),
        ("loop --updates 3", "required: --config"),
        ("loop --config configs/gpt2.py:tiny --config.step=3", "there is no key 'step'"),
        ("save --megabytes 31", "--megabytes=31 is not allowed: it must be at least 32"),
        ("grouped_matmul --rounds -1", "argument --rounds: -1 is not allowed: it must be an integer of at least 1"),
    ],
)
def test_errors_name_the_flag(words, message):
    with pytest.raises(UserError, match=message):
        bench.main(words.split())


def test_implementations_that_support_the_call_are_compared(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(side_by_side, "FLOOR_SIZE", 64)
    sizes = ["--batch", "1", "--length", "16", "--heads", "2", "--kv-heads", "1", "--memory", "3", "--rounds", "1"]
    bench.main(["attention", *sizes, "--json", str(tmp_path / "figures.json")])
    rows = json.loads((tmp_path / "figures.json").read_text())["rows"]
    assert [row["implementation"] for row in rows] == ["plain", "blocked", "chunked", "floor"]
    assert all(row[phase]["ms"] > 0 for row in rows for phase in ("forward", "forward+backward"))
    assert "auto: blocked, " in capsys.readouterr().out


def test_saving_is_compared_with_that_of_earlier_versions(tmp_path, monkeypatch):
    monkeypatch.setattr(save, "ARRAYS", 1)
    given = ["save", "--megabytes", "4", "--rounds", "1", "--directory", str(tmp_path)]
    bench.main([*given, "--json", str(tmp_path / "figures.json")])
    row = json.loads((tmp_path / "figures.json").read_text())["row"]
    assert row["now"] > row["digests"] > 0 and row["before"] > row["sums"] > 0 and row["ratio"] > 0
    assert [path.name for path in tmp_path.iterdir()] == ["figures.json"]


def test_decoding_of_models_is_compared(tmp_path, capsys):
    runs = [str(make_run(tmp_path / name, name, steps=(1,))) for name in ("gpt2", "all_attention")]
    bench.main(["decode", *runs, "--rounds", "1", "--tokens", "4", "--json", str(tmp_path / "figures.json")])
    rows = json.loads((tmp_path / "figures.json").read_text())["rows"]
    assert [row["model"] for row in rows] == runs and rows[0]["ratio"] == 1 and rows[1]["ratio"] > 0
    assert all(row["tokens/s"] > 0 and row["cache bytes per token"] == 512 for row in rows)
    assert capsys.readouterr().out.count("\n") == 4  # the floor is the last line


SMALL = ("--config.model.width=32", "--config.model.depth=1", "--config.batch_size=2", "--config.sequence_length=16")


def test_updates_of_configs_are_compared(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(operations, "UPDATES", 2)
    monkeypatch.setattr(device_rates, "ROWS", {"cpu": 64})
    monkeypatch.setattr(device_rates, "BYTES", 2**16)
    monkeypatch.setattr(pipeline.Batches, "__init__", None)  # random tokens: a corpus would be downloaded
    configs = ["configs/gpt2.py:5m", "configs/llama.py:tiny"]
    more = ("--rounds", "3", "--together", "3", "--profile", "--json", str(tmp_path / "figures.json"))
    bench.main(["update", "--config", configs[0], "--config", configs[1], *SMALL, *more])
    figures = json.loads((tmp_path / "figures.json").read_text())
    rows, profile = figures["rows"], {row["operation"]: row for row in figures["operations"]}
    assert profile["matrix products"]["floors"] > 0 and all(row["seconds"] >= 0 for row in profile.values())
    assert [row["config"] for row in rows] == [*configs, f"{configs[0]}, 3 runs in one program"]
    assert rows[0]["ratio"] == 1 and rows[1]["ratio"] > 0 and figures["commit"] and figures["machine"]["cores"]
    for row in rows:
        assert row["ms_low"] <= row["ms"] <= row["ms_high"] and len(row["seconds"]) == 3
        assert row["MFU"] == pytest.approx(row["flops"] / row["ms"] * 1e3 / figures["peak_flops"])
        assert row["memory_bytes"] > 0 and row["compile_seconds"] > 0 and row["page faults"] >= 0
    state = 3 * 4 * costs(flags.read(configs[0], SMALL).model, 16).parameters  # parameters and two moments
    assert state < rows[0]["memory_bytes"] < rows[2]["memory_bytes"]
    assert "MFU is relative to" in capsys.readouterr().out


def test_a_checkout_runs_the_same_config(tmp_path, capsys):
    """Here: this one. Each row is a process, and a second one of this checkout shows how far processes differ."""
    config = ["--config", "configs/gpt2.py:tiny", *SMALL]
    bench.main(["update", *config, "--rounds", "1", "--against", str(ROOT), "--json", str(tmp_path / "figures.json")])
    rows = json.loads((tmp_path / "figures.json").read_text())["rows"]
    assert [row["config"] for row in rows] == [config[1], str(ROOT), f"{config[1]}, again"]
    assert rows[0]["ratio"] == 1 and all(row["ratio"] > 0 and row["tokens/s"] > 0 for row in rows)
    assert all(row["page faults"] is None for row in rows)  # of this process, which computes nothing
    assert len({row["memory_bytes"] for row in rows}) == len({tuple(row["losses"]) for row in rows}) == 1


@pytest.mark.parametrize(
    "words, message",
    [
        ("configs/moe.py:tiny --against torch", "GPT-2 or a Llama, and .*kind"),
        ("configs/all_attention.py:tiny --against torch_compile", "GPT-2 or a Llama, and "),
        ("configs/gpt2.py:tiny --against torch --config.optimizer.kind=lion", "optimizer.kind='lion'.*'adamw' with"),
        ("configs/gpt2.py:tiny --against torch --config.model.dropout=0.1", "embd_pdrop is 0.1, and must be 0.0"),
        ("configs/gpt2.py:tiny --against torch --torch-python /nothing", "--torch-python=/nothing.*must import torch"),
        ("configs/gpt2.py:tiny --against tests", "--against=tests is not allowed: it must be torch, torch_compile"),
    ],
)
def test_what_cannot_be_compared_is_refused(words, message):
    with pytest.raises(UserError, match=message):
        bench.main(["update", "--config", *words.split()])


def test_models_of_equal_flops():
    """Experts differ from the dense model by the router alone; softmax slots are as large as the feed-forward layer."""
    file = "xfresearch/benchmarks/equal_flops.py"
    by_name = {name: flags.read(f"{file}:{name}", ["--config.model.vocab_size=257"]) for name in equal_flops.NAMES}
    flops = {name: costs(config.model, 256).flops_per_token for name, config in by_name.items()}
    assert flops["experts"] - flops["dense"] == 6 * 2 * 256 * 8
    assert flops["slots"] == flops["feed_forward"]
