"""Text in several shards: by one process or several, killed, damaged, changed, read early; and the order of its rows."""

import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from xfresearch.data import corpus_inputs, making, prepared
from xfresearch.data.corpus_inputs import Input, shards_of
from xfresearch.data.order import WINDOW, Order
from xfresearch.data.pipeline import Batches, prepare, stream_tokens
from xfresearch.data.prepared import Prepared
from xfresearch.data.shard_writers import Writers
from xfresearch.data.tokenizers import tokenizer_for
from xfresearch.prepare import main as command
from xfresearch.prepare import numbers_of
from xfresearch.runtime.errors import UserError

ROOT = Path(__file__).parents[2]
FILES, SHARDS = 60, 20


@pytest.fixture
def corpus(tmp_path, monkeypatch) -> str:
    """Files of text in 20 shards: their least size is that of three files."""
    folder = tmp_path / "texts"
    folder.mkdir()
    for number in range(FILES):
        rows = ({"text": f"file {number:02} row {row:03} of the text"} for row in range(100))
        (folder / f"{number:02}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    monkeypatch.setattr(corpus_inputs, "LEAST", 3 * (folder / "00.jsonl").stat().st_size)
    return str(folder)


def prepared_of(config) -> Prepared:
    return Prepared(config.data, config.data.corpus[0], tokenizer_for(config.data), config.sequence_length)


def contents(folder) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.iterdir() if path.is_file()}


def test_inputs_of_a_large_corpus_are_shards_of_similar_size(monkeypatch):
    sizes = np.random.default_rng(0).integers(1, 50 << 20, 2000).tolist()
    inputs = [Input(str(n), size, lambda: iter(()), lambda: 0, lambda: "") for n, size in enumerate(sizes)]
    shards = shards_of(inputs)
    assert [each for shard in shards for each in shard.inputs] == inputs
    assert [shard.number for shard in shards] == list(range(len(shards)))
    assert 150 <= len(shards) <= 250 and max(shard.size for shard in shards) < corpus_inputs.MOST + (50 << 20)
    assert [shard.number for shard in shards if shard.samples] == [len(shards) * n // 4 for n in range(4)]


def test_processes_and_one_process_write_the_same_bytes(make_config, corpus, tmp_path):
    made = {}
    for workers in (1, 3):
        config = make_config(corpus=corpus, workers=workers, cache_dir=str(tmp_path / str(workers)))
        split = prepare(config, "train")
        assert len(prepared_of(config).shards) == SHARDS == split.parts
        made[workers] = contents(split.directory)
        assert not list((tmp_path / str(workers)).rglob("*.tmp")) and not list(split.directory.glob("writers/*"))
    assert made[1] == made[3] and len(made[1]) == 2 * SHARDS + 2 * 4  # manifests, train; validation and test of samples


@pytest.mark.parametrize("packing", ["stream", "documents"])
def test_every_document_is_in_one_split_once_and_every_token_a_target_once(make_config, corpus, packing):
    config = make_config(corpus=corpus, packing=packing, sequence_length=30)
    tokenizer, texts = tokenizer_for(config.data), []
    for split in ("train", "validation", "test"):
        tokens, documents = stream_tokens(config, split)
        cuts = np.flatnonzero(np.diff(documents)) + 1
        texts += [tokenizer.decode(part[part != tokenizer.end_of_text]) for part in np.split(tokens, cuts)]
        whole = prepare(config, split)
        weights = whole.read(range(len(whole)))["weights"]
        assert (tokens == tokenizer.end_of_text).sum() == whole.meta["n_documents"] - (packing == "stream")
        assert weights.sum() == whole.meta["n_predictions"] and whole.meta["n_tokens"] == len(tokens)
        if packing == "documents":
            assert weights.sum() == len(tokens) - whole.meta["n_documents"]
    rows = [f"file {n:02} row {row:03} of the text" for n in range(FILES) for row in range(100)]
    assert sorted(texts) == rows


def test_held_out_text_is_there_without_the_other_shards(make_config, corpus):
    config = make_config(corpus=corpus)
    held_out = prepare(config, "validation")
    there = SHARDS - len(prepared_of(config).missing(range(SHARDS)))
    assert there == held_out.parts == 4 and held_out.meta["n_documents"] > 10


@pytest.fixture
def nothing_ahead(monkeypatch):
    """Shards that no row needs yet are not made."""
    monkeypatch.setattr(Prepared, "begin", lambda self, numbers: None)


def test_the_first_batches_need_one_window_and_are_those_of_the_whole_corpus(make_config, corpus, nothing_ahead):
    config = make_config(corpus=corpus, batch_size=8)
    early = Batches(config)
    first = [early.batch(step) for step in range(5)]
    there = SHARDS - len(prepared_of(config).missing(range(SHARDS)))
    assert there <= WINDOW + 4 < SHARDS and early.corpora[0].meta["estimated"]
    prepare(config, "train")
    late = Batches(config)
    assert all((late.batch(step)["tokens"] == first[step]["tokens"]).all() for step in range(5))
    assert late.corpora[0].digest == early.corpora[0].digest and late.bytes_per_token() == early.bytes_per_token()
    last = Batches(config).batch(1000)
    assert (late.batch(1000)["tokens"] == last["tokens"]).all()


def test_the_estimate_of_a_corpus_is_near_its_counts(make_config, corpus, nothing_ahead):
    config = make_config(corpus=corpus)
    about = Batches(config).corpora[0].meta
    whole = prepare(config, "train").meta
    assert all(about[name] == pytest.approx(whole[name], rel=0.15) for name in ("n_bytes", "n_tokens", "n_sequences"))


def test_what_was_read_is_part_of_the_manifest_of_a_run(make_config, corpus, nothing_ahead):
    """It changes when another shard is read, and not before; the digest of a small corpus has it."""
    config = make_config(corpus=corpus, batch_size=8)
    batches = Batches(config)
    rows = batches._orders[0]._windows[0].last
    read = [batches.read_before(step) for step in (1, rows // 8, rows // 8 + 1)]
    assert read[0] == read[1] != read[2] and [*read[0]] == [f"train split of {corpus}, as read"]
    small = make_config(corpus=f"{corpus}/00.jsonl")
    assert Batches(small).read_before(3) == {}


class Sizes:
    """Shards with these numbers of rows."""

    def __init__(self, sizes):
        self.sizes, self.parts, self.asked = sizes, len(sizes), set()

    def rows_of(self, parts):
        self.asked |= set(parts)
        return [self.sizes[part] for part in parts]


@pytest.mark.parametrize("shards", [1, 3, WINDOW, WINDOW + 1, 3 * WINDOW + 5])
def test_every_epoch_has_every_row_once_in_a_new_order(shards):
    sizes = np.random.default_rng(shards).integers(0, 40, shards).tolist()
    sizes[0] = 30
    total, asked = sum(sizes), Sizes(sizes)
    made, rows = Order(asked, 5), [(n, i) for n, size in enumerate(sizes) for i in range(size)]
    assert len(asked.asked) == min(WINDOW, shards)
    epochs = [[made[epoch * total + i] for i in range(total)] for epoch in range(3)]
    assert all(sorted(epoch) == rows for epoch in epochs) and epochs[0] != epochs[1] != epochs[2] != rows
    late = Order(Sizes(sizes), 5)
    assert [late[2 * total + i] for i in range(0, total, 7)] == epochs[2][::7]
    assert [Order(Sizes(sizes), 6)[i] for i in range(total)] != epochs[0]
    if shards > 2 * WINDOW:  # the shards of the first window are others in each epoch
        begun = [{shard for shard, _ in epoch[: total // 8]} for epoch in epochs]
        assert begun[0] != begun[1] != begun[2] and all(len(each) <= WINDOW for each in begun)


def test_rows_of_a_window_are_in_random_order():
    """The places of a shard's rows are spread over its window as those of a full permutation are."""
    made = Order(Sizes([500] * 3 * WINDOW), 0)
    window = [made[i] for i in range(500 * WINDOW)]
    assert len({shard for shard, _ in window}) == WINDOW
    for number in {shard for shard, _ in window}:
        places = np.array([place for place, (shard, _) in enumerate(window) if shard == number]) / len(window)
        assert abs(places.mean() - 0.5) < 0.06 and abs(places.std() - 12**-0.5) < 0.03


def test_a_killed_preparation_goes_on_at_the_next_shard(make_config, corpus, tmp_path):
    """The processes that worked for it end too."""
    config = make_config(corpus=corpus, workers=2)
    whole = contents(prepare(make_config(corpus=corpus, cache_dir=str(tmp_path / "whole")), "train").directory)
    least = corpus_inputs.LEAST
    child = (
        "import sys\nfrom xfresearch.data import corpus_inputs\n"
        f"corpus_inputs.LEAST = {least}\n"
        "from xfresearch.prepare import main\nmain(sys.argv[1:])\n"
    )
    flags = ["--config", "quickstart:tiny", "--workers", "2", f"--config.data.corpus={corpus}"]
    flags += [f"--config.data.cache_dir={config.data.cache_dir}"]
    killed = subprocess.Popen([sys.executable, "-c", child, *flags], cwd=ROOT, stderr=subprocess.DEVNULL)
    folder = Path(prepared_of(config).folder)
    deadline = time.monotonic() + 300
    while len(list(folder.glob("*.json"))) < 5 and time.monotonic() < deadline:
        time.sleep(0.01)
    killed.send_signal(signal.SIGKILL)
    killed.communicate()
    there = {path.name: path.stat().st_mtime_ns for path in folder.glob("*.json")}
    assert 5 <= len(there) < SHARDS
    assert contents(prepare(config, "train").directory) == whole and not list(folder.glob(".*.tmp"))
    assert {name: (folder / name).stat().st_mtime_ns for name in there} == there


def test_processes_that_prepare_at_once_share_the_shards(corpus, tmp_path):
    """Each shard is made by one of them, and all of them have the result."""
    child = (
        "import sys\nfrom xfresearch.data import corpus_inputs, prepared\n"
        f"corpus_inputs.LEAST = {corpus_inputs.LEAST}\n"
        "make = prepared.Prepared.make\n"
        "def said(self, shard, *rest):\n    make(self, shard, *rest)\n    print('made', shard.number)\n"
        "prepared.Prepared.make = said\n"
        "class Alone:\n"
        "    def __init__(self, work, threads): self.work = work\n"
        "    def make(self, shard, count): self.work.make(shard, 1, count)\n"
        "    def stop(self): pass\n"
        "from xfresearch.data import crew\ncrew._Worker = Alone\n"
        "from xfresearch.prepare import main\nmain(sys.argv[1:])\n"
    )
    flags = ["--config", "quickstart:tiny", f"--config.data.corpus={corpus}", f"--config.data.cache_dir={tmp_path}/cache"]
    command = [sys.executable, "-c", child, *flags, "--workers", "1"]
    running = [subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    lines = [process.communicate(timeout=300)[0].splitlines() for process in running]
    assert all(process.returncode == 0 for process in running)
    made = [line for own in lines for line in own if line.startswith("made")]
    assert len(made) == len(set(made)) == SHARDS
    assert all(f"{SHARDS} of {SHARDS} shards are in" in own[-1] for own in lines)


def test_a_shard_of_a_process_on_another_machine_is_left_to_it_until_its_file_is_old(tmp_path, monkeypatch):
    mine = Writers(tmp_path, stale=1.5, renew=0.1)
    other = tmp_path / "writers" / "other.json"
    other.write_text(json.dumps({"host": "another machine", "process": 1, "shards": [3]}))
    assert not mine.take(3) and mine.take(4) and [*mine.others()] == [3]
    os.utime(other, (time.time() - 5, time.time() - 5))
    assert mine.take(3) and not other.exists()
    mine.close()
    assert not list((tmp_path / "writers").iterdir())


def test_of_two_processes_that_take_a_shard_at_once_one_leaves_it(tmp_path, monkeypatch):
    """Each looks before the other has written that it takes the shard."""
    first, second = sorted((Writers(tmp_path), Writers(tmp_path)), key=lambda each: each._file.name)

    def takes(writer) -> bool:
        looks = [{}]
        monkeypatch.setattr(writer, "others", lambda: looks.pop() if looks else Writers.others(writer))
        return writer.take(1)

    second._own.add(1)
    second._write()
    assert takes(first) and not takes(second)
    first.close()
    second.close()


def test_an_input_that_changes_meanwhile_is_one_line_and_what_is_done_stays(make_config, corpus, monkeypatch):
    config = make_config(corpus=corpus, workers=1)
    corpus_of = prepared_of(config)
    corpus_of.require([0])
    with open(f"{corpus}/04.jsonl", "a") as file:
        file.write(json.dumps({"text": "one more"}) + "\n")
    assert corpus_of.shards[1].inputs[1].found[0].endswith("04.jsonl")
    with pytest.raises(UserError, match=r"04.jsonl has changed since the preparation began: the same command prepares it"):
        corpus_of.require([1, 2])
    assert corpus_of.missing([0]) == []
    assert "one more" in "".join(map(bytes.decode, prepared_of(config).corpus.documents("train")))


def test_another_input_that_changes_meanwhile_does_not_matter(make_config, corpus):
    """A worker that begins later finds it, and writes to the folder of the preparation all the same."""
    corpus_of = prepared_of(make_config(corpus=corpus, workers=1))
    corpus_of.require([0])
    with open(f"{corpus}/50.jsonl", "a") as file:
        file.write(json.dumps({"text": "one more"}) + "\n")
    corpus_of.require([1, 2])
    assert corpus_of.missing([0, 1, 2]) == []


def test_a_bad_row_in_a_late_shard_is_one_line(make_config, corpus):
    with open(f"{corpus}/50.jsonl", "a") as file:
        file.write("{\n")
    config = make_config(corpus=corpus, workers=2)
    with pytest.raises(UserError, match=r"50.jsonl:101: invalid JSON"):
        prepare(config, "train")


def test_a_shared_bucket_has_the_shards_and_each_machine_its_copy(make_config, corpus, tmp_path, monkeypatch):
    """The bucket is a directory here; the second machine has another cache, and makes nothing."""
    monkeypatch.setattr(prepared, "in_bucket", lambda path: "bucket" in str(path))
    config = make_config(corpus=f"{corpus}/0*.jsonl", shards=str(tmp_path / "bucket"))
    first = prepare(config, "validation")
    monkeypatch.setattr(making, "make", lambda *_, **__: pytest.fail("it is made again"))
    elsewhere = make_config(corpus=f"{corpus}/0*.jsonl", shards=str(tmp_path / "bucket"), cache_dir=str(tmp_path / "2"))
    second = prepare(elsewhere, "validation")
    assert second.digest == first.digest and (second[0]["tokens"] == first[0]["tokens"]).all()
    copies = {path.name for path in (tmp_path / "2").rglob("*.array_record")}
    assert copies and copies == {path.name for path in (tmp_path / "bucket").rglob("*.array_record")}


@pytest.mark.parametrize("text", ["8/8", "1", "a/3", "-1/3", "0/0", "auto/3"])
def test_a_share_that_is_none_is_one_line(text, monkeypatch):
    monkeypatch.delenv("SLURM_ARRAY_TASK_ID", raising=False)
    with pytest.raises(UserError, match=f"--shard={text} is not allowed: it must be I/N with I from 0 to N-1, or auto/N"):
        numbers_of(text)


def test_jobs_of_an_array_make_all_shards(make_config, corpus, monkeypatch, capsys):
    config = make_config(corpus=corpus, workers=1)
    flags = ["--config", "quickstart:tiny", f"--config.data.corpus={corpus}"]
    flags += [f"--config.data.cache_dir={config.data.cache_dir}", "--workers", "1"]
    for job in (0, 1):
        monkeypatch.setenv("SLURM_ARRAY_TASK_ID", str(job))
        command([*flags, "--shard", "auto/2"])
        there = (job + 1) * SHARDS // 2
        assert f"{corpus}: {there} of {SHARDS} shards are in {config.data.cache_dir}" in capsys.readouterr().out
