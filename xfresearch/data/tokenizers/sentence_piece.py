"""SentencePiece's .model files (Kudo & Richardson 2018)."""

import re
from collections.abc import Iterator

from xfresearch.data.tokenizers.added_ids import SENTINEL
from xfresearch.data.tokenizers.base import Tokenizer
from xfresearch.data.tokenizers.lossless import returns
from xfresearch.data.tokenizers.special_tokens import NO_SPECIAL_TOKENS, SpecialTokens
from xfresearch.runtime.errors import UserError

# Field numbers of sentencepiece_model.proto, which the library does not expose.
_TRAINER, _NORMALIZER = 2, 3
_SUFFIX, _BYTE_FALLBACK = 24, 35
_CHARACTER_MAP, _REMOVES_SPACES = 2, 4
_SIZES = {1: 8, 5: 4}  # bytes of a field by its wire type


class SentencePieceTokenizer(Tokenizer):
    """A SentencePiece .model, and T5's sentinels after its pieces. Invalid UTF-8 is read as U+FFFD; the unknown piece has no
    bytes."""

    def __init__(self, content: bytes, special: SpecialTokens = NO_SPECIAL_TOKENS):
        import sentencepiece

        self._sp = sentencepiece.SentencePieceProcessor(model_proto=content)
        first = self._sp.encode("a", out_type=str)
        table = [self._bytes_of(i) for i in range(self._sp.get_piece_size())]
        bos = self._control(special.begin, self._sp.bos_id())
        special_tokens = {self._sp.id_to_piece(i): i for i in range(len(table)) if self._sp.is_control(i)}
        if self._sp.is_unknown(self._sp.piece_to_id(SENTINEL.format(0))):  # T5's files do not have them
            last = len(table) + special.sentinels - 1
            special_tokens |= {SENTINEL.format(i): last - i for i in range(special.sentinels)}
            table += [b""] * special.sentinels
        super().__init__(
            table,
            {"tokenizer.model": content} | special.files,
            end_of_text=self._control(special.end, self._sp.eos_id()),
            # The .model has such an id whether or not models were trained with it: only the settings files tell.
            begin_of_text=bos if special.adds_begin else None,
            stops=special.stops,
            dummy_prefix=bool(first) and first[0].startswith("\u2581"),
            special_tokens=special_tokens,
            unknown=self._sp.unk_id(),
            bos=bos,
        )
        self.lossless = "text" if _keeps_characters(content) and returns(self) else ""

    def _encode(self, text: bytes) -> list[int]:
        return self._sp.encode(text.decode("utf-8", "replace"))

    def _control(self, name: str, otherwise: int) -> int | None:
        """The id of the piece called `name`, else `otherwise`, the id in the .model, which is -1 for none."""
        i = self._sp.piece_to_id(name)
        i = otherwise if self._sp.is_unknown(i) else i
        return i if i >= 0 else None

    def _bytes_of(self, i: int) -> bytes:
        if self._sp.is_control(i) or self._sp.is_unknown(i) or self._sp.is_unused(i):
            return b""
        return piece_bytes(self._sp.id_to_piece(i))


def piece_bytes(piece: str) -> bytes:
    """The bytes of a SentencePiece piece: <0x0A> is a byte, U+2581 is a space."""
    byte = re.fullmatch(r"<0x([0-9A-Fa-f]{2})>", piece)
    return bytes([int(byte[1], 16)]) if byte else piece.replace("\u2581", " ").encode()


def _keeps_characters(content: bytes) -> bool:
    """Whether unknown characters become bytes, and the normaliser replaces no character and removes no space."""
    messages = {_TRAINER: b"", _NORMALIZER: b""}
    for number, value in _fields(content):
        if number in messages and isinstance(value, bytes):
            messages[number] += value  # several fields are the parts of one message
    trainer, normalizer = (dict(_fields(message)) for message in messages.values())
    alters = normalizer.get(_CHARACTER_MAP) or normalizer.get(_REMOVES_SPACES, 1) or trainer.get(_SUFFIX)
    return bool(trainer.get(_BYTE_FALLBACK)) and not alters


def _fields(message: bytes) -> Iterator[tuple[int, int | bytes]]:
    """(number, value) of each field of a protocol buffer. Raises UserError for a group, which no model has."""
    at = 0
    while at < len(message):
        key, at = _varint(message, at)
        number, wire_type = key >> 3, key & 7
        if wire_type == 0:
            value, at = _varint(message, at)
            yield number, value
            continue
        if wire_type == 2:  # a string, with its size in front
            size, at = _varint(message, at)
        elif wire_type in _SIZES:
            size = _SIZES[wire_type]
        else:
            raise UserError(f"not a valid SentencePiece model: field {number} has wire type {wire_type}")
        yield number, message[at : at + size]
        at += size


def _varint(message: bytes, at: int) -> tuple[int, int]:
    """The varint at offset `at`, with seven bits in each byte, and the offset of its end."""
    number = 0
    shift = 0
    while message[at] & 0x80:
        number |= (message[at] & 0x7F) << shift
        shift += 7
        at += 1
    return number | message[at] << shift, at + 1
