"""Directories that others have written: no link that leaves them is followed, and nobody else's file is changed."""

import ast
import gzip
import os
import shutil
import zipfile
from pathlib import Path

import numpy as np
import pytest

import xfresearch as xf
from tests.tiny_runs import ROOT, make_run, tiny_config, tiny_model
from xfresearch.data.corpus_files import read_documents
from xfresearch.data.tokenizers import ByteTokenizer, load_tokenizer
from xfresearch.runtime import arrays, compression, files
from xfresearch.runtime.errors import UserError
from xfresearch.train import main as train_main
from xfresearch.training.metrics import MetricsLog
from xfresearch.training.workdir import locked, write_config


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Path:
    """A run's directory."""
    return make_run(tmp_path_factory.mktemp("made") / "run", steps=(10,))


@pytest.fixture
def run(made, tmp_path) -> Path:
    return shutil.copytree(made, tmp_path / "run")


@pytest.fixture
def victim(tmp_path) -> Path:
    """A directory of somebody else, with what a run's directory has, and its content."""
    (tmp_path / "victim" / "7").mkdir(parents=True)
    for name in ("file", "7/file", "tokenizer.json", "bytes.json"):
        (tmp_path / "victim" / name).write_text('{"kind": "bytes"}')
    return tmp_path / "victim"


def content(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def refused(call, path) -> None:
    with pytest.raises(UserError, match=rf"^{path}(/\S+)?: a link that leaves the folder is not followed[^\n]*$"):
        call()


@pytest.mark.parametrize(
    "name", [".lock", "metrics.jsonl", "run.json", "config.json", "tokenizer", "checkpoints", "tensorboard", "damaged"]
)
def test_training_changes_nothing_behind_a_link_of_the_run(tmp_path, victim, name):
    before = content(victim)
    (tmp_path / "text.txt").write_text("a few words\n" * 400)
    (tmp_path / "run").mkdir()
    whole = name in ("tokenizer", "checkpoints", "tensorboard", "damaged")
    (tmp_path / "run" / name).symlink_to(victim if whole else victim / "file")
    if name == "damaged":
        (tmp_path / "run" / "run.json").write_text("[")
    flags = [f"--config.data.cache_dir={tmp_path}/cache", f"--config.data.corpus=('text_files:{tmp_path}/text.txt',)"]
    flags += ["--config.steps=1", "--config.optimizer.warmup=0", "--config.evaluation.sequences=1"]
    flags += ["--config.data.tokenizer=bytes"]
    refused(lambda: train_main([f"--config={ROOT}/configs/gpt2.py:tiny", f"--workdir={tmp_path}/run", *flags]), tmp_path)
    assert content(victim) == before


def test_checkpoints_behind_a_link_are_not_read(run, victim):
    for name, target in (("checkpoints/11", victim / "7"), ("checkpoints/10/params/_METADATA", victim / "file")):
        (run / name).unlink(missing_ok=True)
        (run / name).symlink_to(target)
        refused(lambda: xf.load(run), run)
        (run / name).unlink()


@pytest.mark.parametrize("name", ["huggingface.json", "huggingface/chat_template.jinja", "edits/0/report.html"])
def test_no_file_behind_a_link_is_copied(run, victim, tmp_path, name):
    lm = tiny_model()
    if name.startswith("edits"):
        (run / "edits" / "0").mkdir(parents=True)
        (run / "edits" / "0" / "record.json").write_text('{"method": "rome", "requests": []}')
        arrays.write_arrays(run / "edits" / "0" / "before.npz", {"a": np.zeros(2)})
    else:
        lm.export_hf(tmp_path / "exported")
        xf.load(tmp_path / "exported").save(tmp_path / "imported")
        run = tmp_path / "imported"
    (run / name).unlink(missing_ok=True)
    (run / name).symlink_to(victim / "file")
    refused(lambda: xf.load(run).save(tmp_path / "copy"), run)
    assert not (tmp_path / "copy").exists()


def test_a_directory_among_the_files_of_a_tokenizer_is_left(tmp_path):
    """Jupyter makes .ipynb_checkpoints where it lists files."""
    run = files.inside(tmp_path)
    write_config(run, tiny_config(), ByteTokenizer())
    (tmp_path / "tokenizer" / ".ipynb_checkpoints").mkdir()
    (tmp_path / "tokenizer" / "notes.txt").write_text("mine")
    (tmp_path / "tokenizer" / "tokenizer.json").write_text("of another tokenizer")
    write_config(run, tiny_config(), ByteTokenizer())
    left = sorted(path.name for path in (tmp_path / "tokenizer").iterdir())
    assert left == [".ipynb_checkpoints", "bytes.json", "notes.txt"]
    write_config(run, tiny_config(), None)
    assert sorted(path.name for path in (tmp_path / "tokenizer").iterdir()) == [".ipynb_checkpoints", "notes.txt"]


def test_the_directory_itself_may_be_a_link_and_one_that_leads_nowhere_says_so(run, tmp_path):
    (tmp_path / "link").symlink_to(run)
    with locked(tmp_path / "link"):
        MetricsLog(tmp_path / "link", -1).close()
    assert xf.load(tmp_path / "link").step == 10
    (tmp_path / "gone").symlink_to(tmp_path / "nothing")
    for call in (lambda: locked(tmp_path / "gone").__enter__(), lambda: xf.load(tmp_path / "gone")):
        with pytest.raises(UserError, match=rf"gone is a link to {tmp_path}/nothing, which does not exist$"):
            call()
    with pytest.raises(UserError, match="gone is a link to"):
        xf.load(run).save(tmp_path / "gone")


def test_a_lock_keeps_its_file(tmp_path):
    """It may be a hard link to a file of somebody else."""
    (tmp_path / "file").write_text("kept")
    os.link(tmp_path / "file", tmp_path / ".lock")
    with locked(tmp_path):
        assert (tmp_path / "file").read_text() == "kept"


def test_a_link_that_stays_inside_and_those_of_the_hubs_cache_are_followed(tmp_path):
    snapshot = tmp_path / "models--a--b" / "snapshots" / "c0ffee"
    (tmp_path / "models--a--b" / "blobs").mkdir(parents=True)
    snapshot.mkdir(parents=True)
    (tmp_path / "models--a--b" / "blobs" / "1").write_text("{}")
    (snapshot / "config.json").symlink_to("../../blobs/1")
    (snapshot / "same.json").symlink_to("config.json")
    assert files.read_object(files.inside(snapshot, "config.json")) == files.read_object(files.inside(snapshot, "same.json"))
    (snapshot / "other.json").symlink_to("../../refs")
    refused(lambda: files.inside(snapshot, "other.json"), snapshot)
    refused(lambda: files.inside(snapshot, "..", "c0ffee2"), snapshot)
    for plain in (tmp_path / "plain" / "snapshots" / "c0ffee", tmp_path / "models--c" / "other" / "c0ffee"):
        plain.mkdir(parents=True)
        (plain.parent.parent / "blobs").mkdir()
        (plain / "config.json").symlink_to("../../blobs/1")
        refused(lambda plain=plain: files.inside(plain, "config.json"), plain)
    assert str(files.inside("gs://bucket/run", "a", "b")) == "gs://bucket/run/a/b"


def test_a_pipe_below_a_directory_that_a_library_reads_is_refused(tmp_path):
    (tmp_path / "params" / "d").mkdir(parents=True)
    (tmp_path / "params" / "d" / "0").write_text("")
    files.check_tree(tmp_path, "params")
    os.mkfifo(tmp_path / "params" / "d" / "1")
    with pytest.raises(UserError, match="params/d/1: it must be a regular file$"):
        files.check_tree(tmp_path, "params")


def test_only_regular_files_up_to_a_limit_are_read(tmp_path):
    os.mkfifo(tmp_path / "config.json")
    with pytest.raises(UserError, match="config.json: it must be a regular file$"):
        files.read_object(tmp_path / "config.json")
    with (tmp_path / "large.json").open("wb") as file:
        file.truncate(files.MOST + 1)
    with pytest.raises(UserError, match=f"the file has {files.MOST + 1:,} bytes: it must have at most {files.MOST:,}$"):
        files.read_object(tmp_path / "large.json")
    (tmp_path / "tokenizer.model").mkdir()
    with pytest.raises(UserError, match="it must be 'bytes', 'bpe', or the path of an existing tokenizer"):
        load_tokenizer(tmp_path)


def test_a_small_compressed_file_cannot_fill_the_memory(tmp_path, monkeypatch):
    monkeypatch.setattr(compression, "FREE", 1 << 20)
    (tmp_path / "a.txt.gz").write_bytes(gzip.compress(b"word " * (1 << 20)))
    with pytest.raises(UserError, match=r"a.txt.gz: it decompresses to more than 200 times its size \([\d,]+ bytes\)"):
        list(read_documents(tmp_path / "a.txt.gz", "text"))


def test_arrays_that_are_compressed_or_larger_than_their_file_are_refused(tmp_path):
    file = tmp_path / "a.npz"
    arrays.write_arrays(file, {"a": np.arange(3.0)})
    assert arrays.read_arrays(file)["a"].tolist() == [0, 1, 2]
    np.savez_compressed(file, a=np.zeros(1 << 20))
    with pytest.raises(UserError, match="its arrays are larger than the file, so it is compressed"):
        arrays.read_arrays(file)
    with zipfile.ZipFile(file, "w") as archive, archive.open("a.npy", "w") as entry:
        header = {"descr": "<f8", "fortran_order": False, "shape": (10**12,)}
        np.lib.format.write_array_header_1_0(entry, header)
    with pytest.raises(UserError, match=r"a.npz cannot be read: an array of float64\[1000000000000\] in 128 bytes$"):
        arrays.read_arrays(file)


# Calls that reach files, of Python and of libraries that take a name, and the places that may have them, each with its
# reason: no file of a run, a study, a model or a corpus is read there but one that runtime/opening.py opened.
CALLS = {"read_text", "read_bytes", "write_text", "write_bytes", "unlink", "rmtree", "rmdir", "iterdir", "glob", "rglob"}
CALLS |= {"mkdir", "touch", "rename", "symlink_to", "hardlink_to", "walk", "open", "listdir", "scandir", "truncate"}
CALLS |= {"remove", "removedirs", "makedirs", "copyfile", "copytree", "move", "memmap", "fromfile", "load"}
ANY = "*"  # a place whose functions get the names of files that open_to_read opened
LIBRARIES = {"safe_open", "ParquetFile", "ORCFile", "OSFile", "memory_map", "ZipFile", "from_file", "loadtxt", "genfromtxt"}
LIBRARIES |= {"ArrayRecordReader", "ArrayRecordWriter", "builder", "builder_from_directory", "Checkpointer", "load_dataset"}
LIBRARIES |= {"mmap", "TaskManager", "DEFINE_config_file", "spec_from_file_location", "load_file", "read_table", "read_csv"}
MODULES = ("os", "shutil", "np", "numpy", "tempfile", "io", "mmap")
OPENED = "a file that open_to_read opened"
CACHE = "an entry of the cache that it builds"
ALLOWED = {
    "__main__.py": ("the package's own files", "read_text"),
    "benchmarks/": (
        "directories that it makes itself",
        "from_file load load_file mkdir open read_bytes read_text rglob write_text",
    ),
    "checkpoints/store.py": ("a directory after files.check_tree", "Checkpointer"),
    "checkpoints/writing.py": ("a checkpoint that it has just written", "iterdir listdir walk"),
    "options/shipped.py": ("the package's own files, and the docstring of a config that the user named", "glob read_text"),
    "data/column_formats.py": (OPENED, ANY),
    "data/corpora.py": ("a TFDS folder that the user named", "builder"),
    "data/corpus_files.py": ("names in a corpus that the user named", "glob iterdir"),
    "data/download.py": ("a download whose checksum is known", "ZipFile open"),
    "data/facts.py": ("the package's own words", "read_text"),
    "data/row_file.py": (CACHE, "ArrayRecordReader ArrayRecordWriter"),
    "data/text_sources.py": ("Python's standard library", "open read_bytes walk"),
    "data/token_formats.py": (OPENED, "memmap"),
    "data/tokenizers/hugging_face.py": (OPENED, "from_file"),
    "harness/tasks.py": ("the package's own tasks", "TaskManager glob read_text"),
    "interop/llama2c.py": (OPENED, "memmap"),
    "interop/tensor_files.py": (f"{OPENED}; a file that it makes itself", "open safe_open"),
    "planning/": ("files of the repository", "read_text"),
    "run_config/config_files.py": ("a config that the user named, a program", "read_text"),
    "run_config/known_keys.py": ("the package's own file, and an entry of the cache that it writes", "mkdir read_text"),
    "runtime/arrays.py": ("bytes that the gate read", "ZipFile"),
    "runtime/compression.py": (OPENED, "open"),
    "runtime/confined_child.py": ("/proc", "open"),
    "runtime/crash_log.py": ("a program without imports, which follows no link", "iterdir mkdir write_text"),
    "runtime/errors.py": ("whether a directory is empty", "iterdir"),
    "runtime/files.py": (
        "the gate",
        "glob iterdir mkdir move open read_bytes rename rmdir rmtree truncate unlink walk write_bytes write_text",
    ),
    "runtime/hardware.py": ("/proc and /sys", "glob read_text"),
    "runtime/host_memory.py": ("/proc and /sys", "read_text"),
    "runtime/identity.py": ("the package's own files, and programs that the user named", "read_bytes read_text rglob"),
    "runtime/opening.py": ("the one way to open", "open"),
    "runtime/xla_flags.py": ("/dev and /sys, and the installed libtpu", "glob mmap open read_text"),
    "training/monitoring.py": ("a trace that it has just written", "mkdir read_bytes rglob rmtree write_bytes"),
    "training/session.py": ("/dev/null", "open"),
}


def raw_calls(text: str) -> set[str]:
    """The calls in a module's text that reach files and are not functions of the gate."""
    calls = set()
    for node in ast.walk(ast.parse(text)):
        if not isinstance(node, ast.Call):
            continue
        function = node.func
        if isinstance(function, ast.Name) and function.id in {"open", *LIBRARIES}:
            calls.add(function.id)
        if isinstance(function, ast.Attribute) and function.attr in CALLS | LIBRARIES:
            of = function.value.id if isinstance(function.value, ast.Name) else ""
            is_method = function.attr not in ("load", "remove", "walk", "move") and of not in ("files", "losses")
            if of in MODULES or is_method:
                calls.add(function.attr)
    return calls


def test_nothing_but_the_gate_reaches_files():
    """A place that needs no exception has none."""
    package = ROOT / "xfresearch"
    found: dict[str, set[str]] = {}
    for path in sorted(package.rglob("*.py")):
        name = str(path.relative_to(package))
        place = next((place for place in ALLOWED if name.startswith(place)), name)
        found[place] = found.get(place, set()) | raw_calls(path.read_text())
    assert {place: calls for place, calls in found.items() if calls} == {
        place: found[place] if calls == ANY else set(calls.split()) for place, (_, calls) in ALLOWED.items()
    }


@pytest.mark.parametrize("call", ["open('a')", "path.read_text()", "(a / 'b').unlink()", "shutil.move(a, b)", "np.load(a)"])
def test_calls_that_reach_files_are_seen(call):
    assert raw_calls(call) and not raw_calls("files.read_bytes(files.inside(a, 'b')); names.remove('x')")


def test_what_is_read_was_checked_for_links():
    """A path below a directory is made by `inside`: the readers of the gate are not given one that is made with `/`."""
    readers = {"read_bytes", "read_object", "read_json", "open_to_read", "open_lock", "load_tokenizer"}
    wrong = []
    for path in sorted((ROOT / "xfresearch").rglob("*.py")):
        tree = ast.parse(path.read_text())
        joined = {
            target.id
            for node in ast.walk(tree)
            if isinstance(node, ast.Assign) and isinstance(node.value, ast.BinOp) and isinstance(node.value.op, ast.Div)
            for target in node.targets
            if isinstance(target, ast.Name)
        }
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in readers and node.args:
                first = node.args[0]
                by_div = isinstance(first, ast.BinOp | ast.JoinedStr)
                if by_div or isinstance(first, ast.Name) and first.id in joined:
                    wrong.append(f"{path.relative_to(ROOT)}:{node.lineno}")
    assert not wrong
