"""Tokenises a split once, packs it once and reads it by index. Two cached directories: tokens/ and packed/."""

import os
from collections import deque
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from xfresearch.data import coverage, packing
from xfresearch.data.cache import build_once, cache_root, complete, digest, read_meta, write_meta
from xfresearch.data.corpora import open_split
from xfresearch.data.row_file import RowFile, RowWriter
from xfresearch.data.tokenizers import Tokenizer, tokenizer_for
from xfresearch.options.run_options import DataConfig, RunConfig
from xfresearch.runtime.errors import UserError
from xfresearch.runtime.files import inside
from xfresearch.runtime.opening import open_to_read
from xfresearch.runtime.progress import stage

FORMAT = 5
_ROWS = "sequences.array_record"


class PackedSplit:
    """A split in sequences of L tokens, read by index from an ArrayRecord file."""

    def __init__(self, directory: Path):
        self.directory = directory
        self.meta = read_meta(directory)
        self.digest = self.meta["digest"]  # of the sequences
        self._rows = RowFile(directory / _ROWS)

    def __len__(self) -> int:
        return self.meta["n_sequences"]

    def __getitem__(self, i: int) -> dict[str, np.ndarray]:
        """tokens, targets, segments, positions int32[L] and weights float32[L], 0 for a position without a target."""
        if not -len(self) <= i < len(self):
            raise IndexError(f"sequence {i} of {len(self)}")
        return {name: values[0] for name, values in self.read([i % len(self)]).items()}

    @property
    def byte_scale(self) -> float:
        """Bytes of the text that come back for each byte of its tokens by the tokenizer's table: 1 for a tokenizer that
        returns any bytes unchanged. Others may count a space in front, which the text does not have."""
        return (self.meta["n_bytes"] - self.meta["n_lost"]) / max(self.meta["n_token_bytes"], 1)

    def read(self, indices) -> dict[str, np.ndarray]:
        """Several sequences at once: arrays [n, L]."""
        records = self._rows.read(indices)
        rows = np.frombuffer(b"".join(records), self.meta["dtype"])
        rows = rows.reshape(len(records), -1, self.meta["sequence_length"] + 1)
        return packing.unpack(rows, _pad(rows.dtype))


def prepare(config: RunConfig, split: str, corpus: str, tokenizer: Tokenizer | None = None) -> PackedSplit:
    """`split` of `corpus`, tokenised (by default with the tokenizer of `config.data`), packed and cached.

    Raises UserError if the corpus is too short.

    `.meta` holds n_sequences, n_tokens (with separators), n_predictions, n_documents, n_bytes and n_characters (of the text
    only), n_token_bytes (of its tokens, by the tokenizer's table), n_unknown and n_lost (coverage.py), fill, the share of
    tokens that are not padding, and a digest of the sequences.
    """
    tokenizer = tokenizer or tokenizer_for(config.data)
    inputs = _inputs(config.data, split, corpus, tokenizer)
    key = digest([inputs, config.sequence_length])

    def build(directory: Path) -> None:
        tokens = _tokens_directory(config.data, split, corpus, tokenizer, inputs)
        _pack(tokens, directory, config, split, corpus)

    return PackedSplit(
        build_once(cache_root(config.data) / "packed" / f"{_name(corpus, split)}-{key}", build, complete)
    )


def stream_tokens(
    config: RunConfig, split: str, corpus: str | None = None, tokenizer: Tokenizer | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """All tokens of a split in order, int32[n], and the document number of each, int32[n].

    A separator belongs to the document before it. The cache, separators, default `corpus` and default `tokenizer` are
    those of `prepare`.
    """
    corpus = corpus or config.data.corpus[0]
    tokenizer = tokenizer or tokenizer_for(config.data)
    inputs = _inputs(config.data, split, corpus, tokenizer)
    directory = _tokens_directory(config.data, split, corpus, tokenizer, inputs)
    tokens, offsets = _read_tokens(directory)
    return tokens.astype(np.int32), np.repeat(np.arange(len(offsets) - 1, dtype=np.int32), np.diff(offsets))


def _inputs(data: DataConfig, split: str, corpus: str, tokenizer: Tokenizer) -> dict:
    """All inputs that determine the tokens of a split, for the cache key."""
    opened = open_split(corpus, split, data)
    return {
        "format": FORMAT,
        "corpus": opened.identity(),
        "split": split,
        "tokenizer": tokenizer.digest,
        "packing": data.packing,
    }


def _name(corpus: str, split: str) -> str:
    return "".join(c if c.isalnum() else "_" for c in f"{corpus.partition(':')[0]}-{split}")


def _tokens_directory(data: DataConfig, split: str, corpus: str, tokenizer: Tokenizer, inputs: dict) -> Path:
    def build(directory: Path) -> None:
        _tokenise(open_split(corpus, split, data), split, corpus, tokenizer, data, directory)

    return build_once(cache_root(data) / "tokens" / f"{_name(corpus, split)}-{digest(inputs)}", build, complete)


def _tokenise(opened, split: str, corpus: str, tokenizer: Tokenizer, data: DataConfig, directory: Path) -> None:
    """Writes tokens.bin and offsets.bin.

    Each document starts with begin_of_text if the tokenizer has one. end_of_text separates documents; with
    data.packing='documents' it also ends the last one. In a stream, one token is both if they are the same.
    """
    dtype = np.uint16 if tokenizer.vocab_size < 2**16 else np.uint32  # the largest value is reserved for padding
    separator = np.array([tokenizer.end_of_text], dtype).tobytes()
    begin = [] if tokenizer.begin_of_text is None else [tokenizer.begin_of_text]
    separator_begins = begin == [tokenizer.end_of_text] and data.packing == "stream"
    lengths: list = []
    count = dict.fromkeys(("n_bytes", "n_characters", "n_token_bytes", "n_unknown", "n_lost"), 0)
    with (directory / "tokens.bin").open("wb") as file:
        documents = _counted(opened.documents(split), count, f"tokenising {corpus} {split}", opened.n_bytes(split))
        for ids, counts, starts in _encoded(documents, tokenizer, data.workers or os.cpu_count() or 1):
            if starts and lengths:
                file.write(separator)
                lengths[-1] += 1
            if starts:
                own = [] if separator_begins and lengths else begin
                file.write(np.array(own, dtype).tobytes())
                lengths.append(len(own))
            file.write(ids.astype(dtype).tobytes())
            lengths[-1] += len(ids)
            count["n_token_bytes"] += int(tokenizer.byte_lengths[ids].sum())
            count |= {name: count[name] + number for name, number in counts.items()}
        if lengths and data.packing == "documents":
            file.write(separator)
            lengths[-1] += 1
    np.cumsum([0, *lengths], dtype=np.int64).tofile(directory / "offsets.bin")
    held_out = getattr(opened, "holds_out", False) and split == "validation"
    meta = {"corpus": corpus, "split": split, "held_out_of_train_by_hash": held_out, "dtype": np.dtype(dtype).name}
    count |= {"n_tokens": sum(lengths), "n_documents": len(lengths)}
    write_meta(directory, {**meta, **count})


def _counted(documents: Iterator[bytes], count: dict, title: str, total: int) -> Iterator[bytes]:
    """The non-empty documents. Adds their bytes and characters to `count` and shows the progress."""
    with stage(title, total) as progress:
        for text in filter(None, documents):
            count["n_bytes"] += len(text)
            # Every byte but a UTF-8 continuation byte (10xxxxxx) starts a character.
            count["n_characters"] += int(np.count_nonzero(np.frombuffer(text, np.uint8) & 0xC0 != 0x80))
            yield text
            progress.update(len(text))


def _encoded(documents: Iterator[bytes], tokenizer: Tokenizer, workers: int) -> Iterator[tuple[np.ndarray, dict, bool]]:
    """The ids of each piece of each document in order with their coverage, and whether the piece starts a document. Encodes
    in threads.

    Threads suffice because the tokenizer libraries release the GIL. Processes would need importable code, a fork next
    to JAX, or a guard `if __name__ == "__main__"`.
    """

    def encode(piece: bytes, starts: bool) -> tuple[np.ndarray, dict, bool]:
        ids = tokenizer.encode(piece)
        return ids, coverage.counts(tokenizer, piece, ids), starts

    waiting: deque = deque()
    with ThreadPoolExecutor(workers) as pool:
        for text in documents:
            for number, piece in enumerate(tokenizer.pieces(text)):
                waiting.append(pool.submit(encode, piece, number == 0))
                if len(waiting) > 4 * workers:
                    yield waiting.popleft().result()
        for each in waiting:
            yield each.result()


def _read_tokens(directory: Path) -> tuple[np.ndarray, np.ndarray]:
    meta = read_meta(directory)
    dtype = np.dtype(meta["dtype"])
    with open_to_read(inside(directory, "tokens.bin")) as file:
        tokens = np.memmap(file, dtype, "r") if meta["n_tokens"] else np.zeros(0, dtype)
    # Slices of an array are several times as fast as those of a memmap.
    with open_to_read(inside(directory, "offsets.bin")) as file:
        return np.asarray(tokens), np.fromfile(file, np.int64)


def _pad(dtype) -> int:
    return int(np.iinfo(dtype).max)


def _pack(source: Path, directory: Path, config: RunConfig, split: str, corpus: str) -> None:
    length = config.sequence_length
    tokens, offsets = _read_tokens(source)
    needed = length + 1 if split == "train" else 2  # other splits may be shorter than a sequence: they are padded
    if len(tokens) < needed:
        raise UserError(
            f"corpus {corpus!r}, split {split!r}: it has {len(tokens)} tokens; one sequence needs at least {needed}"
            f" with config.sequence_length={length}"
        )
    dtype = tokens.dtype
    if config.data.packing == "documents":
        dtype = dtype if length < _pad(dtype) else np.dtype(np.uint32)  # the rows also hold segment ids
        rows = packing.document_rows(tokens, offsets, length, _pad(dtype))
    else:
        rows = packing.stream_rows(tokens, length, _pad(dtype), keep_last=split != "train")
    writer = RowWriter(directory / _ROWS)
    filled = segments = 0
    pad = _pad(dtype)
    with stage(f"packing {corpus} {split}", len(tokens), "tokens") as progress:
        for row in map(np.atleast_2d, rows):
            writer.write(row.astype(dtype).tobytes())
            real = int(np.count_nonzero(row[0] != pad))
            documents = int(row[1].max()) if len(row) == 2 else 1
            filled += real
            segments += documents
            progress.update(real - documents)  # the last token of a row is the first one of the next
        writer.close()
    meta = {name: value for name, value in read_meta(source).items() if name != "files"}
    meta |= {"packing": config.data.packing, "sequence_length": length, "dtype": dtype.name}
    meta |= {
        "n_sequences": writer.count,
        "n_predictions": filled - segments,
        "digest": writer.digest,
        "fill": filled / (writer.count * (length + 1)),
    }
    write_meta(directory, meta)
