"""tokens:PATH, a corpus of files of token ids that other programs wrote (token_formats.py), which are read where they lie.

What is prepared of each is an index: the counts, the sizes of documents and, of whole documents, the rows.
"""

import hashlib
import re
from collections.abc import Iterator
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

import numpy as np

from xfresearch.data.corpus_files import find_files
from xfresearch.data.corpus_inputs import SAMPLES, Input, Shard, TextCorpus, shards_of
from xfresearch.data.shard_file import TokenFile, TokenWriter
from xfresearch.data.token_formats import SUFFIXES, TokenIds, beside, open_tokens
from xfresearch.runtime.errors import UserError

if TYPE_CHECKING:  # tokenizers are trained on corpora
    from xfresearch.data.tokenizers.base import Tokenizer

PART = 1 << 30  # bytes: a larger file is read in parts of about as many
HELD_OUT = 0.05  # of the parts that sample, if no file is named as one of held-out text
_CHUNK = 1 << 22  # tokens that are counted at a time
_CUT = 1 << 16  # tokens whose text is made at a time
_NAMED = re.compile(r"(?:^|[^a-z])(?:(val|valid|validation|dev)|(test))(?![a-z])")
_DTYPE = np.dtype(np.uint32)  # of ids in a batch, whatever the file has: no id is the largest value, which is padding


class _Part(NamedTuple):
    """The tokens first to last - 1 of a file."""

    path: Path
    first: int
    last: int
    split: str

    @property
    def name(self) -> str:
        return f"{self.path.absolute()} tokens {self.first}:{self.last}"


class TokenFiles(TextCorpus):
    """A file, directory or glob. The names say which files are held out, such as val.bin; if none is, the end of SAMPLES
    evenly spaced parts is."""

    name = "tokens"
    in_place = True
    tokenizer: "Tokenizer | None" = None  # that made the ids; only their text needs it

    def __init__(self, path: str, links: str):
        if not path:
            raise UserError("corpus 'tokens' needs a path: tokens:PATH, a file, directory or glob of token ids")
        self.corpus = f"tokens:{path}"
        self._files = find_files(path, self.corpus, links, SUFFIXES)
        splits = {each.split for each in self._parts}
        self.splits = tuple(split for split in ("train", "validation", "test") if split in splits)

    @cached_property
    def _parts(self) -> list[_Part]:
        parts = [part for path in self._files for part in _parts_of(path)]
        train = [number for number, part in enumerate(parts) if part.split == "train"]
        if any(part.split == "validation" for part in parts):
            return parts
        sampled = {train[len(train) * n // SAMPLES] for n in range(SAMPLES) if train}
        return [cut for n, part in enumerate(parts) for cut in (_held_out(part) if n in sampled else [part])]

    @cached_property
    def inputs(self) -> list[Input]:
        order = sorted(self._parts, key=lambda part: self.splits.index(part.split))  # a shard has one split
        return [self._input(part) for part in order]

    def _input(self, part: _Part) -> Input:
        def version() -> list:
            stats = [path.stat() for path in (part.path, *beside(part.path))]
            return [[stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns] for stat in stats]

        size = (part.last - part.first) * open_tokens(part.path).ids.itemsize
        return Input(part.name, size, self._no_text, version, partial(_digest, part), part.split)

    @cached_property
    def shards(self) -> list[Shard]:
        return shards_of(self.inputs, lambda inputs: [[each] for each in inputs])

    def divide(self, shard: Shard) -> Iterator[tuple[str, bytes]]:
        """The text of the ids. A document of more than _CUT tokens is several. Raises UserError without a tokenizer."""
        tokenizer = self.tokenizer or self._no_text()
        part = self._part(shard)
        tokens = _tokens(part)
        for start in range(0, len(tokens.ids), _CUT):
            ids = np.asarray(tokens.ids[start : start + _CUT])
            ends = np.flatnonzero(ids == tokenizer.end_of_text) if tokens.ends is None else tokens.ends - start
            for document in np.split(ids, ends[(ends > 0) & (ends < len(ids))]):
                if text := tokenizer.decode_bytes(document):
                    yield part.split, text

    def _no_text(self) -> NoReturn:
        wanted = "config.data.tokenizer must be the one that they were made with"
        raise UserError(f"corpus {self.corpus!r} has the ids of tokens, and no text: {wanted}")

    def opened(self, shard: Shard, path: Path, meta: dict[str, Any]) -> TokenFile:
        return _Stored(path, meta, _tokens(self._part(shard)).ids)

    def index(self, shard: Shard, tokenizer: "Tokenizer", length: int, path: Path, count) -> dict[str, Any]:
        """Writes the index of a shard to `path`, and returns its meta. Raises UserError for an id that the tokenizer does
        not have, and for text that is one document where rows of whole documents, of `length`, are asked for."""
        part = self._part(shard)
        tokens = _tokens(part)
        found, ends = _counted(part, tokens, tokenizer, count)
        if tokens.ends is None and not len(ends) and length:
            what = f"no token is the end of text of config.data.tokenizer, {tokenizer.end_of_text}"
            raise UserError(f"{part.path}: {what}, so its documents are unknown: config.data.packing=stream needs none")
        sizes = np.diff(ends, prepend=0, append=len(tokens.ids))
        writer = TokenWriter(path, _DTYPE)
        writer.sizes.frombytes(sizes[sizes > 0].tobytes())
        return writer.close(length) | found | {"digest": shard.inputs[0].digest()}

    def _part(self, shard: Shard) -> _Part:
        return next(part for part in self._parts if part.name == shard.inputs[0].name)


class _Stored(TokenFile):
    """Tokens that lie in a file of another program; `path` is their index."""

    def __init__(self, path: Path, meta: dict[str, Any], ids: np.ndarray):
        super().__init__(path, meta)
        self._ids, self._records = ids, 0

    def tokens(self) -> np.ndarray:
        return np.asarray(self._ids).astype(_DTYPE)

    def read(self, starts: np.ndarray, lengths: np.ndarray) -> np.ndarray:
        before = np.cumsum(lengths) - lengths
        return np.asarray(self._ids[np.repeat(starts - before, lengths) + np.arange(lengths.sum())])


def _parts_of(path: Path) -> Iterator[_Part]:
    named = _NAMED.search(path.name.lower())
    split = "train" if not named else "validation" if named[1] else "test"
    ids = open_tokens(path).ids
    parts = max(1, ids.nbytes // PART)
    for number in range(parts):
        first, last = (len(ids) * at // parts for at in (number, number + 1))
        yield _Part(path, first, last, split)


def _held_out(part: _Part) -> list[_Part]:
    """Its beginning, for training, and its end, for validation."""
    cut = part.last - round((part.last - part.first) * HELD_OUT)
    return [part._replace(last=cut), part._replace(first=cut, split="validation")]


def _tokens(part: _Part) -> TokenIds:
    """The tokens of a part, with the ends of its documents, but for the last one, counted from its first token."""
    whole = open_tokens(part.path)
    ids = whole.ids[part.first : part.last]
    if whole.ends is None:
        return whole._replace(ids=ids)
    at = slice(*np.searchsorted(whole.ends, [part.first + 1, part.last]))
    return whole._replace(ids=ids, ends=whole.ends[at].astype(np.int64) - part.first)


def _counted(part: _Part, tokens: TokenIds, tokenizer: "Tokenizer", count) -> tuple[dict[str, int], np.ndarray]:
    """The counts of a split, by how often each id occurs; and the ends of documents, if the format does not tell them, by
    the tokenizer's end of text."""
    known = tokenizer.vocab_size
    often, ends = np.zeros(known, np.int64), []
    for start in range(0, len(tokens.ids), _CHUNK):
        chunk = np.asarray(tokens.ids[start : start + _CHUNK])
        wrong = np.flatnonzero((chunk >= known) | (chunk < 0))
        if len(wrong):
            where = f"{part.path}: token {part.first + start + wrong[0]} is id {chunk[wrong[0]]}"
            wanted = "config.data.tokenizer must be the one that the ids were made with"
            raise UserError(f"{where}, and the tokenizer has {known:,}: {wanted}")
        often += np.bincount(chunk, minlength=known)
        ends.append(np.flatnonzero(chunk == tokenizer.end_of_text) + start + (not tokens.leads))
        count(chunk.nbytes)
    characters = [len(text) - sum(byte & 0xC0 == 0x80 for byte in text) for text in tokenizer.token_bytes]
    n_bytes = int(often @ tokenizer.byte_lengths)
    found = {"n_bytes": n_bytes, "n_characters": int(often @ np.array(characters)), "n_token_bytes": n_bytes, "n_lost": 0}
    found["n_unknown"] = 0 if tokenizer.unknown is None else int(often[tokenizer.unknown])
    return found, np.concatenate(ends) if tokens.ends is None else tokens.ends


def _digest(part: _Part) -> str:
    ids = open_tokens(part.path).ids
    content = hashlib.sha256(ids.dtype.str.encode())
    for start in range(part.first, part.last, _CHUNK):
        content.update(ids[start : min(start + _CHUNK, part.last)].tobytes())
    return content.hexdigest()
