"""Runs that start from a trained model: its parameters, config and tokenizer, what may differ, lineage, resuming."""

import json
import shutil

import jax
import numpy as np
import pytest
from etils import epath

import xfresearch as xf
from tests.data import made_tokenizers as made
from tests.interop import test_llama2c as llama2c
from tests.simulated import results_on_devices
from tests.tiny_runs import ROOT, make_run, tiny_config, tiny_model
from tests.tolerances import TOLERANCE, relative_error
from tests.training.processes import Processes
from tests.training.test_manifest import curve, write_corpus
from xfresearch import plan
from xfresearch.checkpoints import store
from xfresearch.data.tokenizers import bpe, tokenizer_for
from xfresearch.run_config.config_files import read_json
from xfresearch.runtime.errors import UserError
from xfresearch.runtime.trees import by_path
from xfresearch.sharding.mesh import make_mesh
from xfresearch.train import main as train_main
from xfresearch.training import pretrained, session
from xfresearch.training.step import init_params
from xfresearch.training.workdir import lineage, write_lineage

FILE = f"--config={ROOT}/configs/llama.py:tiny"  # another model than the trained one, which is GPT-2's


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run's directory with checkpoints of steps 10 and 20."""
    return make_run(tmp_path_factory.mktemp("trained") / "a")


def loaded(path, *overrides: str):
    config = pretrained.parse([FILE, f"--config.start.path={path}", *overrides])
    return config, *pretrained.load(config, make_mesh(config))


def make_folder(place):
    tiny_model("llama").export_hf(place / "folder")
    return place / "folder"


def make_file(place):
    llama2c.write(place / "model.bin", *llama2c.random_model(tied=True), version=0)
    return place / "model.bin"


@pytest.mark.parametrize(
    "make, kind, step",
    [
        (lambda place: make_run(place / "run"), "run", 20),
        (lambda place: make_run(place / "run") / "checkpoints" / "10", "run", 10),
        (make_folder, "Hugging Face folder", None),
        (make_file, "llama2.c file", None),
    ],
    ids=["run", "step", "folder", "file"],
)
def test_the_model_the_tokenizer_and_the_parameters_are_those_of_the_path(tmp_path, make, kind, step):
    path = make(tmp_path)
    config, params, origin = loaded(path)
    lm = xf.load(path)
    assert config.model == lm.config and tokenizer_for(config.data).digest == lm.tokenizer.digest
    jax.tree.map(np.testing.assert_array_equal, params, lm.params)
    assert [(each["path"], each["kind"], each["step"]) for each in origin.lineage] == [(str(path), kind, step)]


@pytest.mark.parametrize(
    "override, changed",
    [
        ("dropout=0.1", lambda model: model.dropout == 0.1),
        ("dtype=bfloat16", lambda model: model.dtype == "bfloat16"),
        ("blocks.main.attention.dropout=0.2", lambda model: model.blocks["main"].attention.dropout == 0.2),
    ],
)
def test_options_of_training_and_execution_may_differ(trained, override, changed):
    assert changed(pretrained.parse([FILE, f"--config.start.path={trained}", f"--config.model.{override}"]).model)


@pytest.mark.parametrize(
    "override, allowed, reason",
    [
        ("width=64", "32", "trained for the function"),
        ("blocks.main.attention.kind=lambda", "'softmax'", "trained for the function"),
        ("blocks.main.attention.window=7", "0", "trained for the function"),
        ("vocab_size=256", "at least 257", "only rows can be added"),
        ("max_length=63", "at least 64", "only rows can be added"),
        ("embedding_std=0.5", "0.0", "not drawn again"),
        ("param_dtype=float64", "'float32'", "keep their dtype"),
    ],
)
def test_other_options_of_the_model_are_refused_with_both_values_and_the_reason(trained, override, allowed, reason):
    key, value = override.split("=")
    words = f"config.model.{key}='?{value}'? is not allowed: it must be {allowed} to start from {trained}: .*{reason}"
    with pytest.raises(UserError, match=words):
        starts = f"--config.start.path={trained}"
        pretrained.parse([FILE, "--config.sequence_length=32", starts, f"--config.model.{override}"])


def test_added_rows_are_drawn_as_for_new_parameters_and_listed(tmp_path, capsys):
    """In every table that can get rows. The function of old tokens stays."""
    attention = {"model__blocks__main__attention__position": "relative_key"}
    lm = tiny_model(model__tie_embeddings=False, model__head_bias=True, **attention)
    lm.save(tmp_path / "a")
    more = ("--config.model.vocab_size=300", "--config.model.max_length=80", "--config.seed=3")
    config, params, _ = loaded(tmp_path / "a", *more)
    listed = capsys.readouterr().err
    old, result, new = map(by_path, (lm.params, params, init_params(config, 3)))
    grown = {name: (len(old[name]), len(leaf)) for name, leaf in result.items() if leaf.shape != old[name].shape}
    tokens, positions = (257, 300), (64, 80)
    expected = (tokens, tokens, tokens, positions, positions)
    assert grown == dict(zip(pretrained.TABLES, expected, strict=True))
    for name, (rows, total) in grown.items():
        np.testing.assert_array_equal(result[name], np.concatenate([old[name], new[name][rows:]]))
        assert f"{name}: rows {rows} to {total - 1} are new, drawn with seed 3\n" in listed
    extended = xf.LanguageModel(config.model, params, lm.tokenizer, config)
    tokens_BL = np.arange(48).reshape(2, 24)
    assert relative_error(extended(tokens_BL)[..., :257], lm(tokens_BL)) < TOLERANCE["float32"]


def test_the_tokenizer_may_be_named_and_another_one_is_refused(trained, tmp_path):
    given = [FILE, f"--config.start.path={trained}"]
    assert pretrained.parse([*given, "--config.data.tokenizer=bytes"]).data.tokenizer == "bytes"
    made.write(tmp_path, {"tokenizer.json": made.byte_level()})
    with pytest.raises(UserError, match=f"config.data.tokenizer='{tmp_path}' .* left out to start from {trained}"):
        pretrained.parse([*given, f"--config.data.tokenizer={tmp_path}"])


def test_a_bpe_is_refused_before_it_is_trained(trained, tmp_path, monkeypatch):
    monkeypatch.setattr(bpe, "train", lambda *_: pytest.fail("it was trained"))
    given = [FILE, f"--config.start.path={trained}", f"--config.data.cache_dir={tmp_path}", "--config.data.tokenizer=bpe"]
    with pytest.raises(UserError, match=f"config.data.tokenizer='bpe' .* left out to start from {trained}"):
        pretrained.parse(given)


def test_a_missing_checkpoint_is_refused_before_data_are_prepared(trained):
    with pytest.raises(UserError, match="has no checkpoint of step 77: it has steps 10, 20"):
        pretrained.parse([FILE, f"--config.start.path={trained}/checkpoints/77"])


def test_a_model_without_a_tokenizer_leaves_that_of_the_config(tmp_path):
    folder = make_folder(tmp_path)
    for file in folder.iterdir():
        if file.name not in ("config.json", "model.safetensors"):
            file.unlink()
    assert pretrained.parse([FILE, f"--config.start.path={folder}", "--config.data.tokenizer=bpe"]).data.tokenizer == "bpe"


def test_parameters_go_straight_onto_the_mesh(trained):
    """Four devices, with a vocabulary that two of them divide."""
    arguments = [FILE, f"--config.start.path={trained}", "--config.model.vocab_size=258"]
    result = results_on_devices(4, "-m", "tests.training.pretrained_worker", *arguments)
    assert result["equal"] and result["read"] < 0.35 and result["held"] < 0.3


@pytest.mark.long
def test_two_processes_start_as_one_does(trained, tmp_path):
    for count in (1, 2):
        with_flags = flags(tmp_path, trained, f"of-{count}", f"--config.mesh.fsdp={count}", "--config.model.vocab_size=258")
        Processes(count, "xfresearch.train", *with_flags).succeed()
    losses = [[loss for _, loss in curve(tmp_path / f"of-{count}")] for count in (1, 2)]
    np.testing.assert_allclose(*losses, rtol=TOLERANCE["float32"])
    assert lineage(epath.Path(tmp_path / "of-1")) == lineage(epath.Path(tmp_path / "of-2")) != []


def flags(tmp_path, path, workdir: str, *more: str) -> list[str]:
    write_corpus(tmp_path / "corpus", "one")
    overrides = {
        "data.corpus": f"('text_files:{tmp_path}/corpus',)",
        "data.cache_dir": tmp_path / "cache",
        "steps": 4,
        "optimizer.warmup": 0,
        "checkpoint.every": 2,
        "evaluation.every": 0,
        "log.tracker": "jsonl",
    }
    given = [f"--config.{key}={value}" for key, value in overrides.items()]
    return [FILE, f"--start={path}", f"--workdir={tmp_path / workdir}", *given, *more]


def test_a_run_trains_on_resumes_without_the_path_and_records_its_lineage(trained, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(session, "draw_samples", lambda *_: [])  # takes as long as all the rest
    path, run = shutil.copytree(trained, tmp_path / "a"), epath.Path(tmp_path / "b")
    first = {"path": "pythia", "kind": "Hugging Face folder", "step": None, "digest": "0123"}
    write_lineage(epath.Path(path), [first])
    more = ["--config.model.dropout=0.1", "--config.model.vocab_size=264", "--config.optimizer.trainable=('blocks/*',)"]
    given = flags(tmp_path, path / "checkpoints" / "10", "b", *more)
    train_main(given)
    records = lineage(run)
    assert [records[0][key] for key in ("path", "kind", "step")] == [f"{path}/checkpoints/10", "run", 10]
    assert records[1:] == [first] and records[0]["digest"] in (run / "report.html").read_text()
    saved, lm = read_json(run / "config.json"), xf.load(run)
    assert saved.start.path == f"{path}/checkpoints/10" and saved.model.dropout == 0.1
    old = xf.load(path, step=10).params
    np.testing.assert_array_equal(lm.params["embed"]["table"][:257], old["embed"]["table"])
    kernels = [each["blocks"]["main"]["attention"]["query"]["kernel"] for each in (lm.params, old)]
    assert 0 < np.abs(kernels[0] - kernels[1]).max() < 0.1
    uninterrupted = curve(run)
    shutil.rmtree(store.directory(run) / "4")
    shutil.rmtree(path)
    capsys.readouterr()
    train_main(given)
    assert curve(run) == uninterrupted and lineage(run) == records
    assert "starts from the parameters" not in capsys.readouterr().err
    with pytest.raises(UserError, match="config.start.path='' is not allowed with --fork"):
        train_main([each for each in given if "--start" not in each] + ["--fork", *more])


def test_a_plan_is_for_the_model_of_the_path(trained, tmp_path, capsys):
    plan.main([FILE, "--mesh=fsdp=1", f"--json={tmp_path}/plan.json", f"--config.start.path={trained}"])
    assert json.loads((tmp_path / "plan.json").read_text())["parameters"] == xf.costs(tiny_config().model).parameters
