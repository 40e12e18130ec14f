"""What every kind of tokenizer shares, and the simplest kind, whose ids are bytes."""

import codecs
import hashlib
import re
from collections.abc import Iterator

import numpy as np
from etils import epath

from xfresearch.data.cache import digest

# Where no tokenizer's word can reach across: a single space between two visible ASCII characters.
_JOINT = re.compile(rb"(?<=[\x21-\x7e]) (?=[\x21-\x7e])")


class Tokenizer:
    """What every kind shares. A kind gives `_encode` and what its `files`, which `save` writes, say.

    `end_of_text` stands between texts. `begin_of_text` is what models that were trained so read before every text, or
    None. A text being written is over at any of `stops`, of which `end_of_text` is the first.
    `lossless` is what comes back from `encode` and `decode` as it was: 'bytes' (whatever they are), 'text' (all UTF-8
    but U+2581, which is read as a space), or '' where the file's normaliser or vocabulary alters some texts.
    """

    def __init__(
        self,
        token_bytes: list[bytes],
        files: dict[str, bytes],
        end_of_text: int | None = None,
        begin_of_text: int | None = None,
        stops: tuple[int, ...] = (),
        lossless: str = "",
        dummy_prefix: bool = False,
    ):
        if end_of_text is None:  # the next text's beginning tells two apart as well
            end_of_text = begin_of_text
        if end_of_text is None:  # the file names no separator: one id more
            end_of_text, token_bytes = len(token_bytes), [*token_bytes, b""]
        self.token_bytes, self.files, self.lossless = token_bytes, files, lossless
        self.end_of_text, self.begin_of_text = end_of_text, begin_of_text
        self.vocab_size = len(token_bytes)
        self.stops = tuple(dict.fromkeys([end_of_text, *(i for i in stops if 0 <= i < self.vocab_size)]))
        self.byte_lengths = np.array([len(token) for token in token_bytes], np.int32)
        self.digest = digest({name: hashlib.sha256(content).hexdigest() for name, content in files.items()})
        self._dummy_prefix = dummy_prefix
        self._joint = self._find_joint()

    def encode(self, text: bytes) -> np.ndarray:
        """int32[n] ids of one whole document, without separators; text that looks like a special token stays text."""
        return np.asarray(self._encode(text), np.int32)

    def decode(self, ids) -> str:
        """The text of `ids`; bytes that are not UTF-8 become U+FFFD, special ids nothing."""
        return self._without_prefix(self.decode_bytes(ids)).decode("utf-8", "replace")

    def decode_bytes(self, ids) -> bytes:
        return b"".join([self.token_bytes[int(i)] for i in ids])

    def decode_stream(self, begins: bool = True) -> "DecodeStream":
        """An incremental decoder, whose `push(ids)` returns the text that is complete so far. `begins`: the ids start a
        text, so that a space that their first word has only because it is the first is left out."""
        return DecodeStream(self, begins)

    def pieces(self, text: bytes, size: int = 1 << 20) -> Iterator[bytes]:
        """`text` in pieces of at least `size` bytes whose encodings, concatenated, are the encoding of `text`."""
        start = 0
        while self._joint and len(text) - start > size:
            joint = self._joint.search(text, start + size)
            if not joint:
                break
            yield text[start : joint.start()]
            start = joint.start() if self._joint_keeps_space else joint.end()
        yield text[start:]

    def save(self, directory) -> None:
        """Write the files that `load_tokenizer(directory)` reads."""
        directory = epath.Path(directory)
        directory.mkdir(parents=True, exist_ok=True)
        for name, content in self.files.items():
            temporary = directory / f".{name}.tmp"
            temporary.write_bytes(content)
            temporary.replace(directory / name)

    def _find_joint(self) -> re.Pattern | None:
        """Where `pieces` may cut, tried out: not every file's normaliser leaves a place."""
        probes = [(b"return x;", b"(a, 42) = b"), (b"The end", b"Of 1984"), (b"a \n b.", b"\"c\" - 'd'")]

        def encodes(left: bytes, space: bytes, right: bytes) -> bool:
            whole = self._encode(left + b" " + right)
            return list(whole) == [*self._encode(left), *self._encode(space + right)]

        self._joint_keeps_space = all(encodes(left, b" ", right) for left, right in probes)
        drops_space = all(encodes(left, b"", right) for left, right in probes)
        return _JOINT if self._joint_keeps_space or drops_space else None

    def _without_prefix(self, text: bytes) -> bytes:
        return text[1:] if self._dummy_prefix and text.startswith(b" ") else text


class DecodeStream:
    """Turns ids into text as they come; a character whose bytes are not all there waits for the rest."""

    def __init__(self, tokenizer: Tokenizer, begins: bool):
        self._tokenizer, self._fresh = tokenizer, begins
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, ids) -> str:
        """The text that `ids` (one id or several) complete."""
        text = self._tokenizer.decode_bytes(np.atleast_1d(ids))
        if self._fresh and text:
            text, self._fresh = self._tokenizer._without_prefix(text), False
        return self._decoder.decode(text)

    def flush(self) -> str:
        """What is left at the end: U+FFFD for an incomplete character."""
        return self._decoder.decode(b"", final=True)


class ByteTokenizer(Tokenizer):
    """Ids 0 to 255 are the bytes, 256 is end_of_text."""

    def __init__(self):
        files = {"bytes.json": b'{"kind": "bytes"}\n'}
        super().__init__([bytes([i]) for i in range(256)], files, lossless="bytes")

    def _encode(self, text: bytes) -> np.ndarray:
        return np.frombuffer(text, np.uint8)
