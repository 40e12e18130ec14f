"""SentencePiece's .model files (Kudo & Richardson 2018)."""

import re

from xfresearch.data.tokenizers.base import Tokenizer
from xfresearch.data.tokenizers.beside import NOTHING, Beside

# Fields of sentencepiece_model.proto, which the library does not give away.
_TRAINER, _NORMALIZER = 2, 3
_SUFFIX, _BYTE_FALLBACK = 24, 35
_CHARACTER_MAP, _REMOVES_SPACES = 2, 4


class SentencePieceTokenizer(Tokenizer):
    """A SentencePiece .model. Bytes that are not UTF-8 are read as U+FFFD; an unknown piece has no bytes."""

    def __init__(self, content: bytes, beside: Beside = NOTHING):
        import sentencepiece

        self._sp = sentencepiece.SentencePieceProcessor(model_proto=content)
        first = self._sp.encode("a", out_type=str)
        table = [self._bytes_of(i) for i in range(self._sp.get_piece_size())]
        super().__init__(
            table,
            {"tokenizer.model": content} | beside.files,
            end_of_text=self._control(beside.end, self._sp.eos_id()),
            # The file has an id for it whether or not a model was trained with it: only its folder knows.
            begin_of_text=self._control(beside.begin, self._sp.bos_id()) if beside.adds_begin else None,
            stops=beside.stops,
            lossless=_lossless(content),
            dummy_prefix=bool(first) and first[0].startswith("\u2581"),
        )

    def _encode(self, text: bytes) -> list[int]:
        return self._sp.encode(text.decode("utf-8", "replace"))

    def _control(self, name: str, otherwise: int) -> int | None:
        """The id of a piece by its name, or the file's own, which is -1 where it has none."""
        i = self._sp.piece_to_id(name)
        i = otherwise if self._sp.is_unknown(i) else i
        return i if i >= 0 else None

    def _bytes_of(self, i: int) -> bytes:
        if self._sp.is_control(i) or self._sp.is_unknown(i) or self._sp.is_unused(i):
            return b""
        return piece_bytes(self._sp.id_to_piece(i))


def piece_bytes(piece: str) -> bytes:
    """Bytes of a SentencePiece piece: <0x0A> is a byte, U+2581 a space."""
    byte = re.fullmatch(r"<0x([0-9A-Fa-f]{2})>", piece)
    return bytes([int(byte[1], 16)]) if byte else piece.replace("\u2581", " ").encode()


def _lossless(content: bytes) -> str:
    """'text' where unknown characters are spelt as bytes, and no character is mapped to another or space removed."""
    model = _fields(content)
    trainer, normalizer = _fields(model.get(_TRAINER, b"")), _fields(model.get(_NORMALIZER, b""))
    alters = normalizer.get(_CHARACTER_MAP) or normalizer.get(_REMOVES_SPACES, 1) or trainer.get(_SUFFIX)
    return "text" if trainer.get(_BYTE_FALLBACK) and not alters else ""


def _fields(message: bytes) -> dict[int, int | bytes]:
    """The fields of a protocol buffer by their number, of repeated ones the last."""
    found, at = {}, 0
    while at < len(message):
        key, at = _varint(message, at)
        number, kind = key >> 3, key & 7
        if kind == 0:
            found[number], at = _varint(message, at)
            continue
        size, at = _varint(message, at) if kind == 2 else ({1: 8, 5: 4}[kind], at)
        found[number], at = message[at : at + size], at + size
    return found


def _varint(message: bytes, at: int) -> tuple[int, int]:
    """The number at `at`, seven bits in each byte, and where it ends."""
    number, shift = 0, 0
    while message[at] & 0x80:
        number, shift, at = number | (message[at] & 0x7F) << shift, shift + 7, at + 1
    return number | message[at] << shift, at + 1
