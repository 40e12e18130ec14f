"""The cache with concurrent processes, with kill -9 during a build, damaged, and not writable."""

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from xfresearch.data import cache
from xfresearch.data.cache import build_once, cache_root, complete
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
    module, _, name = (stall or "packed._pack").rpartition(".")
    source = CHILD.format(module=module, name=name)
    command = [sys.executable, "-c", source, str(cache), corpus, tokenizer, "slow" if stall else "fast"]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def result(process) -> list:
    out, error = process.communicate(timeout=120)
    assert process.returncode == 0, error
    return json.loads(out.splitlines()[-1])


STALLS = ("builders.prepare", "tokenizers.bpe.train", "packed._tokenise")


@pytest.fixture(scope="module")
def corpus(tmp_path_factory) -> str:
    folder = tmp_path_factory.mktemp("texts")
    for number in range(400):
        (folder / f"{number}.txt").write_text(f"text number {number}, and more of it\n" * 5)
    return f"text_files:{folder}"


def leftovers(cache) -> list:
    return [path for path in Path(cache).rglob("*") if ".tmp-" in path.name or "incomplete" in path.name]


@pytest.fixture(scope="module")
def at_once(tmp_path_factory, corpus):
    """The cache of three processes that prepared one corpus at once, and their results."""
    cache = tmp_path_factory.mktemp("cache")
    return cache, [result(process) for process in [child(cache, corpus) for _ in range(3)]]


def test_processes_that_prepare_at_once_agree(at_once):
    cache, (first, *others) = at_once
    assert all(other == first for other in others) and not leftovers(cache)
    assert [len(list((cache / kind).glob("[!.]*"))) for kind in ("tfds", "tokenizers", "tokens", "packed")] == [1, 1, 1, 1]


@pytest.mark.parametrize(
    "stall",
    ["packed._pack", *(pytest.param(each, marks=pytest.mark.long) for each in STALLS)],
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
    killed = child(tmp_path / "cache", corpus, "packed._tokenise")
    assert killed.stdout.readline() == "stalled\n"
    waiting = child(tmp_path / "cache", corpus)
    time.sleep(1)
    assert waiting.poll() is None and len(leftovers(tmp_path)) == 2  # packed/ and, inside its build, tokens/
    killed.kill()
    killed.communicate()
    assert result(waiting)[0]["n_documents"] > 300 and not leftovers(tmp_path)


def test_damaged_cache_is_built_again(make_config, corpus):
    config = make_config(corpus=corpus)
    packed = prepare(config, "train")
    records = packed.directory / "sequences.array_record"
    before = packed[3]
    records.write_bytes(records.read_bytes()[:1000])
    assert not complete(packed.directory)
    again = prepare(config, "train")
    assert complete(again.directory) and (again[3]["tokens"] == before["tokens"]).all()


def test_every_file_of_the_cache_is_checked_by_its_content(make_config, corpus, tmp_path, monkeypatch):
    """Zeros of the right size, with the right time, and a missing file: in the text, the tokens and the sequences."""
    config = make_config(corpus=corpus)
    before = prepare(config, "train")[3]["tokens"]
    kinds = ("packed", "tokens", "tfds")  # each is made from the next one
    for number, kind in enumerate(kinds):
        (entry,) = (path for path in (tmp_path / "cache" / kind).iterdir() if path.name[0] != ".")
        largest = max((path for path in entry.rglob("*") if path.is_file()), key=lambda path: path.stat().st_size)
        for content in (bytes(largest.stat().st_size), None):
            assert complete(entry)
            times = largest.stat().st_atime_ns, largest.stat().st_mtime_ns
            largest.unlink()
            if content:
                largest.write_bytes(content)
                os.utime(largest, ns=times)
            assert not complete(entry), largest
            for other in kinds[:number]:
                shutil.rmtree(tmp_path / "cache" / other)
            assert (prepare(config, "train")[3]["tokens"] == before).all()
            assert complete(entry), largest


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
        make_config(corpus=corpus, sequence_length=17),
        make_config(corpus=corpus, tokenizer="bpe", bpe_vocab=300),
        make_config(corpus=corpus, tokenizer="bpe", bpe_vocab=301),
    ]
    directories = {prepare(config, split).directory for config in configs for split in ("train", "test")}
    assert len(directories) == 10
    # The number of workers does not change the tokens, so it is not an input.
    assert prepare(make_config(corpus=corpus, workers=1), "train").directory in directories


def test_warm_cache_needs_neither_grain_nor_tfds(at_once, corpus):
    source = CHILD.format(module="packed", name="_pack") + (
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
