"""Whole texts of tasks that do not come back from a model's tokens are a warning: lm_eval counts all of their bytes."""

from types import SimpleNamespace

import pytest

from tests.data import made_tokenizers as made
from tests.harness.test_commands import MISSING
from tests.tiny_runs import tiny_model
from xfresearch.data.tokenizers import load_tokenizer
from xfresearch.harness.items import Items


def test_whole_texts_of_unknown_tokens_are_a_warning(tmp_path, capsys):
    pytest.importorskip("lm_eval", reason=MISSING)
    from xfresearch.harness.adapter import Adapter

    made.write(tmp_path, {"vocab.txt": made.word_pieces()})
    lm = tiny_model("gpt2")
    lm.tokenizer = load_tokenizer(tmp_path)
    adapter = Adapter(lm, Items(), 64, 2, name="runs/a")
    adapter.loglikelihood_rolling([SimpleNamespace(args=("the cat and the dog",))])
    assert "warning" not in capsys.readouterr().err
    adapter.loglikelihood_rolling([SimpleNamespace(args=("the cat",)), SimpleNamespace(args=("\u6625\u7720",))])
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("warning: ")]
    assert line.startswith("warning: runs/a, whole texts of tasks: 50.0% of the tokens are unknown, 46.2% of the text")
