"""The training loop beside its bare update."""

import json

from xfresearch import bench
from xfresearch.benchmarks import loop


def test_the_loop_is_compared_with_its_bare_update(tmp_path, capsys, monkeypatch):
    (tmp_path / "text.txt").write_text("some text to read\n" * 500)
    monkeypatch.setitem(loop.TEXT, "corpus", (f"text_files:{tmp_path}/*.txt",))
    small = ("--config.model.width=32", "--config.model.depth=1", "--config.batch_size=2")
    more = ("--updates", "4", "--rounds", "1", "--json", str(tmp_path / "figures.json"))
    bench.main(["loop", "--config", "configs/gpt2.py:3m", *small, *more])
    figures = json.loads((tmp_path / "figures.json").read_text())
    row, rounds = figures["row"], figures["rounds"]
    assert len(rounds) == 1 and all(bare > 0 and loop > 0 for bare, loop in rounds) and figures["machine"]
    assert row["ratio_low"] <= row["ratio"] <= row["ratio_high"] and row["bare ms"] > 0 and row["loop ms"] > 0
    assert capsys.readouterr().out.count("\n") == 2


def test_no_corpus_is_downloaded_and_the_model_keeps_its_vocabulary():
    config = loop.quiet("configs/gpt2.py", ["--config.batch_size=3"], updates=5)
    assert config.data.corpus == ("python_stdlib",) and config.data.tokenizer == "bytes"
    assert config.batch_size == 3 and config.steps == loop.UNTIMED + 5 and config.model.vocab_size == 50257
    assert loop.quiet("configs/brody_majority.py:tiny", [], 5).data.corpus[0].startswith("majority")
