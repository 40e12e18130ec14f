"""The files of a run from the command line, and the commands that it prints at its end."""

import shlex

import pytest
from etils import epath

from tests.tiny_runs import ROOT, tiny_config
from xfresearch.config.files import parse, read_json
from xfresearch.data.tokenizers import ByteTokenizer
from xfresearch.errors import UserError
from xfresearch.training import session
from xfresearch.training.workdir import record, starts, write_config

GPT2 = f"--config={ROOT}/configs/gpt2.py:tiny"


def test_a_mistake_found_before_training_leaves_the_directory_as_it_was(tmp_path):
    path, wrong = epath.Path(tmp_path), [GPT2, "--config.data.corpus=('text_files:/nowhere',)"]
    with pytest.raises(UserError, match="/nowhere"):
        session.run(parse(wrong), str(path), wrong, fork=False)
    record(path, tiny_config(), fork=False)  # would be refused if the wrong config had been recorded
    write_config(path, tiny_config(), ByteTokenizer())
    assert len(starts(path)) == 1
    with pytest.raises(UserError, match="/nowhere"):
        session.run(parse(wrong), str(path), wrong, fork=True)
    assert read_json(path / "config.json") == tiny_config()


def test_the_command_to_train_longer_keeps_the_overrides():
    given = [GPT2, "--config.steps", "7", "--config.data.corpus=('text_files:my notes',)", "--config.model.width=64"]
    config = parse(given)
    words = shlex.split(session._commands(config, epath.Path("runs/my run"), given, "")["train longer"])
    told, rest = [word for word in words if word.startswith("--config")], words[: words.index("--config")]
    assert rest == ["python", "-m", "xfresearch.train"] and words[words.index("--workdir") + 1] == "runs/my run"
    again = parse(["--config", words[words.index("--config") + 1], *told[1:]])
    assert again == parse([*given, "--config.steps=14"]) and len(told) == 4


def test_baselines_read_only_the_beginning_of_a_large_split(monkeypatch):
    monkeypatch.setattr(session, "BASELINE_BYTES", 10)
    read = []
    texts = (read.append(text) or text for text in [b"abcd", b"", b"efghijkl", b"mn"])
    assert session._beginning(texts) == [b"abcd", b"", b"efghij"] and len(read) == 3
