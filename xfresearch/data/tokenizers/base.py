"""The base class of all tokenizers, and the byte tokenizer."""

import codecs
import hashlib
import re
from collections.abc import Iterator, Sequence

import numpy as np

from xfresearch.data.cache import digest
from xfresearch.data.tokenizers.special_tokens import TEMPLATES
from xfresearch.runtime.files import inside, write_bytes

# A safe cut: in front of a single space between two visible ASCII characters. No token may extend across it.
_SAFE_CUT = re.compile(rb"(?<=[\x21-\x7e]) (?=[\x21-\x7e])")
_EXTENDS_ACROSS_A_CUT = re.compile(rb"[\x21-\x7e] ")


class Tokenizer:
    """The base class of all tokenizers. A subclass implements `_encode` and passes the values of its `files`.

    `end_of_text` separates texts. `begin_of_text` precedes every text, for models trained that way, or is None. `bos` is the
    token that the settings name as the beginning of a text, whether or not texts begin with it, or else begin_of_text. The
    decoder of a model with an encoder reads `decoder_start` first, by default begin_of_text, or else end_of_text.
    `forced` are the first token of every generated text, and the last one of a text of the greatest length, if a model's
    settings have them. `after_text` is what the tokenizer puts after a text, such as BERT's [SEP], or None.
    Generation stops at any of `stops`; `end_of_text` is the first of them. `unknown` stands for text that the vocabulary
    does not have, and has no bytes, or is None.
    `special_tokens` are the ids of special tokens by their text, which only `encode_special` reads as tokens.
    `lossless` tells which input `decode(encode(x))` returns unchanged: 'bytes' (any bytes), 'text' (any UTF-8 except
    U+2581, which becomes a space), or '' if the normaliser or the vocabulary alters some texts.
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
        special_tokens: dict[str, int] | None = None,
        after_text: int | None = None,
        unknown: int | None = None,
        bos: int | None = None,
    ):
        if end_of_text is None:  # begin_of_text separates texts equally well
            end_of_text = begin_of_text
        if end_of_text is None:  # the files define no separator: add an id
            end_of_text = len(token_bytes)
            token_bytes = [*token_bytes, b""]
        self.token_bytes = token_bytes
        self.files = files
        self.lossless = lossless
        self.end_of_text = end_of_text
        self.begin_of_text = begin_of_text
        self.bos = begin_of_text if bos is None else bos
        self.after_text = after_text
        self.unknown = unknown
        self.decoder_start = end_of_text if begin_of_text is None else begin_of_text
        self.forced: tuple[int | None, int | None] = (None, None)
        self.vocab_size = len(token_bytes)
        self.stops = tuple(dict.fromkeys([end_of_text, *(i for i in stops if 0 <= i < self.vocab_size)]))
        self.byte_lengths = np.array([len(token) for token in token_bytes], np.int32)
        of_ids = {name: content for name, content in files.items() if name not in TEMPLATES}
        self.digest = digest({name: hashlib.sha256(content).hexdigest() for name, content in of_ids.items()})
        self.special_tokens = special_tokens or {}
        self._dummy_prefix = dummy_prefix
        self._safe_cut = self._find_safe_cut()

    def encode(self, text: bytes) -> np.ndarray:
        """int32[n] ids of one whole document, without separators. Text that looks like a special token stays text."""
        return np.asarray(self._encode(text), np.int32)

    def _encode(self, text: bytes) -> Sequence[int] | np.ndarray:
        raise NotImplementedError

    def encode_special(self, text: str) -> list[int]:
        """The ids of a text in which special tokens, such as <|endoftext|>, are tokens."""
        if not self.special_tokens:
            return self.encode(text.encode()).tolist()
        names = sorted(self.special_tokens, key=len, reverse=True)  # of two that fit, the longer one
        parts = re.split(f"({'|'.join(map(re.escape, names))})", text)
        ids: list = []
        for part in filter(None, parts):
            special = self.special_tokens.get(part)
            ids += self.encode(part.encode()).tolist() if special is None else [special]
        return ids

    def decode(self, ids) -> str:
        """The text of `ids`. Invalid UTF-8 becomes U+FFFD; special ids give no text."""
        return self._without_prefix(self.decode_bytes(ids)).decode("utf-8", "replace")

    def decode_bytes(self, ids) -> bytes:
        return b"".join([self.token_bytes[int(i)] for i in ids])

    def piece(self, number: int) -> str:
        """The text of one id in a list of tokens, where different tokens have different texts: with a space before a word,
        and a byte that is no character as \\xe6."""
        return self.decode_bytes([number]).decode("utf-8", "backslashreplace")

    def decode_stream(self, begins: bool = True) -> "DecodeStream":
        """An incremental decoder; its `push(ids)` returns newly completed text.

        With `begins`, the ids start a text, so the decoder drops the dummy space in front of the first word.
        """
        return DecodeStream(self, begins)

    def pieces(self, text: bytes, size: int = 1 << 20) -> Iterator[bytes]:
        """`text` in pieces of at least `size` bytes. Their concatenated encodings equal the encoding of `text`."""
        start = 0
        while self._safe_cut and len(text) - start > size:
            cut = self._safe_cut.search(text, start + size)
            if not cut:
                break
            yield text[start : cut.start()]
            start = cut.start() if self._cut_keeps_space else cut.end()
        yield text[start:]

    def save(self, directory) -> None:
        """Writes the files that `load_tokenizer(directory)` reads."""
        for name, content in self.files.items():
            write_bytes(inside(directory, name), content)

    def _find_safe_cut(self) -> re.Pattern | None:
        """Where `pieces` may cut a text. Probes the tokenizer, because some normalisers allow no cut at all."""
        if _EXTENDS_ACROSS_A_CUT.search(b"\n".join(self.token_bytes)):
            return None
        probes = [(b"return x;", b"(a, 42) = b"), (b"The end", b"Of 1984"), (b"a \n b.", b"\"c\" - 'd'")]

        def encodes(left: bytes, space: bytes, right: bytes) -> bool:
            whole = self._encode(left + b" " + right)
            return list(whole) == [*self._encode(left), *self._encode(space + right)]

        # Either the right piece keeps the space, or the tokenizer itself puts a dummy space in front of it.
        self._cut_keeps_space = all(encodes(left, b" ", right) for left, right in probes)
        drops_space = self._dummy_prefix and all(encodes(left, b"", right) for left, right in probes)
        return _SAFE_CUT if self._cut_keeps_space or drops_space else None

    def _without_prefix(self, text: bytes) -> bytes:
        return text[1:] if self._dummy_prefix and text.startswith(b" ") else text


class DecodeStream:
    """Decodes ids incrementally. An incomplete UTF-8 character is held back until its remaining bytes arrive."""

    def __init__(self, tokenizer: Tokenizer, begins: bool):
        self._tokenizer = tokenizer
        self._at_start = begins
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, ids) -> str:
        """The text that `ids` (one id or several) complete."""
        text = self._tokenizer.decode_bytes(np.atleast_1d(ids))
        if self._at_start and text:
            text = self._tokenizer._without_prefix(text)
            self._at_start = False
        return self._decoder.decode(text)

    def flush(self) -> str:
        """The rest at the end of a text: U+FFFD for an incomplete character."""
        return self._decoder.decode(b"", final=True)


class ByteTokenizer(Tokenizer):
    """Ids 0 to 255 are bytes; 256 is end_of_text."""

    def __init__(self):
        files = {"bytes.json": b'{"kind": "bytes"}\n'}
        super().__init__([bytes([i]) for i in range(256)], files, lossless="bytes")

    def _encode(self, text: bytes) -> np.ndarray:
        return np.frombuffer(text, np.uint8)
