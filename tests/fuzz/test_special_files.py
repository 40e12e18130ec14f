"""Pipes, sockets, devices, directories and links that lead nowhere, in place of every file that a command reads."""

import itertools
import shutil
from pathlib import Path

import pytest

from tests import special_files
from tests.data import made_tokenizers as made
from tests.fuzz.targets import REFUSALS, TARGETS
from tests.tiny_runs import make_run, tiny_model
from xfresearch.data.corpora import documents
from xfresearch.data.facts import facts_of
from xfresearch.data.pairs.pair_files import PairFiles
from xfresearch.data.tokenizers import load_tokenizer
from xfresearch.generate import read_text
from xfresearch.harness.tasks import check_data, split_names
from xfresearch.loading.loading import load
from xfresearch.runtime.errors import UserError

# Their file is read by the test itself, or by the reference library, which waits for a pipe.
OF_TESTS = ("header of safetensors", "hostile templates", "overrides", "prompt", "safetensors", "tokenizer.model")


def outcome(read, path: Path, kind: str, refusals=REFUSALS) -> str:
    """The error of a reader with a special file at `path`; '' if it needs no such file."""
    kept = path.with_name("kept")
    path.rename(kept)
    special_files.make(kind, path)
    try:
        with special_files.at_most(20):
            read()
    except refusals as error:
        return str(error)
    finally:
        special_files.remove(path)
        kept.rename(path)
    return ""


@pytest.fixture(scope="module", params=[name for name in TARGETS if name not in OF_TESTS])
def target(request, tmp_path_factory):
    make, read, *_ = TARGETS[request.param]
    return make(tmp_path_factory.mktemp("target")), read


@pytest.mark.parametrize("kind", special_files.KINDS)
def test_every_target_of_the_fuzzers_refuses_them(target, kind):
    paths, read = target
    for path in paths[:: max(1, len(paths) // 3)]:
        message = outcome(lambda path=path: read(path), path, kind)
        assert "\n" not in message
        assert message or "checkpoints" in path.parts  # some of its files Orbax can do without: what is read is compared


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A model, a run and corpora."""
    top = tmp_path_factory.mktemp("folder")
    lm = tiny_model("gpt2")
    lm.export_hf(top / "model")
    (top / "tokenizer.json").write_text(made.byte_level())
    shutil.copytree(make_run(top / "run", "gpt2", steps=(1,)), top / "copy")
    for name, text in {"corpus/a.txt": "a\n", "pairs/a.jsonl": '{"a": "b", "c": "d"}\n', "tasks/piqa.jsonl": "{}\n"}.items():
        (top / name).parent.mkdir()
        (top / name).write_text(text)
    (top / "facts").mkdir()
    (top / "facts" / "a.json").write_text('{"name": "a", "prompt_templates": ["{} is"], "samples": []}')
    (path,) = TARGETS["tokenizer.model"][0](top)[:1]
    path.rename(top / "tokenizer.model")
    (top / "prompt").write_text("x")
    (top / "gpt2").mkdir()
    (top / "gpt2" / "vocab.json").write_text("{}")
    (top / "gpt2" / "merges.txt").write_text("#version: 0.2\n")
    return top


READERS = {
    "model/config.json": lambda top: load(top / "model"),
    "model/model.safetensors": lambda top: load(top / "model"),
    "model/bytes.json": lambda top: load(top / "model"),
    "tokenizer.json": lambda top: load_tokenizer(top / "tokenizer.json"),
    "run/config.json": lambda top: load(top / "run"),
    "run/tokenizer/bytes.json": lambda top: load(top / "run"),
    "run/checkpoints/1/meta/metadata": lambda top: load(top / "run", 1),
    "corpus/a.txt": lambda top: list(documents(f"text_files:{top}/corpus", "train", _data(top))),
    "pairs/a.jsonl": lambda top: list(PairFiles(f"{top}/pairs", "a", "c").pairs("train")),
    "facts/a.json": lambda top: facts_of(f"facts:{top}/facts"),
    "gpt2/vocab.json": lambda top: load_tokenizer(top / "gpt2"),
    "gpt2/merges.txt": lambda top: load_tokenizer(top / "gpt2"),
    "tokenizer.model": lambda top: load_tokenizer(top / "tokenizer.model"),
    "tasks/piqa.jsonl": lambda top: check_data(*split_names("piqa", f"{top}/tasks"), f"{top}/tasks"),
    "prompt": lambda top: read_text("--prompt-file", str(top / "prompt")),
}


def _data(top: Path):
    from xfresearch.options.run_options import DataConfig

    return DataConfig(cache_dir=str(top / "cache"))


@pytest.mark.parametrize("name, kind", [*itertools.product(READERS, special_files.KINDS)])
def test_every_reader_refuses_them(folder, name, kind):
    message = outcome(lambda: READERS[name](folder), folder / name, kind, UserError)
    assert "\n" not in message and Path(name).parts[0] in message
