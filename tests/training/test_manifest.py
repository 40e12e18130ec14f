"""A run resumes only with the data, the tokenizer and the versions that it started with."""

import json
import os
import shutil
from functools import cache

import pytest

from tests.tiny_runs import ROOT
from xfresearch import hardware, train
from xfresearch.checkpoints import manifest
from xfresearch.errors import UserError

STEPS = 4


def write_corpus(folder, word: str) -> None:
    folder.mkdir(exist_ok=True)
    for number in range(40):
        (folder / f"{number:02}.txt").write_text(f"{number} {word} " * 60)


def flags(folder, *more: str, cache="cache") -> list[str]:
    overrides = {
        "data.corpus": f"('text_files:{folder / 'corpus'}',)",
        "data.cache_dir": folder / cache,
        "steps": STEPS,
        "optimizer.warmup": 0,
        "checkpoint.every": 2,
        "evaluation.every": 0,
        "log.tensorboard": False,
    }
    given = [f"--config.{key}={value}" for key, value in overrides.items()]
    return [f"--config={ROOT}/configs/gpt2.py:tiny", f"--workdir={folder / 'run'}", *given, *more]


def curve(workdir) -> list:
    rows = map(json.loads, (workdir / "metrics.jsonl").read_text().splitlines())
    return [(row["step"], row["loss"]) for row in rows if row["kind"] == "train"]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """trained(flags) trains a run once. Returns its folder, which has the corpus too, and a copy of the folder."""

    @cache
    def train_once(tokenizer: tuple[str, ...]):
        folder, copy = tmp_path_factory.mktemp("folder"), tmp_path_factory.mktemp("copy")
        write_corpus(folder / "corpus", "one")
        train.main(flags(folder, *tokenizer))
        shutil.copytree(folder, copy, dirs_exist_ok=True)
        return folder, copy

    return train_once


@pytest.fixture
def tokenizer():
    return ()


@pytest.fixture
def folder(trained, tokenizer):
    """The folder of a run as training left it, always at the same path: the cache knows files by their paths."""
    folder, copy = trained(tokenizer)
    shutil.rmtree(folder)
    return shutil.copytree(copy, folder)


@pytest.fixture
def interrupted(folder, tokenizer):
    """resume(*flags) continues the run in `folder`, which was killed after step 2."""
    shutil.rmtree(folder / "run" / "checkpoints" / str(STEPS))
    uninterrupted = curve(folder / "run")

    def resume(*more: str, cache="cache"):
        train.main(flags(folder, *tokenizer, *more, cache=cache))
        return curve(folder / "run"), uninterrupted

    return resume


def contents(folder) -> dict:
    kept = [path for path in folder.rglob("*") if path.is_file() and path.name not in ("run.json", ".lock")]
    return {path: path.read_bytes() for path in kept}


def test_the_same_text_elsewhere_resumes_bit_for_bit(interrupted, folder):
    """Other paths and times of the files, and an empty cache, are no difference."""
    for path in (folder / "corpus").iterdir():
        text = path.read_text()
        path.unlink()
        path.write_text(text)
    resumed, uninterrupted = interrupted(cache="another")
    assert resumed == uninterrupted


@pytest.mark.parametrize("kept_times", [False, True])
def test_another_text_is_refused(interrupted, folder, kept_times):
    """Also if every file keeps its size and its time of modification."""
    before = contents(folder / "run")
    for path in (folder / "corpus").iterdir():
        times = path.stat().st_atime_ns, path.stat().st_mtime_ns
        path.write_text(path.read_text().replace("one", "two"))
        if kept_times:
            os.utime(path, ns=times)
    with pytest.raises(UserError, match="step 2 was computed with other data or versions .train split of text_files:"):
        interrupted()
    assert contents(folder / "run") == before
    resumed, uninterrupted = interrupted("--fork")
    assert resumed[:2] == uninterrupted[:2] and resumed[2:] != uninterrupted[2:]


@pytest.mark.parametrize("tokenizer", [("--config.data.tokenizer=bpe", "--config.data.bpe_vocab=300")], ids=["bpe"])
def test_a_new_file_in_the_corpus_does_not_replace_the_runs_tokenizer(interrupted, folder):
    before = contents(folder / "run")
    (folder / "corpus" / "new.txt").write_text("entirely different words " * 400)
    with pytest.raises(UserError, match="other data or versions"):
        interrupted()
    assert contents(folder / "run") == before
    (folder / "corpus" / "new.txt").unlink()
    resumed, uninterrupted = interrupted(cache="another")
    assert resumed == uninterrupted


def test_other_versions_are_refused_by_name(interrupted, monkeypatch):
    found = hardware.versions()
    monkeypatch.setattr(hardware, "versions", lambda: found | {"jax": "0.99"})
    monkeypatch.setattr(hardware, "git_commit", lambda: "c0ffee")
    with pytest.raises(UserError, match=r"commit: .* -> 'c0ffee'; version of jax: '.*' -> '0.99'"):
        interrupted()
    resumed, uninterrupted = interrupted("--fork")
    assert resumed == uninterrupted


def test_an_altered_meta_is_damage(interrupted, folder):
    meta = folder / "run" / "checkpoints" / "2" / "meta" / "metadata"
    meta.write_text(meta.read_text().replace('"saved_at": 1', '"saved_at": 2'))
    with pytest.raises(UserError, match="every checkpoint is damaged"):
        interrupted()


def test_evaluation_may_be_switched_on_and_other_entries_may_not_disappear():
    old = {"train split of a": "1", "commit": "x"}
    assert manifest.differences(old, old | {"validation split of a": "2"}) == []
    assert manifest.differences(old | {"validation split of a": "1"}, old | {"validation split of a": "2"})
    assert manifest.differences(old, {"commit": "x"}) == ["train split of a: '1' -> (absent)"]


def test_a_commit_with_changes_is_told_from_the_commit():
    commit = "0123456789abcdef"
    assert manifest.differences({"commit": commit}, {"commit": f"{commit}-dirty"}) == [
        "commit: '0123456789ab' -> '0123456789ab-dirty'"
    ]
