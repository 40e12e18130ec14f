"""Corpora by name, and the documents of their splits.

A corpus is `NAME` or `NAME:PATH`: python_stdlib, text_files:PATH, facts (PATH is a folder of relation files), wikitext2,
enwik8, text8 (PATH is their manual_dir), or any other TFDS data set (PATH is its data_dir). `PATH` alone, if it exists, is
text_files:PATH; a built-in name is never a path. A TFDS data set without a validation split gets one: 5 % of its train
documents, chosen by the hash of their text.
"""

import contextlib
import errno
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from xfresearch.data import text_sources
from xfresearch.data.cache import build_once, cache_root, complete, digest, locked, write_meta
from xfresearch.data.corpus_files import names_files
from xfresearch.data.given import require_given_corpus
from xfresearch.options.run_options import DataConfig
from xfresearch.runtime.errors import UserError, nearest
from xfresearch.runtime.files import check_tree, inside, names_in

if TYPE_CHECKING:
    from xfresearch.data.pairs import PairFiles, PairTask

BUILT_IN = ("python_stdlib", "text_files", "facts", "wikitext2", "enwik8", "text8")
_FORMAT = 1


def documents(corpus: str, split: str, data: DataConfig) -> Iterator[bytes]:
    """The documents of `split` as raw bytes, in a fixed order. Raises UserError for any problem with the data."""
    return open_split(corpus, split, data).documents(split)


def splits(corpus: str, data: DataConfig) -> tuple[str, ...]:
    """The names of the splits of `corpus`."""
    return tuple(open_corpus(corpus, data).splits)


def open_split(corpus: str, split: str, data: DataConfig) -> "Corpus":
    """The corpus, after a check that it has `split`. Raises UserError if it does not."""
    opened = open_corpus(corpus, data)
    if split not in opened.splits:
        known = ", ".join(opened.splits)
        raise UserError(f"corpus {corpus!r} has no split {split!r}; it has: {known}{nearest(split, opened.splits)}")
    return opened


def open_corpus(corpus: str, data: DataConfig) -> "Corpus":
    """The corpus, with `.splits`, `.identity()`, `.documents(split)` and `.n_bytes(split)`, an estimate of the split's size.
    A corpus of pairs has `.pairs(split)` too."""
    if data.objective.kind == "seq2seq":
        from xfresearch.data.pairs import open_pairs

        return open_pairs(corpus, data)
    if corpus not in BUILT_IN:
        require_given_corpus(corpus)
    name, path = _parse(corpus)
    root = cache_root(data)
    if name == "python_stdlib":
        if path:
            raise UserError(
                f"corpus {corpus!r}: python_stdlib takes no path; for your own files write text_files:{path}"
            )
        return BuiltInCorpus(name, text_sources.PythonStdlib(), data)
    if name == "text_files":
        if not path:
            raise UserError("corpus 'text_files' needs a path: text_files:PATH, a file, directory or glob")
        return BuiltInCorpus(name, text_sources.TextFiles(path, data.text_field, data.links), data)
    if name == "facts":
        from xfresearch.data.facts import FactSentences

        return BuiltInCorpus(name, FactSentences(path), data)
    if name == "wikitext2":
        return BuiltInCorpus(name, text_sources.Wikitext2(path or data.manual_dir, root), data)
    if name in ("enwik8", "text8"):
        return BuiltInCorpus(name, text_sources.HutterPrize(name, path or data.manual_dir, root), data)
    if path and data.links == "inside":
        check_tree(Path(path).expanduser())
    return TfdsCorpus(corpus, name, path, data.text_field, root / "tfds")


def _parse(corpus: str) -> tuple[str, str]:
    name, _, path = corpus.partition(":")
    if name not in BUILT_IN and names_files(corpus):
        return "text_files", corpus
    version = re.fullmatch(r"(\d+\.\d+\.\d+)(?::(.*))?", path)  # a TFDS version: c4/en:3.1.0
    return (f"{name}:{version[1]}", version[2] or "") if version else (name, path)


class BuiltInCorpus:
    """A text source of this package (text_sources.py), cached as a TFDS data set."""

    def __init__(self, name: str, source, data: DataConfig):
        self.name = name
        self.source = source
        self.splits = source.splits
        self._root = cache_root(data) / "tfds"
        self._joined = source.one_stream and data.packing == "stream"

    def identity(self) -> dict:
        return {"corpus": self.name, "format": _FORMAT, "joined": self._joined, **self.source.identity()}

    def documents(self, split: str) -> Iterator[bytes]:
        # A long document is stored in several examples with the same number (builders.py).
        pieces: list = []
        current = 0
        for example in self._builder().as_data_source(split):
            if example["document"] != current and not self._joined:
                yield b"".join(pieces)
                pieces = []
                current = example["document"]
            pieces.append(example["text"])
        if any(pieces):
            yield b"".join(pieces)

    def n_bytes(self, split: str) -> int:
        return self._builder().info.splits[split].num_bytes

    def _builder(self):
        """The read-only TFDS builder of the corpus. Prepares the corpus first if necessary."""
        target = self._root / f"{self.name}-{digest([_FORMAT, self.source.identity()])}"

        def build(directory: Path) -> None:
            from xfresearch.data import builders

            builders.prepare(self.name, self.source, directory)
            write_meta(directory, {})

        build_once(target, build, complete)
        import tensorflow_datasets as tfds

        (version,) = names_in(inside(target, self.name))
        directory = target / self.name / version
        try:
            return tfds.builder_from_directory(directory)
        except Exception as error:  # its files were complete above: a disk fails, and TFDS takes a file for missing
            raise OSError(errno.EIO, f"TFDS cannot open it: {_first_line(error)}", str(directory)) from error


class TfdsCorpus:
    """Any TFDS data set. If it has no validation split, one is held out of train by hash."""

    def __init__(self, corpus: str, name: str, data_dir: str, field: str, locks: Path):
        self.corpus = corpus
        self.field = field
        self._builder = _tfds_builder(corpus, name, data_dir)
        if not self._builder.info.splits:
            # Processes prepare it one after another. TFDS does nothing if the data set is already prepared.
            with locked(locks / f"other-{digest(corpus)}"):
                self._prepare()
        stored = list(self._builder.info.splits)
        self.holds_out = "train" in stored and "validation" not in stored
        self.splits = tuple(stored + ["validation"] if self.holds_out else stored)

    def identity(self) -> dict:
        info = self._builder.info
        sizes = {split: [info.splits[split].num_examples, info.splits[split].num_bytes] for split in info.splits}
        return {
            "corpus": info.full_name,
            "sizes": sizes,
            "field": self.field,
            "directory": str(self._builder.data_path),
        }

    def documents(self, split: str) -> Iterator[bytes]:
        held_out = self.holds_out and split == "validation"
        for example in self._source("train" if held_out else split):
            text = self._text(example)
            if not self.holds_out or split not in ("train", "validation") or _is_held_out(text) == held_out:
                yield text

    def n_bytes(self, split: str) -> int:
        stored = self._builder.info.splits
        return stored[split if split in stored else "train"].num_bytes

    def _source(self, split: str):
        try:
            return self._builder.as_data_source(split)
        except (NotImplementedError, ValueError) as error:
            raise UserError(f"corpus {self.corpus!r}: its files must be array_record: {_first_line(error)}") from None

    def _text(self, example: dict) -> bytes:
        if self.field not in example:
            present = ", ".join(example)
            raise UserError(
                f"corpus {self.corpus!r}: no field {self.field!r}; fields present: {present}"
                f"{nearest(self.field, example)} (config.data.text_field)"
            )
        text = example[self.field]
        if not isinstance(text, (bytes, str)):
            raise UserError(
                f"corpus {self.corpus!r}: field {self.field!r} is a {type(text).__name__};"
                " it must be text (config.data.text_field)"
            )
        return text.encode() if isinstance(text, str) else text

    def _prepare(self) -> None:
        import tensorflow_datasets as tfds

        config = tfds.download.DownloadConfig(try_download_gcs=False)
        try:
            with contextlib.redirect_stdout(sys.stderr):
                self._builder.download_and_prepare(download_config=config, file_format="array_record")
        except Exception as error:  # TFDS builders raise any type: no network, manual download, no TensorFlow
            raise UserError(
                f"corpus {self.corpus!r}: TFDS cannot prepare it ({type(error).__name__}: {_first_line(error)});"
                f" prepare it elsewhere and give its data_dir: {self.corpus}:PATH"
            ) from None


Corpus: TypeAlias = "BuiltInCorpus | TfdsCorpus | PairFiles | PairTask"


def _tfds_builder(corpus: str, name: str, data_dir: str):
    import tensorflow_datasets as tfds
    from tensorflow_datasets.core import naming

    try:
        return tfds.builder(name, data_dir=data_dir or None)
    except (tfds.core.DatasetNotFoundError, ValueError, AssertionError) as error:
        if not isinstance(error, tfds.core.DatasetNotFoundError) and naming.is_valid_dataset_name(name):
            raise UserError(f"corpus {corpus!r}: TFDS cannot open it: {_first_line(error)}") from None
        raise _unknown(corpus, name) from None


def _unknown(corpus: str, name: str) -> UserError:
    from tensorflow_datasets.core import registered

    from xfresearch.data.pairs import TASKS

    listed = registered.list_imported_builders() if hasattr(registered, "list_imported_builders") else []
    if name in TASKS:
        raise UserError(f"corpus {corpus!r} is a task with pairs: it needs data.objective.kind='seq2seq'")
    no_path = "; there is no such file or directory either" if set(corpus) & set("./~*?") else ""
    return UserError(
        f"unknown corpus {corpus!r}; it must be {', '.join(BUILT_IN)}, a TFDS data set or an existing path"
        f"{nearest(name, [*BUILT_IN, *listed])}{no_path}"
    )


def _is_held_out(text: bytes) -> bool:
    return text_sources.split_of(text) == "validation"


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [""])[0][:200]
