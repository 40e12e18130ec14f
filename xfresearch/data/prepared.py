"""The shards of a corpus for one tokenizer: those that are there, and those that are made now.

The folder is in the cache, or data.shards names one that hosts share, or a bucket. It has for each shard a file of tokens
for every split (shard_file.py) and a manifest, N.json, which is written last: a shard without it, or with other content than
it says, is made again.
"""

import json
import secrets
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from etils import epath

from xfresearch.data import making
from xfresearch.data.cache import cache_root, content_of, digest, make_writable
from xfresearch.data.corpora import open_corpus
from xfresearch.data.corpus_inputs import Shard, TextCorpus
from xfresearch.data.crew import Crew
from xfresearch.data.making import cores
from xfresearch.data.shard_file import TokenFile
from xfresearch.data.shard_writers import Writers
from xfresearch.data.tokenizers import Tokenizer
from xfresearch.options.reading import to_json
from xfresearch.options.run_options import DataConfig
from xfresearch.runtime.errors import UserError
from xfresearch.runtime.files import (
    exists,
    files_in,
    inside,
    make_directory,
    names_in,
    read_object,
    remove_directory,
    sync,
    write_json,
)
from xfresearch.runtime.opening import in_bucket
from xfresearch.runtime.progress import stage


class Prepared:
    """`length` is that of the rows of whole documents; the tokens of a stream serve rows of every length. `name` is that of
    the folder, by default a hash of all that decides its content."""

    def __init__(self, data: DataConfig, corpus: str, tokenizer: Tokenizer, length: int, name: str = ""):
        opened = open_corpus(corpus, data)
        assert isinstance(opened, TextCorpus)
        self.data, self.corpus_name, self.corpus, self.tokenizer = data, corpus, opened, tokenizer
        self.length = length if data.packing == "documents" else 0
        key = digest([making.FORMAT, opened.identity(), tokenizer.digest, data.packing, self.length])
        kind = "".join(c if c.isalnum() else "_" for c in corpus.partition(":")[0])[-40:]
        self.local = cache_root(data) / "shards" / (name or f"{kind}-{key}")
        self.folder = epath.Path(data.shards).expanduser() / self.local.name if data.shards else epath.Path(self.local)
        self._manifests: dict[int, dict[str, Any]] = {}
        self._crew: Crew | None = None

    @property
    def shards(self) -> list[Shard]:
        return self.corpus.shards

    def manifest(self, number: int) -> dict[str, Any] | None:
        """What is known of a shard (making.make); None if it is not there, or not as it was written."""
        if number not in self._manifests:
            path = inside(self.folder, _manifest(number))
            try:
                found = read_object(path) if exists(path) else {}
                files = {making.file_of(number, split): meta["content"] for split, meta in found["splits"].items()}
                if found["format"] != making.FORMAT or not all(self._fetched(*each) for each in files.items()):
                    return None
            except (UserError, KeyError, TypeError, AttributeError, FileNotFoundError):
                return None
            self._manifests[number] = found
        return self._manifests[number]

    def tokens(self, number: int, split: str) -> TokenFile | None:
        """The tokens of a split in a shard that is there; None if it has no document of the split."""
        manifest = self.manifest(number)
        assert manifest, f"shard {number} was required"
        meta = manifest["splits"].get(split)
        path = Path(self.local_folder / making.file_of(number, split))
        return self.corpus.opened(self.shards[number], path, meta) if meta else None

    def missing(self, numbers: Sequence[int]) -> list[int]:
        """Those of the shards that have no manifest. Their content is not checked."""
        there = set(names_in(self.folder, "*.json"))
        return [number for number in numbers if _manifest(number) not in there]

    def require(self, numbers: Sequence[int]) -> None:
        """Returns when these shards are there: makes those that are missing, or waits for the processes that do."""
        missing = [number for number in numbers if self.manifest(number) is None]
        if not missing:
            return
        make_writable(self.local)
        size = sum(self.shards[number].size for number in missing)
        with stage(f"preparing {self.corpus_name}", size) as bar:
            if len(missing) == 1 and not self._crew:
                self._make_here(self.shards[missing[0]], bar.update)
            else:
                self._crew = self._crew or Crew(self, self.data.workers)
                self._crew.want(missing, first=True)
                self._crew.wait(missing, bar)

    def begin(self, numbers: Sequence[int]) -> None:
        """Begins to make those of the shards that are missing, in this order, and returns."""
        if missing := self.missing(numbers):
            make_writable(self.local)
            self._crew = self._crew or Crew(self, self.data.workers)
            self._crew.want(missing, first=False)

    def _make_here(self, shard: Shard, count: Callable[[int], None]) -> None:
        writers = Writers(self.folder)
        try:
            while self.manifest(shard.number) is None:
                if writers.take(shard.number):
                    self.make(shard, self.data.workers or cores(), count)
                else:
                    writers.wait()
        finally:
            writers.close()

    def make(self, shard: Shard, threads: int, count: Callable[[int], None] = lambda _: None) -> None:
        """Makes a shard. Its files get their names when they are whole, and its manifest is written last."""
        make_directory(self.local_folder)
        for name in names_in(self.local_folder, f".{shard.number:06}.*.tmp"):  # of a process that was killed
            remove_directory(self.local_folder, name)
        temporary = self.local_folder / f".{shard.number:06}.{secrets.token_hex(6)}.tmp"
        make_directory(temporary)
        try:
            manifest = making.make(self.corpus, shard, self.tokenizer, self.length, threads, Path(temporary), count)
            for file in files_in(temporary):
                sync(file)
                file.replace(self.local_folder / file.name)
                if in_bucket(self.folder):
                    (self.local_folder / file.name).copy(self.folder / file.name, overwrite=True)
            sync(self.local_folder)
            write_json(inside(self.folder, _manifest(shard.number)), manifest)
        finally:
            remove_directory(self.local_folder, temporary.name)

    @property
    def local_folder(self) -> epath.Path:
        """Where the files are read: libraries read none from a bucket."""
        return epath.Path(self.local) if in_bucket(self.folder) else self.folder

    def _fetched(self, name: str, content: str) -> bool:
        """Whether a file is on this machine with that content, after a copy from a bucket if necessary."""
        local = inside(self.local_folder, name)
        if exists(local) and content_of(local) == content:
            return True
        if not in_bucket(self.folder):
            return False
        make_directory(self.local_folder)
        temporary = self.local_folder / f".{name}.{secrets.token_hex(6)}.part"
        inside(self.folder, name).copy(temporary)
        temporary.replace(local)
        return content_of(local) == content

    def request(self) -> dict[str, Any]:
        """What a worker must know (shard_worker.py), with the directory of a copy of the tokenizer."""
        directory = inside(self.folder, "tokenizer")
        if not exists(directory):
            make_directory(directory)
            self.tokenizer.save(directory)
        asked = {"data": json.loads(to_json(self.data)), "corpus": self.corpus_name, "length": self.length}
        return asked | {"tokenizer": str(directory), "name": self.local.name}


def _manifest(number: int) -> str:
    return f"{number:06}.json"
