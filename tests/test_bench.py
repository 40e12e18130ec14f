"""The kernel benchmark: which implementations it compares, and its error messages."""

import json

import pytest

from tests.tiny_runs import make_run
from xfresearch import bench
from xfresearch.benchmarks import arrays, update
from xfresearch.errors import UserError
from xfresearch.training import operations as operations_module


@pytest.mark.parametrize(
    "words, message",
    [
        ("variants --only nothing", "invalid choice: 'variants' .*'attention', 'cross_entropy', 'grouped_matmul'"),
        ("attention --heads 0", "argument --heads: 0 is not allowed: it must be an integer of at least 1"),
        ("attention --heads 4 --kv-heads 3", "--kv-heads=3.* a divisor of --heads=4"),
        ("cross_entropy --rows 8,0", "--rows=8,0.* positive integers"),
        ("grouped_matmul --tokens 0", "argument --tokens: 0 is not allowed: it must be an integer of at least 1"),
        ("grouped_matmul --config.steps=3", "unrecognized arguments: --config.steps=3"),
        ("update configs/gpt2.py:tiny --config.step=3", "there is no key 'step'"),
        ("grouped_matmul --rounds -1", "argument --rounds: -1 is not allowed: it must be an integer of at least 1"),
    ],
)
def test_errors_name_the_flag(words, message):
    with pytest.raises(UserError, match=message):
        bench.main(words.split())


def test_implementations_that_support_the_call_are_compared(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(arrays, "FLOOR_SIZE", 64)
    sizes = ["--batch", "1", "--length", "16", "--heads", "2", "--kv-heads", "1", "--memory", "3", "--rounds", "1"]
    bench.main(["attention", *sizes, "--json", str(tmp_path / "figures.json")])
    rows = json.loads((tmp_path / "figures.json").read_text())["rows"]
    assert [row["implementation"] for row in rows] == ["plain", "blocked", "chunked", "floor"]
    assert all(row[phase]["ms"] > 0 for row in rows for phase in ("forward", "forward+backward"))
    assert "auto: blocked, " in capsys.readouterr().out


def test_decoding_of_models_is_compared(tmp_path, capsys):
    runs = [str(make_run(tmp_path / name, name, steps=(1,))) for name in ("gpt2", "all_attention")]
    bench.main(["decode", *runs, "--rounds", "1", "--tokens", "4", "--json", str(tmp_path / "figures.json")])
    rows = json.loads((tmp_path / "figures.json").read_text())["rows"]
    assert [row["model"] for row in rows] == runs and rows[0]["ratio"] == 1 and rows[1]["ratio"] > 0
    assert all(row["tokens/s"] > 0 and row["cache bytes per token"] == 512 for row in rows)
    assert capsys.readouterr().out.count("\n") == 3


def test_updates_of_configs_are_compared(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(operations_module, "UPDATES", 2)
    configs = ["configs/gpt2.py:tiny", "configs/llama.py:tiny"]
    small = ("--config.model.width=32", "--config.model.depth=1", "--config.batch_size=2")
    more = ("--rounds", "2", "--together", "3", "--by-operation", "--json", str(tmp_path / "figures.json"))
    bench.main(["update", *configs, *small, *more])
    figures = json.loads((tmp_path / "figures.json").read_text())
    rows, operations = figures["rows"], figures["operations"]
    assert operations["matrix products"] > 0 and min(operations.values()) >= 0
    assert [row["config"] for row in rows] == [*configs, f"{configs[0]}, 3 runs in one program"]
    assert rows[0]["ratio"] == 1 and rows[1]["ratio"] > 0
    assert all(row["ms"] > 0 and row["GFLOP/s"] > 0 and row["page faults"] >= 0 for row in rows)
    assert capsys.readouterr().out.count("\n") == 4 + 2 + update.SHOWN + 1
