"""Makes one shard: reads its inputs, tokenises their documents, and writes the tokens of each split (shard_file.py).

The result is a pure function of the inputs, the tokenizer and the options, so that two processes that make the same shard
write the same bytes.
"""

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from xfresearch.data import coverage
from xfresearch.data.cache import content_of
from xfresearch.data.corpus_inputs import Shard, TextCorpus
from xfresearch.data.shard_file import TokenWriter
from xfresearch.data.token_corpus import TokenFiles
from xfresearch.data.tokenizers import Tokenizer
from xfresearch.runtime.errors import UserError

FORMAT = 1
_GROUP = 1 << 16  # bytes of short documents that one thread tokenises at a time
_COUNTS = ("n_bytes", "n_characters", "n_token_bytes", "n_unknown", "n_lost")


class Piece(NamedTuple):
    """A part of a document, with its split; `starts`: the first one."""

    split: str
    text: bytes
    starts: bool


def dtype_of(tokenizer: Tokenizer) -> np.dtype:
    """Two bytes where the vocabulary allows; the largest value is reserved for padding."""
    return np.dtype(np.uint16 if tokenizer.vocab_size < 2**16 else np.uint32)


def make(
    corpus: TextCorpus,
    shard: Shard,
    tokenizer: Tokenizer,
    length: int,
    threads: int,
    directory: Path,
    count: Callable[[int], None] = lambda _: None,
) -> dict[str, Any]:
    """Writes the files of a shard to `directory`. Returns its manifest: the inputs with sizes and digests, the tokenizer,
    and for each split the counts and the digest of the file. `length`: that of rows of whole documents, 0 for a stream.
    Calls count(bytes of text) for the progress. Raises UserError for any problem with the inputs."""
    if isinstance(corpus, TokenFiles):
        splits = {shard.split: corpus.index(shard, tokenizer, length, directory / _file(shard, shard.split), count)}
    else:
        splits = _tokenised(corpus, shard, tokenizer, length, threads, directory, count)
    for split, meta in splits.items():
        meta["content"] = content_of(directory / _file(shard, split))
    made = [{"name": each.name, "size": each.size, "digest": each.digest()} for each in shard.inputs]
    for each in shard.inputs:
        if each.version() != each.found[-1]:
            raise UserError(f"{each.name} has changed while it was prepared: the same command prepares it again")
    return {"format": FORMAT, "inputs": made, "tokenizer": tokenizer.digest, "splits": splits}


def _tokenised(
    corpus: TextCorpus, shard: Shard, tokenizer: Tokenizer, length: int, threads: int, directory: Path, count
) -> dict[str, dict[str, Any]]:
    """Writes the tokens of each split. Returns what TokenFile needs of it, and its counts."""
    begin, end = tokenizer.begin_of_text, tokenizer.end_of_text
    joins = begin == end and not length  # in a stream, one token between two texts is both
    last = {split: corpus.shards_with(split)[-1].number == shard.number for split in corpus.splits if shard.has(split)}
    writers: dict[str, TokenWriter] = {}
    counts = {split: dict.fromkeys(_COUNTS, 0) for split in last}
    for piece, ids, found in _encoded(_pieces(corpus.divide(shard), tokenizer, count), tokenizer, threads):
        if piece.split not in writers:
            writers[piece.split] = TokenWriter(directory / _file(shard, piece.split), dtype_of(tokenizer))
        writer = writers[piece.split]
        if piece.starts:
            if writer.sizes:
                writer.write([end])
            has_begin = begin is not None and not (joins and writer.sizes)
            writer.begin()
            writer.write([begin] if has_begin else [])
        writer.write(ids)
        counts[piece.split] |= {name: counts[piece.split][name] + number for name, number in found.items()}
    splits = {}
    for split, writer in writers.items():
        if length or not (last[split] or joins):
            writer.write([end])
        splits[split] = writer.close(length) | counts[split]
    return splits


def _file(shard: Shard, split: str) -> str:
    return file_of(shard.number, split)


def file_of(number: int, split: str) -> str:
    """The name of the file with the tokens of a split in a shard."""
    return f"{number:06}.{''.join(c if c.isalnum() else '_' for c in split)}.array_record"


def _pieces(documents: Iterable[tuple[str, bytes]], tokenizer: Tokenizer, count: Callable[[int], None]) -> Iterator[Piece]:
    for split, text in documents:
        for number, piece in enumerate(tokenizer.pieces(text) if text else ()):
            yield Piece(split, piece, number == 0)
        count(len(text))


def _encoded(pieces: Iterator[Piece], tokenizer: Tokenizer, threads: int) -> Iterator[tuple[Piece, np.ndarray, dict]]:
    """The ids of each piece in order, and its counts. Encodes in threads: the libraries of tokenizers release the GIL."""

    def encode(group: list[Piece]) -> list[tuple[Piece, np.ndarray, dict]]:
        return [(piece, *_ids(tokenizer, piece.text)) for piece in group]

    if threads == 1:
        for group in _grouped(pieces):
            yield from encode(group)
        return
    waiting: deque = deque()
    with ThreadPoolExecutor(threads) as pool:
        for group in _grouped(pieces):
            waiting.append(pool.submit(encode, group))
            if len(waiting) > 2 * threads:
                yield from waiting.popleft().result()
        for each in waiting:
            yield from each.result()


def _ids(tokenizer: Tokenizer, text: bytes) -> tuple[np.ndarray, dict]:
    ids = tokenizer.encode(text)
    # Every byte but a UTF-8 continuation byte (10xxxxxx) starts a character.
    characters = int(np.count_nonzero(np.frombuffer(text, np.uint8) & 0xC0 != 0x80))
    sizes = {"n_bytes": len(text), "n_characters": characters, "n_token_bytes": int(tokenizer.byte_lengths[ids].sum())}
    return ids, sizes | coverage.counts(tokenizer, text, ids)


def _grouped(pieces: Iterator[Piece]) -> Iterator[list[Piece]]:
    """Pieces in order, in lists of about _GROUP bytes."""
    group: list[Piece] = []
    size = 0
    for piece in pieces:
        group.append(piece)
        size += len(piece.text)
        if size >= _GROUP:
            yield group
            group, size = [], 0
    if group:
        yield group


def cores() -> int:
    """The processors that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
