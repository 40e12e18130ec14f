"""Links at each place where a path enters: those that leave the directory are refused by name, others are read."""

import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.data import made_tokenizers as made
from tests.interop import test_llama2c as llama2c
from tests.special_files import at_most
from tests.tiny_runs import tiny_model
from xfresearch.data.corpora import open_corpus
from xfresearch.data.download import Published
from xfresearch.data.facts import facts_of
from xfresearch.data.tokenizers import load_tokenizer
from xfresearch.harness.tasks import check_data, split_names
from xfresearch.loading.loading import load
from xfresearch.options.objectives import Seq2Seq
from xfresearch.options.run_options import DataConfig
from xfresearch.runtime.errors import UserError


class Place(NamedTuple):
    """A directory `folder` with a file `name` that is read."""

    name: str
    content: str | bytes  # of a model's config '': that of the model
    read: Callable[[Path], object]
    others: dict[str, str] = {}


def texts(folder: Path, pattern: str = "", **options) -> list[bytes]:
    corpus = open_corpus(f"text_files:{folder}{pattern}", DataConfig(cache_dir=f"{folder}-cache", **options))
    return [text for shard in corpus.shards for text in shard.documents()]


def pairs(folder: Path) -> list:
    data = DataConfig(cache_dir=f"{folder}-cache", objective=Seq2Seq(source_field="a", target_field="c"))
    return list(open_corpus(str(folder), data).pairs("train"))


def model_of_llama2c(folder: Path):
    """Loads a model whose tokenizer is beside it."""
    made_in = folder.parent / "made"
    made_in.mkdir()
    llama2c.write(made_in / "model.bin", *llama2c.random_model(tied=True), version=0)
    shutil.copy(made_in / "model.bin", folder)
    return load(folder / "model.bin")


OWN = Published("own", "https://example.org/own.zip", "own.txt", f"sha256:{hashlib.sha256(b'private').hexdigest()}")
FACTS = {"name": "a", "prompt_templates": ["{} is"], "samples": [{"subject": "b", "object": "c"}]}
ITEM = {"query": "a", "choices": ["b", "c"], "gold": 0}
GPT2 = {"vocab.json": json.dumps({character: i for i, character in enumerate("abc")} | {"ab": 3})}
PLACES = {
    "a directory of texts": Place("zz.txt", "private\n", texts, {"a.txt": "a\n"}),
    "a glob of texts": Place("zz.txt", "private\n", lambda folder: texts(folder, "/**"), {"a.txt": "a\n"}),
    "a directory of rows": Place("zz.json", '[{"text": "private"}]', texts, {"a.txt": "a\n"}),
    "a directory of pairs": Place("zz.jsonl", '{"a": "private", "c": "d"}\n', pairs, {"a.jsonl": '{"a": "b", "c": "d"}\n'}),
    "a directory of facts": Place("zz.json", json.dumps(FACTS), lambda folder: facts_of(f"facts:{folder}")),
    "merges.txt": Place("merges.txt", "#version: 0.2\na b\n", load_tokenizer, GPT2),
    "tokenizer.json": Place("tokenizer.json", made.byte_level(), load_tokenizer),
    "the data of a task": Place(
        "piqa.jsonl", json.dumps(ITEM), lambda folder: check_data(*split_names("piqa", str(folder)), str(folder))
    ),
    "a file of a model": Place("config.json", "", load),
    "manual_dir": Place("own.txt", "private", lambda folder: OWN.read(str(folder), folder)),
    "the tokenizer of llama2.c": Place("tok300.bin", llama2c.tokenizer(300), model_of_llama2c),
}
LEAVE = ("outside", "directory", "relative", "chain")
NOWHERE = ("loop", "dangling")
STAY = ("inside", "hard")


@pytest.fixture(params=PLACES)
def place(request, tmp_path) -> tuple[Place, Path]:
    chosen = PLACES[request.param]
    folder = tmp_path / "folder"
    if not chosen.content:
        tiny_model("gpt2").export_hf(folder)
        chosen = chosen._replace(content=(folder / chosen.name).read_text())
        (folder / chosen.name).unlink()
    for other in (tmp_path / "private", folder / ".kept"):
        other.mkdir(parents=True)
        content = chosen.content
        (other / chosen.name).write_bytes(content if isinstance(content, bytes) else content.encode())
    for name, content in chosen.others.items():
        (folder / name).write_text(content)
    return chosen, folder


def link(kind: str, path: Path) -> None:
    """Makes a link of a kind at `path`: folder/NAME, beside folder/.kept/NAME and private/NAME."""
    private, kept = path.parent.parent / "private" / path.name, path.parent / ".kept" / path.name
    if kind == "hard":
        os.link(private, path)
        return
    if kind == "chain":
        (path.parent / ".kept" / "between").symlink_to(private)
    targets = {"outside": private, "directory": private.parent, "relative": f"../private/{path.name}", "inside": kept}
    targets |= {"chain": ".kept/between", "loop": path.name, "dangling": "nothing"}
    path.symlink_to(targets[kind])


@pytest.mark.parametrize("kind", LEAVE)
def test_links_that_leave_are_refused_by_name(place, kind):
    chosen, folder = place
    link(kind, folder / chosen.name)
    with at_most(60), pytest.raises(UserError) as raised:
        chosen.read(folder)
    named = rf"{folder}/{chosen.name}(/\S+)?: a link that leaves the folder is not followed"
    assert re.search(named, str(raised.value)) and "\n" not in str(raised.value)


@pytest.mark.parametrize("kind", NOWHERE)
def test_links_that_lead_nowhere_are_refused_in_one_line(place, kind):
    chosen, folder = place
    link(kind, folder / chosen.name)
    with at_most(60), pytest.raises(UserError) as raised:
        chosen.read(folder)
    assert str(folder) in str(raised.value) and "\n" not in str(raised.value)


@pytest.mark.parametrize("kind", STAY)
def test_links_that_stay_are_read_and_a_hard_link_cannot_be_told(place, kind):
    chosen, folder = place
    link(kind, folder / chosen.name)
    chosen.read(folder)


def test_all_links_are_followed_on_the_users_word(tmp_path):
    for path, text in {"a/a.txt": "a", "b/b.txt": "b", "c/c.txt": "c"}.items():
        (tmp_path / path).parent.mkdir()
        (tmp_path / path).write_text(text)
    (tmp_path / "a" / "file.txt").symlink_to(tmp_path / "b" / "b.txt")
    (tmp_path / "a" / "folder").symlink_to(tmp_path / "c")
    (tmp_path / "c" / "back").symlink_to(tmp_path / "a")
    (tmp_path / "c" / "again").symlink_to(tmp_path / "c")
    with pytest.raises(UserError, match="remove it, or give --config.data.links=anywhere$"):
        texts(tmp_path / "a")
    assert sorted(texts(tmp_path / "a", links="anywhere")) == [b"a", b"b", b"c"]
    (tmp_path / "a" / "folder").unlink()
    with pytest.raises(UserError, match="file.txt: a link that leaves"):
        texts(tmp_path / "a")
    assert texts(tmp_path / "a" / "file.txt") == [b"b"]  # which the user named


@pytest.mark.parametrize("below", ["", "c0ffee", "c0ffee/data"])
def test_a_data_set_in_the_hubs_cache_is_read(tmp_path, below):
    top = tmp_path / "datasets--a--b"
    (top / "blobs").mkdir(parents=True)
    (top / "blobs" / "1").write_text("text")
    (top / "snapshots" / "c0ffee" / "data").mkdir(parents=True)
    (top / "snapshots" / "c0ffee" / "data" / "train.txt").symlink_to("../../../blobs/1")
    assert texts(top / "snapshots" / below) == [b"text"]
    (tmp_path / "private").write_text("private")
    (top / "snapshots" / "c0ffee" / "data" / "zz.txt").symlink_to("../../../../private")
    with pytest.raises(UserError, match="zz.txt: a link that leaves the folder"):
        texts(top / "snapshots" / below)
