"""Malformed JSON of ours is one line with file, key and what is allowed; counts are limited before anything is listed."""

import json
import shutil
import time

import pytest

import xfresearch as xf
from tests.interop.edits import edit_config
from tests.tiny_runs import make_run, tiny_model
from xfresearch.checkpoints import store
from xfresearch.interop import source
from xfresearch.loading import edits
from xfresearch.run_config.config_files import parse, read_json
from xfresearch.runtime.errors import UserError
from xfresearch.runtime.files import inside
from xfresearch.runtime.schema import ANY, Maybe, Of, check, is_number
from xfresearch.studies.measurement import read_runs
from xfresearch.training.metrics import MetricsLog, read_metrics
from xfresearch.training.workdir import lineage, starts

START = {"seconds": 1.0, "gap": 0.0, "finished_before": False, "machine": {}, "versions": {}, "commit": "c"}
LARGE = 10**400  # more than a float holds
FAST = 5.0  # seconds; each of these took more than ten, or never ended


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    return make_run(tmp_path_factory.mktemp("made") / "run", steps=(10,))


@pytest.mark.parametrize(
    "value, schema, message",
    [
        ([1], dict, "f: a list is not allowed: it must be an object"),
        ({"a": [1, "b"]}, {"a": [float]}, r"f: a\[1\]='b' is not allowed: it must be a number"),
        ({"a": {"b": True}}, {"a": {ANY: int}}, "f: a.b=True is not allowed: it must be an integer"),
        ({"a": {}}, {"a": {"b": str}}, "f: a.b is missing"),
        ({"a": LARGE}, {"a": float}, r"f: a=10{59}\.\.\. is not allowed: it must be a number"),
        ({"a": "c" * 10**6}, {"a": Maybe(bool)}, r"f: a='c{59}\.\.\. is not allowed: it must be true or false"),
        ({"a": -1}, {"a": Of(lambda v: v > 0, "above 0")}, "f: a=-1 is not allowed: it must be above 0"),
    ],
)
def test_what_a_file_must_hold(value, schema, message):
    with pytest.raises(UserError, match=f"^{message}$"):
        check(value, schema, "f")


def test_what_is_allowed_is_returned():
    schema = {"a": Maybe(float), "b": [{ANY: int}], "c": Maybe(str)}
    for value in ({"a": None, "b": []}, {"a": 1, "b": [{"x": 2}], "c": "d", "other": []}):
        assert check(value, schema, "f") is value
    assert is_number(2**1000) and not is_number(LARGE) and not is_number(True)


def changed(made, tmp_path, name: str, path: str, value):
    """A copy of the run with another value in one of its JSON files; path: dotted keys."""
    folder = shutil.copytree(made, tmp_path / "run")
    content = json.loads((folder / name).read_text())
    *groups, last = path.split(".")
    here = content
    for group in groups:
        here = here[group]
    here[last] = value
    (folder / name).write_text(json.dumps(content))
    return folder


@pytest.mark.parametrize(
    "path, value, message",
    [
        ("model.blocks.main.attention.kind", [], r"config.model.blocks.main.attention.kind=\[\] is not allowed"),
        ("model.blocks.main.attention.kind", {"a": 1}, r"config.model.blocks.main.attention.kind=.* is not allowed"),
        ("optimizer.learning_rate", LARGE, r"config.optimizer.learning_rate=10+\.\.\. has the wrong type int"),
        ("steps", LARGE, r"config.steps=10+\.\.\. is not allowed: it must be below 2\^31"),
        ("model.pattern", ["main"] * 300_000, "config.model.depth=2 is not allowed: it must be a multiple of the 300000"),
        ("model.pattern", [f"b{i}" for i in range(10**5)], "config.model.depth=2 is not allowed: it must be a multiple of"),
    ],
    ids=range(6),
)
def test_a_wrong_value_in_a_runs_config_is_one_line(made, tmp_path, path, value, message):
    folder = changed(made, tmp_path, "config.json", path, value)
    began = time.perf_counter()
    with pytest.raises(UserError, match=f"^{folder}/config.json: {message}") as raised:
        read_json(folder / "config.json")
    assert time.perf_counter() - began < FAST and len(str(raised.value)) < 2000 and "\n" not in str(raised.value)


def test_layers_without_a_common_pattern_are_read_in_time(made, tmp_path):
    folder = changed(made, tmp_path, "config.json", "model.pattern", ["main"] * 10**4)
    content = json.loads((folder / "config.json").read_text())
    content["model"]["depth"] = 10**4
    (folder / "config.json").write_text(json.dumps(content))
    began = time.perf_counter()
    assert read_json(folder / "config.json").model.depth == 10**4
    assert time.perf_counter() - began < FAST


@pytest.mark.parametrize("count", [10**5, 10**9])
def test_experts_are_compared_with_the_files_before_they_are_listed(tmp_path, count):
    tiny_model("mixtral_8x7b").export_hf(tmp_path / "m")
    edit_config(tmp_path / "m", num_local_experts=count)
    began = time.perf_counter()
    with pytest.raises(UserError, match=f"num_local_experts={count} is more than the files have tensors, "):
        xf.load(tmp_path / "m")
    assert time.perf_counter() - began < FAST


@pytest.mark.parametrize(
    "row", [{"loss": [1]}, {"loss": LARGE}, {"loss": "1"}, {"step": True}, {"router_load": [1]}, {"unix_seconds": {}}]
)
def test_a_wrong_value_in_metrics_is_named_and_a_resume_goes_on_without_it(tmp_path, capsys, row):
    good = json.dumps({"step": 1, "kind": "train", "loss": 2.0, "router_load": {"main": [[0.5, None]]}})
    (tmp_path / "metrics.jsonl").write_text(f"{good}\n{json.dumps({'step': 2, 'kind': 'train'} | row)}\n")
    with pytest.raises(UserError, match="metrics.jsonl:2: "):
        read_metrics(tmp_path / "metrics.jsonl")
    MetricsLog(tmp_path, 5).close()
    assert (tmp_path / "metrics.jsonl").read_text() == f"{good}\n" and "damaged/metrics.jsonl-0" in capsys.readouterr().err


@pytest.mark.parametrize(
    "start, message",
    [
        ({key: value for key, value in START.items() if key != "machine"}, r"run.json: starts\[0\].machine is missing"),
        (START | {"seconds": -1}, r"run.json: starts\[0\].seconds=-1 is not allowed: it must be a time of at least 0"),
        (START | {"gap": LARGE}, r"run.json: starts\[0\].gap=10+\.\.\. is not allowed: it must be a number"),
        ([], r"run.json: starts\[0\]=\[\] is not allowed: it must be an object"),
    ],
)
def test_a_wrong_start_is_named(tmp_path, start, message):
    (tmp_path / "run.json").write_text(json.dumps({"starts": [start], "lineage": [{"path": 1}]}))
    with pytest.raises(UserError, match=message):
        starts(inside(tmp_path))
    assert lineage(inside(tmp_path)) == []


def test_directories_that_are_no_steps_are_left(made, tmp_path):
    folder = shutil.copytree(made, tmp_path / "run")
    for name in ("²", "٣", "007", "1" * 30, "-1", "1_0"):
        (folder / "checkpoints" / name).mkdir()
    assert store.steps(folder) == [10] and xf.load(folder).step == 10


def test_other_records_are_checked(made, tmp_path):
    folder = shutil.copytree(made, tmp_path / "run")
    (folder / "huggingface.json").write_text(json.dumps({"config": [], "dtype": "float32"}))
    with pytest.raises(UserError, match=r"huggingface.json: config=\[\] is not allowed: it must be an object"):
        source.load(folder)
    (folder / "edits" / "0").mkdir(parents=True)
    (folder / "edits" / "0" / "record.json").write_text(json.dumps({"method": "rome", "requests": 3}))
    with pytest.raises(UserError, match="record.json: requests=3 is not allowed: it must be a list"):
        edits.load(folder)
    (folder / "runs.json").write_text(json.dumps({"runs": {"a": {"fingerprint": 3}}}))
    with pytest.raises(UserError, match="runs.json: runs.a.fingerprint=3 is not allowed: it must be a string"):
        read_runs(folder)


def test_a_long_name_of_a_config_is_one_short_line():
    with pytest.raises(UserError, match=r"^--config=a{200}\.\.\.: there is no such file") as raised:
        parse(["--config", "a" * 5000])
    assert len(str(raised.value)) < 3000
