"""Tokenizers behind one interface: bytes, Hugging Face `tokenizers` (loaded, or BPE trained here), SentencePiece.

Text goes in as bytes and every id knows the bytes that it stands for, so nothing is lost between file and model.
"""

import codecs
import hashlib
import json
import re
from collections.abc import Iterator

import numpy as np
from etils import epath

from xfresearch.config import DataConfig
from xfresearch.data.cache import build_once, cache_root, digest
from xfresearch.errors import UserError, nearest

END_OF_TEXT = "<|endoftext|>"
_SEPARATORS = (END_OF_TEXT, "<|end_of_text|>", "</s>", "<eos>", "<|eot_id|>", "<|im_end|>", "[EOS]")
# Where no tokenizer's word can reach across: a single space between two visible ASCII characters.
_JOINT = re.compile(rb"(?<=[\x21-\x7e]) (?=[\x21-\x7e])")


class Tokenizer:
    """What every kind shares. A kind gives `_encode`, `token_bytes`, `end_of_text` and the `files` that save it."""

    def __init__(
        self, token_bytes: list[bytes], end_of_text: int | None, files: dict[str, bytes], dummy_prefix: bool = False
    ):
        if end_of_text is None:  # the file names no separator: one id more
            end_of_text, token_bytes = len(token_bytes), [*token_bytes, b""]
        self.token_bytes, self.end_of_text, self.files = token_bytes, end_of_text, files
        self.vocab_size = len(token_bytes)
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

    def decode_stream(self) -> "DecodeStream":
        """An incremental decoder, whose `push(ids)` returns the text that is complete so far."""
        return DecodeStream(self)

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

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer, self._fresh = tokenizer, True
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
        super().__init__([bytes([i]) for i in range(256)], None, {"bytes.json": b'{"kind": "bytes"}\n'})

    def _encode(self, text: bytes) -> np.ndarray:
        return np.frombuffer(text, np.uint8)


class HuggingFaceTokenizer(Tokenizer):
    """A tokenizer.json of Hugging Face `tokenizers`: byte-level, or with SentencePiece's spaces and byte fallback."""

    def __init__(self, content: str):
        import tokenizers

        self._hf = tokenizers.Tokenizer.from_str(content)
        self._hf.no_truncation()
        self._hf.no_padding()
        self._hf.encode_special_tokens = True  # a document that quotes <|endoftext|> does not end there
        table, byte_level = _token_bytes(self._hf, content)
        self._byte_ids = {token[0]: i for i, token in reversed(list(enumerate(table))) if len(token) == 1}
        names = (self._hf.token_to_id(name) for name in _SEPARATORS)
        separator = next((i for i in names if i is not None), None)
        if separator is not None:
            table[separator] = b""
        super().__init__(
            table, separator, {"tokenizer.json": content.encode()}, dummy_prefix=self._adds_space(byte_level)
        )

    def _encode(self, text: bytes) -> list[int]:
        try:
            return self._encode_text(text.decode("utf-8"))
        except UnicodeDecodeError:
            runs = re.split("([\udc80-\udcff])", text.decode("utf-8", "surrogateescape"))
            stray = {chr(0xDC00 + byte): [i] for byte, i in self._byte_ids.items() if byte >= 128}
            return [
                i
                for run in runs
                if run
                for i in (stray.get(run) or self._encode_text(run.encode("utf-8", "replace").decode()))
            ]

    def _encode_text(self, text: str) -> list[int]:
        # encode_batch_fast, unlike encode, lets go of the interpreter's lock, so that threads tokenise in parallel
        return self._hf.encode_batch_fast([text], add_special_tokens=False)[0].ids if text else []

    def _adds_space(self, byte_level: bool) -> bool:
        first = [] if byte_level else self._encode_text("a")
        return bool(first) and self._hf.id_to_token(first[0]).startswith("\u2581")


class SentencePieceTokenizer(Tokenizer):
    """A SentencePiece .model. Bytes that are not UTF-8 are read as U+FFFD; an unknown piece has no bytes."""

    def __init__(self, content: bytes):
        import sentencepiece

        self._sp = sentencepiece.SentencePieceProcessor(model_proto=content)
        end = self._sp.eos_id()
        first = self._sp.encode("a", out_type=str)
        prefix = bool(first) and first[0].startswith("\u2581")
        table = [self._bytes_of(i) for i in range(self._sp.get_piece_size())]
        super().__init__(table, end if end >= 0 else None, {"tokenizer.model": content}, dummy_prefix=prefix)

    def _encode(self, text: bytes) -> list[int]:
        return self._sp.encode(text.decode("utf-8", "replace"))

    def _bytes_of(self, i: int) -> bytes:
        if self._sp.is_control(i) or self._sp.is_unknown(i) or self._sp.is_unused(i):
            return b""
        return _piece_bytes(self._sp.id_to_piece(i))


def _piece_bytes(piece: str) -> bytes:
    """Bytes of a SentencePiece piece: <0x0A> is a byte, U+2581 a space."""
    byte = re.fullmatch(r"<0x([0-9A-Fa-f]{2})>", piece)
    return bytes([int(byte[1], 16)]) if byte else piece.replace("\u2581", " ").encode()


def _token_bytes(hf, content: str) -> tuple[list[bytes], bool]:
    """The bytes of every id of a Hugging Face tokenizer, and whether it is byte-level; UserError for other kinds."""
    kinds = set(re.findall(r'"type":\s*"(\w+)"', json.dumps(json.loads(content).get("decoder") or {})))
    vocab = hf.get_vocab(with_added_tokens=True)
    added = hf.get_added_tokens_decoder()
    if "ByteLevel" in kinds:
        byte_of = {character: byte for byte, character in _byte_characters().items()}
        to_bytes = lambda token: bytes(byte_of[character] for character in token)  # noqa: E731
    elif kinds & {"ByteFallback", "Metaspace"}:
        to_bytes = _piece_bytes
    else:
        raise UserError(
            f"tokenizer.json has decoder {', '.join(kinds) or 'none'}; it must be ByteLevel, Metaspace or ByteFallback"
        )
    table = [b""] * (max(vocab.values()) + 1)
    for token, i in vocab.items():
        if i not in added:
            table[i] = to_bytes(token)
        elif not added[i].special:
            table[i] = token.encode()
    unknown = getattr(hf.model, "unk_token", None)
    if unknown in vocab:
        table[vocab[unknown]] = b""
    return table, "ByteLevel" in kinds


def _byte_characters() -> dict[int, str]:
    """GPT-2's printable stand-in for each byte."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {byte: chr(byte) for byte in printable} | {byte: chr(256 + n) for n, byte in enumerate(others)}


def vocab_size(data: DataConfig) -> int:
    """Size of the vocabulary that `tokenizer_for(data)` has, without training it."""
    if data.tokenizer == "bytes":
        return 257
    return data.bpe_vocab if data.tokenizer == "bpe" else tokenizer_for(data).vocab_size


def tokenizer_for(data: DataConfig) -> Tokenizer:
    """The tokenizer that `data` names; 'bpe' is trained on the train splits once and then read from the cache."""
    if data.tokenizer == "bytes":
        return ByteTokenizer()
    if data.tokenizer != "bpe":
        return load_tokenizer(data.tokenizer)
    from xfresearch.data import bpe

    return load_tokenizer(
        build_once(cache_root(data) / "tokenizers" / bpe.key(data), lambda directory: bpe.train(data, directory))
    )


def load_tokenizer(path) -> Tokenizer:
    """The tokenizer in a directory or file: tokenizer.json, GPT-2's two files, a SentencePiece .model, or `save`'s."""
    path = epath.Path(path).expanduser()
    file = _tokenizer_file(path) if path.is_dir() else path
    if not file.is_file():
        raise UserError(
            f"config.data.tokenizer={str(path)!r} is not allowed: it must be 'bytes', 'bpe', or the path of"
            f" an existing tokenizer file or directory{nearest(str(path), ('bytes', 'bpe'))}"
        )
    try:
        return _load(file)
    except UserError as error:
        raise UserError(f"{file}: {error}") from None
    except Exception as error:  # the libraries raise bare Exception, RuntimeError, KeyError... for a broken file
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise UserError(f"{file}: not a tokenizer that can be read: {reason}") from None


FILES = ("bytes.json", "tokenizer.json", "tokenizer.model", "vocab.json", "encoder.json")
_MERGES = {"vocab.json": "merges.txt", "encoder.json": "vocab.bpe"}


def _tokenizer_file(directory: epath.Path) -> epath.Path:
    found = [directory / name for name in FILES if (directory / name).is_file()] or sorted(directory.glob("*.model"))
    if not found:
        raise UserError(
            f"config.data.tokenizer={str(directory)!r}: the directory holds none of {', '.join(FILES)} or a .model"
        )
    return found[0]


def _load(file: epath.Path) -> Tokenizer:
    if file.suffix == ".model":
        return SentencePieceTokenizer(file.read_bytes())
    content = file.read_text(encoding="utf-8")
    values = json.loads(content)
    if values == {"kind": "bytes"}:
        return ByteTokenizer()
    if isinstance(values.get("model"), dict):
        return HuggingFaceTokenizer(content)
    return HuggingFaceTokenizer(_gpt2_tokenizer(file))


def _gpt2_tokenizer(vocabulary: epath.Path) -> str:
    """tokenizer.json of GPT-2's two files, which share a prefix: [gpt2_]encoder.json and [gpt2_]vocab.bpe."""
    import tokenizers
    from tokenizers import decoders, models, pre_tokenizers

    names = [
        vocabulary.name.removesuffix(name) + merges
        for name, merges in _MERGES.items()
        if vocabulary.name.endswith(name)
    ]
    if not names:
        raise UserError("neither a tokenizer.json nor one of GPT-2's vocabularies, named *vocab.json or *encoder.json")
    merges = vocabulary.with_name(names[0])
    if not merges.is_file():
        raise UserError(f"its second file {names[0]} is missing")
    hf = tokenizers.Tokenizer(models.BPE.from_file(str(vocabulary), str(merges)))
    hf.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    hf.decoder = decoders.ByteLevel()
    hf.add_special_tokens([END_OF_TEXT])
    return hf.to_str()
