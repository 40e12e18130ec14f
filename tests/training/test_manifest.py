"""A run resumes only with the data, the tokenizer, the code and the settings that it started with."""

import json
import os
import shutil
import subprocess
import sys
from functools import cache

import jax
import pytest

from tests.tiny_runs import ROOT
from xfresearch.checkpoints import manifest, store
from xfresearch.runtime import hardware, identity
from xfresearch.runtime.errors import UserError
from xfresearch.train import main as train_main

STEPS = 4
CONFIG = """\
from xfresearch.configs import gpt2
import module_of_a_config


def get_config(arg):
    return gpt2.get_config(arg)
"""


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
        "log.tracker": "jsonl",
    }
    given = [f"--config.{key}={value}" for key, value in overrides.items()]
    return [f"--config={folder}/own.py:tiny", f"--workdir={folder / 'run'}", *given, *more]


def curve(workdir) -> list:
    rows = map(json.loads, (workdir / "metrics.jsonl").read_text().splitlines())
    return [(row["step"], row["loss"]) for row in rows if row["kind"] == "train"]


@pytest.fixture(scope="module", autouse=True)
def imported(tmp_path_factory):
    """A module that the config file imports."""
    path = tmp_path_factory.mktemp("modules") / "module_of_a_config.py"
    path.write_text("")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(path.parent)
        yield path
    sys.modules.pop(path.stem, None)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """trained(flags) trains a run once. Returns its folder, which has the corpus too, and a copy of the folder."""

    @cache
    def train_once(tokenizer: tuple[str, ...]):
        folder, copy = tmp_path_factory.mktemp("folder"), tmp_path_factory.mktemp("copy")
        write_corpus(folder / "corpus", "one")
        (folder / "own.py").write_text(CONFIG)
        train_main(flags(folder, *tokenizer))
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
        train_main(flags(folder, *tokenizer, *more, cache=cache))
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
    with pytest.raises(UserError, match="step 2 was computed with other data, code or settings .train split of text_files:"):
        interrupted()
    assert contents(folder / "run") == before
    resumed, uninterrupted = interrupted("--fork")
    assert resumed[:2] == uninterrupted[:2] and resumed[2:] != uninterrupted[2:]


@pytest.mark.parametrize("tokenizer", [("--config.data.tokenizer=bpe", "--config.data.bpe_vocab=300")], ids=["bpe"])
def test_a_new_file_in_the_corpus_does_not_replace_the_runs_tokenizer(interrupted, folder):
    before = contents(folder / "run")
    (folder / "corpus" / "new.txt").write_text("entirely different words " * 400)
    with pytest.raises(UserError, match="other data, code or settings"):
        interrupted()
    assert contents(folder / "run") == before
    (folder / "corpus" / "new.txt").unlink()
    resumed, uninterrupted = interrupted(cache="another")
    assert resumed == uninterrupted


def test_other_versions_are_refused_by_name(interrupted, monkeypatch):
    result = hardware.versions()
    monkeypatch.setattr(hardware, "versions", lambda: result | {"jax": "0.99"})
    monkeypatch.setattr(hardware, "git_commit", lambda: "c0ffee")
    with pytest.raises(UserError, match=r"commit: .* -> 'c0ffee'; version of jax: '.*' -> '0.99'"):
        interrupted()
    resumed, uninterrupted = interrupted("--fork")
    assert resumed == uninterrupted


def test_other_settings_are_refused_by_name(interrupted, folder, monkeypatch):
    """Of JAX, as a JAX_* variable sets them, and of XLA; with --fork they count."""
    before = contents(folder / "run")
    changed = {"jax_default_prng_impl": "rbg", "jax_threefry_partitionable": False}
    changed |= {"jax_default_matmul_precision": "float32"}
    old = {name: getattr(jax.config, name) for name in changed}
    monkeypatch.setenv("XLA_FLAGS", f"{os.environ['XLA_FLAGS']} --xla_cpu_enable_fast_math=true --xla_dump_to=/tmp/xla")
    try:
        for name, value in changed.items():
            jax.config.update(name, value)
        with pytest.raises(UserError, match="step 2 was computed with other data, code or settings") as error:
            interrupted()
        for name, value in changed.items():
            assert f"setting of JAX {name}: {str(old[name])!r} -> {str(value)!r}" in str(error.value)
        flags = str(error.value).split("XLA_FLAGS: ")[1]
        assert flags.count("--xla_cpu_enable_fast_math=true") == 1 and "dump" not in flags and "--fork" in flags
        assert contents(folder / "run") == before
        jax.config.update("jax_default_prng_impl", old["jax_default_prng_impl"])
        resumed, uninterrupted = interrupted("--fork")
        assert resumed[:2] == uninterrupted[:2] and len(resumed) == len(uninterrupted)
    finally:
        for name, value in old.items():
            jax.config.update(name, value)


def test_other_source_and_config_files_are_refused_by_name(interrupted, folder, imported, tmp_path, monkeypatch):
    package = shutil.copytree(identity.PACKAGE, tmp_path / "xfresearch", ignore=shutil.ignore_patterns("__pycache__"))
    monkeypatch.setattr(identity, "PACKAGE", package)
    edited = package / "training" / "step.py"
    edited.write_text(f"{edited.read_text()}# edited\n")
    imported.write_text("# edited\n")
    with pytest.raises(UserError) as error:
        interrupted()
    for name in ("source of xfresearch", "config file module_of_a_config"):
        assert f"{name}: '" in str(error.value)
    assert "config file own.py" not in str(error.value) and "config file xfresearch.configs.gpt2" not in str(error.value)


@pytest.mark.long
@pytest.mark.parametrize(
    ("refused", "variables", "edited"),
    [
        ("setting of JAX jax_default_prng_impl: 'threefry2x32' -> 'rbg'", {"JAX_DEFAULT_PRNG_IMPL": "rbg"}, ""),
        ("setting of JAX jax_threefry_partitionable: 'True' -> 'False'", {"JAX_THREEFRY_PARTITIONABLE": "0"}, ""),
        ("setting of JAX jax_default_matmul_precision: 'None' -> 'high", {"JAX_DEFAULT_MATMUL_PRECISION": "highest"}, ""),
        ("XLA_FLAGS: ", {"XLA_FLAGS": "--xla_cpu_enable_fast_math=true"}, ""),
        ("source of xfresearch: '", {}, "xfresearch/training/step.py"),
        ("config file xfresearch.configs.common: '", {}, "xfresearch/configs/common.py"),
        ("", {"JAX_LOG_COMPILES": "0"}, ""),
    ],
)
def test_in_a_copy_without_git_other_variables_and_edits_are_refused(
    interrupted, folder, imported, tmp_path, monkeypatch, refused, variables, edited
):
    """Real processes, as a user starts them. The commit is written into the copy, as launch/pack.sh does."""
    shutil.copytree(ROOT / "xfresearch", tmp_path / "xfresearch", ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / "COMMIT").write_text(hardware.git_commit())
    if edited:
        with open(tmp_path / edited, "a") as file:
            file.write("# edited\n")
    environment = os.environ | {"PYTHONPATH": str(imported.parent)} | variables
    command = [sys.executable, "-m", "xfresearch.train", *flags(folder)]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    if refused:
        assert done.returncode == 2 and refused in done.stderr and " --fork " in done.stderr
        done = subprocess.run([*command, "--fork"], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    assert store.steps(folder / "run")[-1] == STEPS


def test_a_run_of_an_earlier_version_says_what_is_not_recorded_and_other_devices_are_said(
    interrupted, folder, monkeypatch, capsys
):
    meta = folder / "run" / "checkpoints" / "2" / "meta" / "metadata"
    whole = json.loads(meta.read_text())
    del whole["digest"]
    recorded = whole["manifest"]
    kept = {name: text for name, text in recorded.items() if not manifest._kind(name) or name == "devices"}
    meta.write_text(json.dumps(store.with_digest(whole | {"manifest": kept})))
    monkeypatch.setattr(identity, "devices", lambda: "8 x TPU v5")
    resumed, uninterrupted = interrupted()
    assert resumed == uninterrupted
    lines = [line for line in capsys.readouterr().err.splitlines() if ": step 2 " in line]
    missing = "LIBTPU_INIT_ARGS, XLA_FLAGS, config file, setting of JAX, source of xfresearch"
    assert lines[1].endswith(f"step 2 does not record {missing}: nobody knows whether they have changed since")
    assert f"was saved on {recorded['devices']} and resumes on 8 x TPU v5: " in lines[0] and len(lines) == 2


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


def test_a_setting_that_is_added_by_a_module_of_jax_or_another_device_is_no_difference():
    old = {"setting of JAX a": "1", "devices": "1 x cpu"}
    assert manifest.differences(old, old | {"setting of JAX b": "1", "devices": "8 x cpu"}) == []
    assert manifest.differences(old, {"setting of JAX a": "2"}) == ["setting of JAX a: '1' -> '2'"]


def test_a_commit_with_changes_is_told_from_the_commit():
    commit = "0123456789abcdef"
    assert manifest.differences({"commit": commit}, {"commit": f"{commit}-dirty"}) == [
        "commit: '0123456789ab' -> '0123456789ab-dirty'"
    ]
