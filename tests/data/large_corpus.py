"""python -m tests.data.large_corpus [MEGABYTES] [DIRECTORY]

Prepares a corpus that is made on the spot, as parquet, compressed JSON lines and CSV in two folders: by one process, killed
three times, by four processes at once, by two hosts that share a folder, and while the first batches are read. Prints times,
memory and whether all results are equal, byte for byte. A smaller corpus than 1,000 MB has smaller shards.
"""

import csv
import hashlib
import json
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pyarrow
from pyarrow import parquet

from xfresearch.data import corpus_inputs

WORDS = [f"{first}{second}" for first in ("ba", "de", "ki", "lo", "mu", "na") for second in ("l", "n", "rt", "st", "ve", "")]
CHILD = """
import platform, sys
least, host, command, *arguments = sys.argv[1:]
if host:
    platform.node = lambda: host
from xfresearch.data import corpus_inputs
corpus_inputs.LEAST = int(least)
if command == "prepare":
    from xfresearch.prepare import main
    main(arguments)
else:
    from pathlib import Path
    from xfresearch.data.pipeline import Batches
    from xfresearch.run_config.config_files import parse
    batches = Batches(parse(arguments))
    for step in range(20):
        batches.batch(step)
    print(len(list(Path(batches.corpora[0].prepared.folder).glob("*.json"))), flush=True)
"""


def write(folder: Path, megabytes: int) -> None:
    """The corpus."""
    rng, files = random.Random(0), 250
    for number in range(files):
        rows, size = [], 0
        while size < megabytes * 1_000_000 // files:
            rows.append(" ".join(rng.choices(WORDS, k=rng.randint(20, 2000))))
            size += len(rows[-1])
        place = folder / "ab"[number % 2]
        place.mkdir(parents=True, exist_ok=True)
        file = place / f"{number:05}"
        if number % 3 == 0:
            parquet.write_table(pyarrow.table({"text": rows}), file.with_suffix(".parquet"))
        elif number % 3 == 1:
            lines = "".join(json.dumps({"text": row}) + "\n" for row in rows).encode()
            file.with_suffix(".jsonl.zst").write_bytes(pyarrow.compress(lines, codec="zstd", asbytes=True))
        else:
            with file.with_suffix(".csv").open("w", newline="") as stream:
                csv.writer(stream).writerows([["text"], *([row] for row in rows)])


class Preparation:
    """A process that prepares the corpus in `folder`."""

    def __init__(self, corpus: Path, folder: Path, least: int, workers: int = 2, shared: str = "", host: str = ""):
        flags = ["--config", "quickstart:tiny", f"--config.data.corpus={corpus}", f"--config.data.cache_dir={folder}"]
        flags += [f"--workers={workers}", *([f"--config.data.shards={shared}"] if shared else [])]
        command = [sys.executable, "-c", CHILD, str(least), host, "prepare", *flags]
        self.process, self.peak = subprocess.Popen(command, stdout=subprocess.PIPE, text=True), 0

    def wait(self) -> str:
        """Waits for its end, and looks at the memory of it and of its workers. Returns its output."""
        while self.process.poll() is None:
            self.peak = max(self.peak, *map(_peak, [self.process.pid, *_below(self.process.pid)]))
            time.sleep(0.2)
        output = self.process.communicate()[0]
        assert self.process.returncode == 0, output
        return output


def _below(pid: int) -> list[int]:
    """The processes that a process has started, and those that these have."""
    try:
        children = [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
        started = [int(w) for each in Path(f"/proc/{pid}/task").iterdir() for w in (each / "children").read_text().split()]
    except (FileNotFoundError, ProcessLookupError):
        return []
    return [each for child in {*children, *started} for each in (child, *_below(child))]


def _peak(pid: int) -> int:
    """The most memory that a process has had, in bytes; 0 if it has ended."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except (FileNotFoundError, ProcessLookupError):
        return 0
    return next((int(line.split()[1]) << 10 for line in lines if line.startswith("VmHWM")), 0)


def contents(folder: Path) -> dict[str, str]:
    """The digest of every file of the shards in a folder."""
    files = [path for path in folder.glob("*/*") if path.is_file()]
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def main(megabytes: int, work: Path) -> None:
    corpus, least = work / "corpus", max(1, corpus_inputs.LEAST * min(megabytes, 1000) // 1000)
    write(corpus, megabytes)
    size = sum(path.stat().st_size for path in corpus.rglob("*") if path.is_file())
    print(f"corpus: {megabytes} MB of text in {size / 1e6:.0f} MB of files", flush=True)

    began = time.perf_counter()
    one = Preparation(corpus, work / "one", least, workers=1)
    one.wait()
    seconds, whole = time.perf_counter() - began, contents(work / "one" / "shards")
    shards = sum(name.endswith(".json") for name in whole)
    disk = sum(path.stat().st_size for path in (work / "one").rglob("*.array_record"))
    rate = f"{megabytes / seconds:.1f} MB/s, {disk / 1e6:.0f} MB of shards"
    print(f"one worker: {shards} shards, {seconds:.0f} s, {rate}, peak of a process {one.peak / 1e6:.0f} MB", flush=True)

    for part in (1, 2, 3):
        killed, folder = Preparation(corpus, work / "killed", least), work / "killed" / "shards"
        while len(list(folder.glob("*/*.json"))) < part * shards // 4:
            time.sleep(0.05)
        killed.process.send_signal(signal.SIGKILL)
        killed.process.communicate()
        print(f"killed with {len(list(folder.glob('*/*.json')))} of {shards} shards", flush=True)
    Preparation(corpus, work / "killed", least).wait()
    print(f"resumed: equal {contents(work / 'killed' / 'shards') == whole}", flush=True)

    four = [Preparation(corpus, work / "four", least, workers=1) for _ in range(4)]
    for each in four:
        each.wait()
    print(f"four processes at once: equal {contents(work / 'four' / 'shards') == whole}", flush=True)

    shared = str(work / "shared")
    hosts = [Preparation(corpus, work / host, least, 1, shared, host) for host in ("host1", "host2")]
    for each in hosts:
        each.wait()
    print(f"two hosts: equal {contents(Path(shared)) == whole}", flush=True)

    flags = ["--config", "quickstart:tiny", f"--config.data.corpus={corpus}", f"--config.data.cache_dir={work / 'early'}"]
    command = [sys.executable, "-c", CHILD, str(least), "", "read", *flags, "--config.data.workers=2"]
    there = int(subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout)
    print(f"from nothing: when 20 batches are read, {there} of {shards} shards are there", flush=True)


if __name__ == "__main__":
    place = Path(sys.argv[2] if len(sys.argv) > 2 else tempfile.mkdtemp()).absolute()
    try:
        main(int(sys.argv[1]) if len(sys.argv) > 1 else 1000, place)
    finally:
        shutil.rmtree(place, ignore_errors=True)
