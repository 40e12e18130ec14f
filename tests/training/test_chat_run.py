"""A run on conversations that starts from a Hugging Face folder: its template, its held-out loss, resuming, exporting."""

import json
import shutil
from dataclasses import replace

import numpy as np
import pytest

import xfresearch as xf
from tests.data import made_tokenizers
from tests.data.chat_templates import FAMILIES, files_of
from tests.tiny_runs import ROOT, rough_params, tiny_model
from xfresearch import evaluate
from xfresearch.checkpoints import store
from xfresearch.data.tokenizers import load_tokenizer
from xfresearch.runtime.errors import UserError
from xfresearch.train import main as train_main
from xfresearch.training.metrics import read_metrics


def make_folder(path, family):
    lm = tiny_model("llama")
    made_tokenizers.write(path.with_name("files"), files_of(family))
    lm.tokenizer = None
    lm.config = replace(lm.config, vocab_size=load_tokenizer(path.with_name("files")).vocab_size)
    lm.params = rough_params(lm.config)
    lm.export_hf(path)
    made_tokenizers.write(path, files_of(family))
    return path


def flags(tmp_path, *more: str) -> list[str]:
    overrides = {
        "data.objective.kind": "chat",
        "data.packing": "documents",
        "data.corpus": f"('{tmp_path}/rows',)",
        "data.cache_dir": tmp_path / "cache",
        "sequence_length": 64,
        "steps": 8,
        "batch_size": 4,
        "optimizer.warmup": 0,
        "optimizer.learning_rate": 0.01,
        "checkpoint.every": 4,
        "evaluation.every": 4,
        "log.tracker": "jsonl",
    }
    given = [f"--config.{key}={value}" for key, value in overrides.items()]
    named = [f"--config={ROOT}/configs/llama.py:tiny", f"--start={tmp_path}/folder", f"--workdir={tmp_path}/run"]
    return [*named, *given, *more]


def test_a_run_on_conversations(tmp_path, capsys):
    make_folder(tmp_path / "folder", FAMILIES["gemma 3"])
    (tmp_path / "rows").mkdir()
    for split, count in (("train", 60), ("validation", 12)):
        rows = [{"prompt": f"{number} is", "completion": "the end"} for number in range(count)]
        rows += [{"prompt": "a", "completion": ""}, {"prompt": "a", "completion": "x" * 99}]
        (tmp_path / "rows" / f"{split}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    train_main(flags(tmp_path, f"--json={tmp_path}/first.json"))
    printed = capsys.readouterr()
    assert "of answers; without 1 longer examples and 1 conversations without an answer" in printed.err
    losses = [row["loss"] for row in read_metrics(tmp_path / "run" / "metrics.jsonl") if row["kind"] == "evaluation"]
    assert losses[-1] < losses[0]
    shutil.rmtree(tmp_path / "folder")  # the template is with the run's tokenizer
    shutil.rmtree(store.directory(tmp_path / "run") / "8")
    shutil.rmtree(tmp_path / "cache" / "chat")
    train_main(flags(tmp_path, f"--json={tmp_path}/again.json"))
    first, again = (json.loads((tmp_path / f"{name}.json").read_text())["evaluation"] for name in ("first", "again"))
    assert first["loss"] == again["loss"]
    lm = xf.load(tmp_path / "run")
    evaluate.main([f"--workdir={tmp_path}/run", f"--json={tmp_path}/evaluated.json"])
    assert json.loads((tmp_path / "evaluated.json").read_text())["loss"] == pytest.approx(first["loss"], rel=1e-5)
    total = count = 0
    for number in range(12):  # held-out loss: that of the tokens of answers, each given its whole conversation
        asked, answer = lm.chat(f"{number} is"), lm.encode("the end<end_of_turn>", special_tokens=True)
        loss_L = lm.loss([[*asked, *answer]])[0]
        total, count = total + np.sum(loss_L[-len(answer) :]), count + len(answer)
    assert first["loss"] == pytest.approx(total / count, rel=1e-4)


def test_a_row_of_several_conversations_needs_documents(tmp_path):
    make_folder(tmp_path / "folder", FAMILIES["gemma 3"])
    for override, words in (
        ("data.packing=stream", "packing='stream' is not allowed: it must be 'documents' with data.objective.kind='chat'"),
        ("data.objective.today=2024-13-01", "today='2024-13-01' is not allowed: it must be a date, YYYY-MM-DD"),
    ):
        with pytest.raises(UserError, match=words):
            train_main(flags(tmp_path, f"--config.{override}"))
