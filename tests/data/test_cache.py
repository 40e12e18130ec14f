"""The cache with concurrent processes, with kill -9 during a build, damaged, and not writable."""

import errno
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from xfresearch.data import cache
from xfresearch.data.cache import build_once, cache_root
from xfresearch.data.pipeline import prepare
from xfresearch.options.run_options import DataConfig
from xfresearch.runtime.errors import UserError

ROOT = Path(__file__).parents[2]
CHILD = """
import json, sys
from xfresearch.options.run_options import DataConfig
from xfresearch.run_config.config import Config
from xfresearch.data.pipeline import prepare, stream_tokens
cache, corpus, tokenizer, slow = sys.argv[1:]
if slow == "slow":
    import time
    import xfresearch.data.{module} as module
    original = module.{name}
    def stalled(*args, **kwargs):
        result = original(*args, **kwargs)
        print("stalled", flush=True)
        time.sleep(600)
    module.{name} = stalled
data = DataConfig(corpus=(corpus,), tokenizer=tokenizer, bpe_vocab=300, cache_dir=cache)
config = Config(sequence_length=32, data=data)
split = prepare(config, "train")
print(json.dumps([split.meta, stream_tokens(config, "train")[0].tolist(), str(split.directory)]))
"""


def child(cache, corpus, stall: str = "", tokenizer="bpe") -> subprocess.Popen:
    """A process that prepares the corpus. With `stall` ('module.function') it hangs after that function."""
    module, _, name = (stall or "making.make").rpartition(".")
    source = CHILD.format(module=module, name=name)
    command = [sys.executable, "-c", source, str(cache), corpus, tokenizer, "slow" if stall else "fast"]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def result(process) -> list:
    out, error = process.communicate(timeout=120)
    assert process.returncode == 0, error
    return json.loads(out.splitlines()[-1])


STALLS = ("tokenizers.bpe.train", "prepared.sync")


@pytest.fixture(scope="module")
def corpus(tmp_path_factory) -> str:
    folder = tmp_path_factory.mktemp("texts")
    for number in range(400):
        (folder / f"{number}.txt").write_text(f"text number {number}, and more of it\n" * 5)
    return f"text_files:{folder}"


def leftovers(cache) -> list:
    return [path for path in Path(cache).rglob("*") if ".tmp" in path.name or path.parent.name == "writers"]


@pytest.fixture(scope="module")
def at_once(tmp_path_factory, corpus):
    """The cache of three processes that prepared one corpus at once, and their results."""
    cache = tmp_path_factory.mktemp("cache")
    return cache, [result(process) for process in [child(cache, corpus) for _ in range(3)]]


def test_processes_that_prepare_at_once_agree(at_once):
    cache, (first, *others) = at_once
    assert all(other == first for other in others) and not leftovers(cache)
    assert [len(list((cache / kind).glob("[!.]*"))) for kind in ("shards", "tokenizers")] == [1, 1]


@pytest.mark.parametrize(
    "stall",
    ["making.make", *(pytest.param(each, marks=pytest.mark.long) for each in STALLS)],
)
def test_killed_preparation_leaves_no_partial_entry(tmp_path, corpus, at_once, stall):
    killed = child(tmp_path / "cache", corpus, stall)
    assert killed.stdout.readline() == "stalled\n", killed.stderr.read()
    killed.send_signal(signal.SIGKILL)
    killed.communicate()
    assert leftovers(tmp_path)
    _, (fresh, *_) = at_once
    assert result(child(tmp_path / "cache", corpus))[:2] == fresh[:2] and not leftovers(tmp_path)


def test_waiting_process_takes_over_from_a_killed_one(tmp_path, corpus):
    killed = child(tmp_path / "cache", corpus, "making.make")
    assert killed.stdout.readline() == "stalled\n"
    waiting = child(tmp_path / "cache", corpus)
    deadline = time.monotonic() + 60
    while len(list(tmp_path.rglob("writers/*.json"))) < 2 and time.monotonic() < deadline:
        time.sleep(0.1)
    time.sleep(1)
    assert waiting.poll() is None and len(list(tmp_path.rglob("*.tmp"))) == 1  # it does not make the shard, too
    killed.kill()
    killed.communicate()
    assert result(waiting)[0]["n_documents"] > 300 and not leftovers(tmp_path)


def test_every_file_of_a_shard_is_checked_by_its_content(make_config, corpus):
    """Zeros of the right size, with the right time, a file that was cut, and a missing one: the tokens and the manifest."""
    config = make_config(corpus=corpus)
    packed = prepare(config, "train")
    files = {path.name: path.read_bytes() for path in packed.directory.iterdir() if path.is_file()}
    assert {name.rpartition(".")[2] for name in files} == {"json", "array_record"}
    for name, whole in files.items():
        path = packed.directory / name
        for content in (bytes(len(whole)), whole[:1000], None):
            times = os.stat(path).st_atime_ns, os.stat(path).st_mtime_ns
            path.unlink()
            if content:
                path.write_bytes(content)
                os.utime(path, ns=times)
            again = prepare(config, "train")
            assert again.digest == packed.digest and (again[3]["tokens"] == packed[3]["tokens"]).all()
            assert {each.name: each.read_bytes() for each in packed.directory.iterdir() if each.is_file()} == files


def test_the_lock_file_of_another_user_can_be_locked(tmp_path, monkeypatch):
    """In a shared cache it can be read, but not written."""
    opened = os.open

    def open_as_another_user(path, flags, *mode):
        if flags & os.O_CREAT and str(path).endswith(".lock"):
            opened(path, flags, *mode)
            raise PermissionError(errno.EACCES, "Permission denied")
        return opened(path, flags, *mode)

    monkeypatch.setattr(cache.os, "open", open_as_another_user)
    with cache.locked(tmp_path / "entry") as has_lock:
        assert has_lock


def test_every_change_of_an_input_makes_a_new_entry(make_config, corpus):
    configs = [
        make_config(corpus=corpus),
        make_config(corpus=corpus, packing="documents"),
        make_config(corpus=corpus, packing="documents", sequence_length=17),
        make_config(corpus=corpus, tokenizer="bpe", bpe_vocab=300),
        make_config(corpus=corpus, tokenizer="bpe", bpe_vocab=301),
    ]
    directories = {prepare(config, split).directory for config in configs for split in ("train", "test")}
    assert len(directories) == 5  # all splits are in one
    # The number of workers does not change the tokens, and the length of rows does not change a stream.
    assert prepare(make_config(corpus=corpus, workers=1, sequence_length=17), "train").directory in directories


def test_warm_cache_needs_neither_grain_nor_tfds(at_once, corpus):
    source = CHILD.format(module="making", name="make") + (
        "\nheavy = ['grain', 'tensorflow_datasets', 'tensorflow']"
        "\nprint(json.dumps([name for name in heavy if name in sys.modules]))"
    )
    command = [sys.executable, "-c", source, str(at_once[0]), corpus, "bpe", "fast"]
    out = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert json.loads(out.splitlines()[-1]) == []


def test_failed_build_leaves_nothing(tmp_path):
    def build(directory):
        (directory / "half").write_text("x")
        raise RuntimeError("disk full")

    with pytest.raises(RuntimeError, match="disk full"):
        build_once(tmp_path / "entry", build)
    assert [path.name for path in tmp_path.iterdir()] == [".entry.lock"]


def test_without_locks_the_first_result_stays(tmp_path, monkeypatch):
    """On a file system without locks two processes build at once; both end with one complete entry."""
    monkeypatch.setattr(cache, "_lock", lambda lock: False)

    def build(directory):
        (directory / "x").write_text("mine")
        if not (tmp_path / "entry").exists():
            cache.build_once(tmp_path / "entry", lambda other: (other / "x").write_text("other"))

    cache.build_once(tmp_path / "entry", build)
    assert (tmp_path / "entry" / "x").read_text() == "other" and not leftovers(tmp_path)


def test_cache_directory_that_is_a_file(tmp_path, make_config, corpus):
    (tmp_path / "file").write_text("")
    with pytest.raises(
        UserError, match=r"^cannot make the cache directory .*/file/tokenizers: .*; set config.data.cache_dir$"
    ):
        prepare(make_config(corpus=corpus, tokenizer="bpe", cache_dir=str(tmp_path / "file")), "train")


def test_a_cache_in_a_bucket_is_refused(monkeypatch):
    with pytest.raises(UserError, match="config.data.cache_dir=gs://b/cache is not allowed: it must be a directory of this"):
        cache_root(DataConfig(cache_dir="gs://b/cache"))
    monkeypatch.setenv("XFRESEARCH_CACHE", "gs://b/cache")
    with pytest.raises(UserError, match="XFRESEARCH_CACHE=gs://b/cache is not allowed"):
        cache_root(DataConfig())


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_cache_directory_that_cannot_be_written(tmp_path, make_config, corpus):
    (tmp_path / "closed").mkdir(mode=0o500)
    with pytest.raises(UserError, match=r"^cannot make the cache directory .*closed.*; set config.data.cache_dir$"):
        prepare(make_config(corpus=corpus, cache_dir=str(tmp_path / "closed" / "cache")), "train")


def test_compilation_cache_directory_is_the_cache_or_the_environment_variable(tmp_path, monkeypatch):
    import jax

    monkeypatch.delenv("JAX_COMPILATION_CACHE_DIR", raising=False)
    cache.enable_compilation_cache(DataConfig(cache_dir=str(tmp_path)))
    assert jax.config.jax_compilation_cache_dir == str(tmp_path / "compiled")
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", "gs://b/programs")  # JAX reads this variable at import
    cache.enable_compilation_cache(DataConfig(cache_dir="elsewhere"))
    assert jax.config.jax_compilation_cache_dir == str(tmp_path / "compiled")
