"""Paths in the config of somebody else's run are read only if the user names them; those of one's own run are read again."""

import json
import shutil
from pathlib import Path

import pytest
from etils import epath

import xfresearch as xf
from tests.special_files import at_most
from tests.tiny_runs import ROOT, make_run, tiny_config
from xfresearch import analyze, edit, evaluate
from xfresearch.compare import main as compare_main
from xfresearch.data.corpora import open_corpus
from xfresearch.data.given import NotGiven
from xfresearch.data.tokenizers import ByteTokenizer, tokenizer_for
from xfresearch.editing.requests import known_facts
from xfresearch.options.objectives import Seq2Seq
from xfresearch.options.run_options import DataConfig
from xfresearch.run_config.config_files import read_json
from xfresearch.runtime.errors import UserError
from xfresearch.training.pretrained import parse
from xfresearch.training.workdir import NEW, write_beginning

SECRET = "a private line of mine\n"


@pytest.fixture
def here(tmp_path, monkeypatch):
    """Goes to another user, who has another cache."""

    def user(name: str) -> None:
        monkeypatch.setenv("XFRESEARCH_CACHE", str(tmp_path / name))

    user("author")
    return user


@pytest.fixture
def foreign(tmp_path, here) -> Path:
    """A run of somebody else, whose config names a file of the user."""
    (tmp_path / "private.txt").write_text(SECRET * 400)
    run = make_run(tmp_path / "run", data__corpus=f"('text_files:{tmp_path}/private.txt',)", sequence_length=32)
    here("reader")
    return run


COMMANDS = {
    "evaluate": lambda run, *flags: evaluate.main([f"--workdir={run}", "--limit=2", *flags]),
    "evaluate --split": lambda run, *flags: evaluate.main([f"--workdir={run}", "--split=train", "--limit=2", *flags]),
    "analyze": lambda run, *flags: analyze.main(["attention", f"--workdir={run}", "--count=2", f"--to={run}/pages", *flags]),
    "compare": lambda run, *flags: compare_main([f"{run}", f"{run}/checkpoints/20", "--limit=2", *flags]),
}


@pytest.mark.parametrize("name", COMMANDS)
def test_no_command_reads_a_path_that_only_the_config_names(foreign, tmp_path, capsys, name):
    with pytest.raises(UserError) as raised:
        COMMANDS[name](foreign)
    corpus = f"text_files:{tmp_path}/private.txt"
    assert str(raised.value).endswith(f": --data={corpus} reads it") and "\n" not in str(raised.value)
    pages = [path.read_bytes() for path in foreign.rglob("*") if path.is_file()]
    assert not any(SECRET.strip().encode() in page for page in pages) and SECRET.strip() not in capsys.readouterr().out
    if name == "evaluate":
        COMMANDS[name](foreign, f"--data={corpus}")


def test_ones_own_run_needs_no_flag(tmp_path, here):
    """Also copied, moved, saved again, and where links were followed on the user's word."""
    for path in ("corpus/a.txt", "private/b.txt"):
        (tmp_path / path).parent.mkdir()
        (tmp_path / path).write_text(SECRET * 400)
    (tmp_path / "corpus" / "link.txt").symlink_to(tmp_path / "private" / "b.txt")
    config = tiny_config(data__corpus=f"('{tmp_path}/corpus',)", data__links="anywhere", sequence_length=32)
    here("trainer")
    run = make_run(tmp_path / "run", steps=(1,), sequence_length=32)
    here("author")
    write_beginning(epath.Path(run), config, ByteTokenizer(), NEW)  # as training does
    shutil.copytree(run, tmp_path / "copy")
    xf.load(run).save(tmp_path / "saved")
    run.rename(tmp_path / "moved")
    COMMANDS["evaluate"](tmp_path / "moved")
    assert not any(isinstance(data_of(tmp_path / name).corpus[0], NotGiven) for name in ("copy", "saved", "moved"))
    here("reader")
    assert all(isinstance(data_of(tmp_path / name).corpus[0], NotGiven) for name in ("copy", "saved", "moved"))
    with pytest.raises(UserError, match="link.txt: a link that leaves the folder"):
        COMMANDS["evaluate"](tmp_path / "copy", f"--data={tmp_path}/corpus")


def data_of(run: Path) -> DataConfig:
    return read_json(run / "config.json").data


def test_any_change_of_the_config_is_another_ones(foreign, here):
    here("author")
    assert not isinstance(read_json(foreign / "config.json").data.corpus[0], NotGiven)
    config = json.loads((foreign / "config.json").read_text())
    config["data"]["corpus"] = ["text_files:/etc/passwd"]
    (foreign / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match="'text_files:/etc/passwd' is named by the run's config.json"):
        COMMANDS["evaluate"](foreign)


def test_saving_the_model_of_somebody_else_gives_nothing(foreign, tmp_path):
    xf.load(foreign).save(tmp_path / "saved")
    with pytest.raises(UserError, match="reads it$"):
        COMMANDS["evaluate"](tmp_path / "saved")


@pytest.mark.parametrize("corpus", ["python_stdlib", "facts", "wikitext2", "c4/en:3.1.0", "sort", "sort:longest=8"])
def test_names_are_no_paths(tmp_path, corpus, monkeypatch):
    from xfresearch.data import corpora

    monkeypatch.setattr(corpora, "TfdsCorpus", lambda *_: None)
    kind = {"objective": Seq2Seq()} if corpus.startswith("sort") else {}
    open_corpus(NotGiven(corpus), DataConfig(cache_dir=str(tmp_path), **kind))


PATHS = ["/**", "notes", "./notes", "~", "text_files:a", "facts:a", "wikitext2:/a", "c4/en:/a", ""]


@pytest.mark.parametrize("corpus", PATHS)
def test_paths_are_refused_before_anything_is_looked_at(tmp_path, corpus, monkeypatch):
    """Not even whether they are there; but for a word that may be a name."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "notes").mkdir()
    for objective in ({}, {"objective": Seq2Seq()}):
        with at_most(5), pytest.raises(UserError, match="is named by the run's config.json"):
            open_corpus(NotGiven(corpus), DataConfig(cache_dir=str(tmp_path), **objective))


def test_other_names_of_a_config(foreign, tmp_path, here):
    """The tokenizer, the model that it started from, and facts."""
    (tmp_path / "tokenizer.json").write_text("{}")
    config = json.loads((foreign / "config.json").read_text())
    config["data"] |= {"tokenizer": f"{tmp_path}/tokenizer.json", "corpus": [f"facts:{tmp_path}/facts"]}
    config["start"]["path"] = "somewhere"
    (foreign / "config.json").write_text(json.dumps(config))
    shutil.rmtree(foreign / "tokenizer")
    refused = "tokenizer.json' is named by the run's config.json"
    with pytest.raises(UserError, match=refused):
        tokenizer_for(read_json(foreign / "config.json").data)
    flags = ["--config.start.path=somewhere", "--config.sequence_length=32"]
    resumed = parse([f"--config={ROOT}/configs/gpt2.py:tiny", *flags], str(foreign))
    with pytest.raises(UserError, match=refused):
        tokenizer_for(resumed.data)
    assert known_facts(xf.load(foreign)) is None
    with pytest.raises(UserError, match="its data are not a corpus of facts that you have given"):
        edit.main(["rome", f"--workdir={foreign}", "--draw=1", f"--to={tmp_path}/edited"])
    for name in ("recall", "trace"):
        with pytest.raises(UserError, match="facts' is named by the run's config.json"):
            analyze.main([name, f"--workdir={foreign}"])


def test_a_config_whose_record_cannot_be_kept_is_written(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    for cache in (f"{tmp_path}/file", "gs://bucket"):
        monkeypatch.setenv("XFRESEARCH_CACHE", cache)
        run = make_run(tmp_path / cache[-6:], steps=(1,))
        assert isinstance(read_json(run / "config.json").data.corpus[0], NotGiven)
        assert read_json(run / "config.json").data.corpus == tiny_config().data.corpus
