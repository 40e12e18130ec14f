"""The formats whose values the fuzzers damage. Each has a function that reads bytes as a JSON value, and one that writes it.

A reader raises ValueError or RecursionError for content of another format. A writer returns None for a value that its format
cannot hold.
"""

import json
import struct

from google.protobuf import json_format
from google.protobuf.message import DecodeError
from sentencepiece.sentencepiece_model_pb2 import ModelProto


def _read_json(content: bytes):
    return json.loads(content)


def _write_json(value) -> bytes:
    return json.dumps(value).encode("utf-8", "surrogatepass")


def _read_sentence_piece(content: bytes) -> dict:
    try:
        model = ModelProto.FromString(content)
    except DecodeError as error:
        raise ValueError from error
    if not model.pieces:
        raise ValueError("other content that is a valid protocol buffer")
    return json_format.MessageToDict(model, use_integers_for_enums=True)


def _write_sentence_piece(value) -> bytes | None:
    try:
        return json_format.ParseDict(value, ModelProto()).SerializeToString()
    except (json_format.ParseError, OverflowError, SystemError):  # for infinity, and for half of a surrogate pair
        return None


def _read_llama2c(content: bytes) -> list:
    """[[length of the longest piece, pieces up to the last byte], [score, piece], ...]: without a byte a file is refused."""
    pieces, at = [], 4
    while at < len(content):
        if at + 8 > len(content):
            raise ValueError("cut in a score or a length")
        score, size = struct.unpack_from("<fi", content, at)
        if not 0 <= size <= len(content) - at - 8:
            raise ValueError("cut in a piece")
        pieces.append([score, content[at + 8 : at + 8 + size].decode("latin1")])
        at += 8 + size
    longest = int.from_bytes(content[:4], "little")
    return [[longest, _records(pieces[:259]).decode("latin1")], *pieces[259:]]


def _write_llama2c(value) -> bytes | None:
    try:
        (longest, first_pieces), *words = value
        return struct.pack("<i", longest) + first_pieces.encode("latin1") + _records(words)
    except (LookupError, TypeError, ValueError, AttributeError, struct.error, OverflowError):
        return None


def _records(pieces: list) -> bytes:
    return b"".join(struct.pack("<fi", score, len(piece)) + piece.encode("latin1") for score, piece in pieces)


FORMATS = ((_read_json, _write_json), (_read_sentence_piece, _write_sentence_piece), (_read_llama2c, _write_llama2c))
