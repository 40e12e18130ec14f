"""A split of conversations in rows, read by index: rendered, tokenised, packed and cached.

A row has L tokens to read, their targets (-1 for those that are not predicted), and segment ids from 1 (0 is padding), one
for each example.
"""

import json
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path

import numpy as np

from xfresearch.data.cache import build_once, cache_root, complete, digest, write_meta
from xfresearch.data.chat.chat_files import ChatFiles
from xfresearch.data.chat.conversations import Example, chains, example_of, parts_of, turns_of
from xfresearch.data.chat.templates import Template
from xfresearch.data.corpora import open_split
from xfresearch.data.packing import positions
from xfresearch.data.pairs.pair_packing import packed_rows
from xfresearch.data.row_file import ROWS, RowSplit, RowWriter
from xfresearch.data.tokenizers import Tokenizer, tokenizer_for
from xfresearch.options.run_options import RunConfig
from xfresearch.runtime.errors import UserError
from xfresearch.runtime.files import inside
from xfresearch.runtime.progress import stage

FORMAT = 1
_CHUNK = 256  # conversations that are rendered at once
COUNTS = ("n_conversations", "n_examples", "n_longer", "n_empty", "n_bytes", "n_tokens", "n_predicted")


def prepare(config: RunConfig, split: str, corpus: str, tokenizer: Tokenizer | None = None) -> "ChatSplit":
    """The conversations of `split` of `corpus` in rows of config.sequence_length.

    Raises UserError if none of them has an answer and fits, and as templates.Template and conversations.example_of do.
    `.meta` has n_sequences, n_conversations, n_examples (more if answers cannot share one), n_tokens, n_predicted (tokens of
    answers), n_bytes, and what is left out: n_empty conversations without an answer, n_longer examples that do not fit.
    """
    tokenizer = tokenizer or tokenizer_for(config.data)
    files = open_split(corpus, split, config.data)
    assert isinstance(files, ChatFiles)
    template, length, today = Template.of(tokenizer.files), config.sequence_length, config.data.objective.today
    inputs = [FORMAT, files.identity(), split, tokenizer.digest, tokenizer.stops, template, length, today]

    def build(directory: Path) -> None:
        with stage(f"rendering {corpus} {split}", files.n_bytes(split)) as progress:
            _write(directory, _examples(files, split, template, today, tokenizer, progress), length, f"{corpus} {split}")

    return ChatSplit(build_once(cache_root(config.data) / "chat" / f"{split}-{digest(inputs)}", build, complete), length)


class ChatSplit(RowSplit):
    """A split of conversations. It has the interface of packed.PackedSplit."""

    def __init__(self, directory: Path, length: int):
        super().__init__(directory)
        self.length = length

    def read(self, indices) -> dict[str, np.ndarray]:
        """Several rows at once, as `unpack` returns them."""
        return unpack(self.records(indices, 3, self.length))


def row(examples: Sequence[Example], length: int) -> np.ndarray:
    """int32 [3, L] of examples that fit: tokens, targets, segments."""
    made = np.zeros((3, length), np.int32)
    made[1] = -1
    first = 0
    for number, (ids, predicted) in enumerate(examples, 1):
        places = slice(first, first := first + len(ids) - 1)
        made[0, places] = ids[:-1]
        made[1, places] = np.where(predicted, ids, -1)[1:]
        made[2, places] = number
    return made


def unpack(rows: np.ndarray) -> dict[str, np.ndarray]:
    """A batch from rows [n, 3, L]: tokens, targets, segments, positions int32 [n, L] and weights float32 [n, L], 1 for the
    tokens of answers."""
    tokens_BL, targets_BL, segments_BL = np.moveaxis(rows, 1, 0)
    return {
        "tokens": tokens_BL,
        "targets": np.maximum(targets_BL, 0),
        "weights": (targets_BL >= 0).astype(np.float32),
        "segments": segments_BL,
        "positions": positions(segments_BL),
    }


def _examples(
    files: ChatFiles, split: str, template: Template, today: str, tokenizer: Tokenizer, progress
) -> Iterator[tuple[list[Example], int]]:
    """The examples of each conversation, and its size in bytes."""
    read = (text for _, text in files.pairs(split))
    while chunk := list(islice(read, _CHUNK)):
        conversations = [json.loads(text) for text in chunk]
        parts = [parts_of(each["messages"]) for each in conversations]
        rendered = template.texts(conversations, parts, today)
        for text, conversation, texts in zip(chunk, conversations, rendered, strict=True):
            where = conversation["where"]
            if isinstance(texts, str):
                raise template.refusal(f"{texts} ({where})")
            if conversation.get("tools") and "tools" not in template.source:
                raise UserError(f"{where}: has tools, which the chat template of {template.file} does not read")
            yield [example_of(each, tokenizer, template.file, where) for each in chains(turns_of(texts))], len(text)
        progress.update(sum(map(len, chunk)))


def _write(directory: Path, conversations: Iterator[tuple[list[Example], int]], length: int, title: str) -> None:
    """Writes the rows of all examples that fit, and the meta of the split."""
    count = dict.fromkeys(COUNTS, 0)

    def fitting() -> Iterator[Example]:
        for examples, size in conversations:
            fits = [each for each in examples if each.sizes[0] <= length]
            count["n_empty"] += not examples
            count["n_longer"] += len(examples) - len(fits)
            count["n_conversations"] += bool(fits)
            count["n_examples"] += len(fits)
            count["n_bytes"] += size if fits else 0
            for each in fits:
                count["n_tokens"] += each.sizes[0]
                count["n_predicted"] += int(each.predicted.sum())
                yield each

    writer = RowWriter(inside(directory, ROWS))
    for examples in packed_rows(fitting(), length):
        writer.write(row(examples, length).tobytes())
    writer.close()
    if not writer.count:
        raise UserError(f"{title}: {_why_none(count, length)}")
    write_meta(directory, count | {"n_sequences": writer.count, "digest": writer.digest, "length": length})


def _why_none(count: dict[str, int], length: int) -> str:
    if count["n_longer"]:
        return f"every example with an answer is longer than config.sequence_length={length} tokens"
    return "no conversation has an answer" if count["n_empty"] else "it has no conversations"
