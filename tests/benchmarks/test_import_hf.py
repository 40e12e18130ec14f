"""The import benchmark: it writes a random model, and its rates are all of the same bytes."""

import json

import numpy as np
import pytest

from xfresearch import bench
from xfresearch.benchmarks import import_hf
from xfresearch.interop import importing
from xfresearch.interop.folder import stored_tensors


def test_random_folders_are_reproducible_models(tmp_path):
    for name in ("a", "b"):
        config = import_hf.llama(width=128, layers=2, vocab=64)
        import_hf.write_random(tmp_path / name, config, "bfloat16", shard_bytes=200_000)
    a, b = (importing.load(tmp_path / name) for name in ("a", "b"))
    table = a.params["embed"]["table"]
    np.testing.assert_array_equal(table, b.params["embed"]["table"])
    assert table.shape == (64, 128) and 0.015 < float(table.std()) < 0.025
    assert not np.array_equal(table, a.params["head"]["table"])
    assert a.config.dtype == "bfloat16" and len(list((tmp_path / "a").glob("*.safetensors"))) > 2


def test_rates_are_relative_to_the_bytes_of_the_folder(tmp_path, capsys):
    sizes = ["--width", "128", "--layers", "1", "--vocab", "64", "--rounds", "1", "--dtype", "float32"]
    bench.main(["import_hf", *sizes, "--json", str(tmp_path / "figures.json")])
    rows = json.loads((tmp_path / "figures.json").read_text())["rows"]
    assert [row["what"] for row in rows] == ["import", "read", "fill"]
    import_hf.write_random(tmp_path / "same", import_hf.llama(128, 1, 64), "float32")
    size = sum(tensor.bytes for tensor in stored_tensors(tmp_path / "same").values())
    for row in rows:
        assert row["seconds"] * row["MB/s"] == pytest.approx(size / 1e6)
    assert capsys.readouterr().out.count("\n") == 4
