"""The files of a run from the command line, and the commands that it prints at its end."""

import os
import re
import shlex
import subprocess
import sys
from dataclasses import replace

import pytest
from etils import epath

from tests.tiny_runs import ROOT, tiny_config, tiny_model
from xfresearch.checkpoints.validity import PUBLISHED
from xfresearch.data.tokenizers import ByteTokenizer
from xfresearch.run_config.config_files import parse, read_json
from xfresearch.runtime.errors import UserError
from xfresearch.train import default_workdir
from xfresearch.training import session
from xfresearch.training.samples import draw_samples
from xfresearch.training.workdir import record, starts, write_config

GPT2 = f"--config={ROOT}/configs/gpt2.py:tiny"


def test_a_mistake_found_before_training_leaves_the_directory_as_it_was(tmp_path):
    path, wrong = epath.Path(tmp_path), [GPT2, "--config.data.corpus=('text_files:/nowhere',)"]
    with pytest.raises(UserError, match="/nowhere"):
        session.run(parse(wrong), str(path), wrong, fork=False)
    record(path, tiny_config(), fork=False)  # would be refused if the wrong config had been recorded
    write_config(path, tiny_config(), ByteTokenizer())
    assert len(starts(path)) == 1
    (path / "checkpoints" / "15" / "rest").mkdir(parents=True)
    (path / "checkpoints" / "15" / PUBLISHED).write_text("")
    with pytest.raises(UserError, match="/nowhere"):
        session.run(parse(wrong), str(path), wrong, fork=True)
    assert read_json(path / "config.json") == tiny_config()


def test_a_run_has_a_directory_of_its_own_for_each_argument_of_a_config():
    names = {"configs/gpt2.py:tiny": "gpt2-tiny", "gpt2": "gpt2", "my.py:0.9m": "my-0.9m", "my.py:0.5m": "my-0.5m"}
    assert {name: default_workdir(name) for name in names} == {name: f"runs/{folder}" for name, folder in names.items()}


def test_the_command_to_train_longer_keeps_the_overrides():
    given = [GPT2, "--config.steps", "7", "--config.data.corpus=('text_files:my notes',)", "--config.model.width=64"]
    config = parse(given)
    words = shlex.split(session._commands(config, epath.Path("runs/my run"), given, [])["train longer"])
    told, rest = [word for word in words if word.startswith("--config")], words[: words.index("--config")]
    assert rest == ["python", "-m", "xfresearch.train"] and words[words.index("--workdir") + 1] == "runs/my run"
    again = parse(["--config", words[words.index("--config") + 1], *told[1:]])
    assert again == parse([*given, "--config.steps=14"]) and len(told) == 4


def test_baselines_read_only_the_beginning_of_a_large_split(monkeypatch):
    monkeypatch.setattr(session, "BASELINE_BYTES", 10)
    read = []
    texts = (read.append(text) or text for text in [b"abcd", b"", b"efghijkl", b"mn"])
    assert session._beginning(texts) == [b"abcd", b"", b"efghij"] and len(read) == 3


@pytest.mark.long
@pytest.mark.parametrize("gone", [True, False])
def test_outputs_that_cannot_be_written_do_not_fail_a_finished_run(tmp_path, gone):
    """The report, the cache of baselines, a terminal without the sample's characters, and a reader that has gone."""
    run = tmp_path / "run"
    (run / "report.html").mkdir(parents=True)
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / "baselines").write_text("a file where a directory is needed")
    (tmp_path / "text").mkdir()
    for number in range(20):
        (tmp_path / "text" / f"{number}.txt").write_text("→ € ✓\n" * 60, encoding="utf8")
    corpus = f"--config.data.corpus=('text_files:{tmp_path}/text',)"
    command = [sys.executable, "-m", "xfresearch.train", GPT2, "--workdir", run, corpus, "--config.steps=5"]
    environment = os.environ | {"XFRESEARCH_CACHE": str(tmp_path / "cache"), "PYTHONIOENCODING": "latin-1"}
    reader, writer = os.pipe()
    os.close(reader)
    output = writer if gone else subprocess.PIPE
    done = subprocess.run(command, stdout=output, stderr=subprocess.PIPE, cwd=ROOT, env=environment)
    os.close(writer)
    assert done.returncode == 0, done.stderr.decode()
    assert b"warning: report.html could not be written: " in done.stderr and b"Traceback" not in done.stderr
    assert b"baselines/" in done.stderr
    assert (b"warning: the results could not be written: Broken pipe" in done.stderr) == gone
    assert gone or rb"\u2192" in done.stdout


def test_the_printed_commands_work_when_pasted(tmp_path):
    """A prompt with quotes, a line end and a leading space, a tuple, and a directory with a space."""
    given = [GPT2, "--config.data.corpus=('text_files:a b','python_stdlib')", "--config.log.sample= it's\n\"new\" $HOME"]
    config = parse(given)
    samples = [{"prompt": config.log.sample, "seed": 0, "text": ""}]
    commands = session._commands(config, epath.Path("runs/my run"), given, samples)
    for name in ("generate", "train longer"):
        command = commands[name].replace("python -m", "printf '%s\\0'", 1)
        pasted = subprocess.run(["bash", "-c", command], capture_output=True)
        assert pasted.stdout.decode().split("\0")[:-1] == shlex.split(commands[name])[2:]
    words = shlex.split(commands["generate"])
    assert words[words.index("--prompt") + 1] == config.log.sample
    longer = [word for word in shlex.split(commands["train longer"]) if word.startswith("--config.data")]
    assert parse([GPT2, *longer]).data.corpus == config.data.corpus


def test_samples_are_two_prompts_and_three_seeds_that_generate_repeats(tmp_path):
    """One line each, from two held-out documents; `generate` with the same seed writes the same text."""
    for number in range(40):
        (tmp_path / f"{number}.txt").write_text(f"\n  \nfirst line {number}\nsecond line\n" * 30)
    lm = tiny_model(data__corpus=f"('text_files:{tmp_path}/*.txt',)")
    result = draw_samples(lm.run, lm.tokenizer, lm.params)
    prompts = list(dict.fromkeys(sample["prompt"] for sample in result))
    assert len(prompts) == 2 and all(re.fullmatch(r"first line \d+", prompt) for prompt in prompts)
    assert [sample["seed"] for sample in result] == [0, 1, 2, 0, 1, 2]
    assert len({sample["text"] for sample in result}) == 6
    for sample in result[::4]:
        assert lm.generate(sample["prompt"], seed=sample["seed"]) == sample["text"]
    chosen = replace(lm.run, log=replace(lm.run.log, sample="my prompt"))
    result = draw_samples(chosen, lm.tokenizer, lm.params)
    assert [sample["prompt"] for sample in result] == 3 * ["my prompt"] + 3 * prompts[:1]
