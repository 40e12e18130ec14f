"""tokenizer.json of Hugging Face `tokenizers`, and GPT-2's two files, which are converted to one."""

import json
import re
from collections.abc import Callable

import numpy as np
from etils import epath

from xfresearch.data.tokenizers.base import Tokenizer
from xfresearch.data.tokenizers.bounds import require_bounded
from xfresearch.data.tokenizers.lossless import by_steps, returns
from xfresearch.data.tokenizers.sentence_piece import piece_bytes
from xfresearch.data.tokenizers.special_tokens import NO_SPECIAL_TOKENS, SpecialTokens
from xfresearch.runtime.errors import UserError
from xfresearch.runtime.files import inside, read_bytes
from xfresearch.runtime.opening import name_of, open_to_read

END_OF_TEXT = "<|endoftext|>"
_SEPARATORS = (END_OF_TEXT, "<|end_of_text|>", "</s>", "<eos>", "<|eot_id|>", "<|im_end|>", "[EOS]", "[SEP]")
MASK = "<mask>"
_ROBERTA = ("RobertaTokenizer", "BartTokenizer")  # classes with the same special tokens
MAX_GAP = 1 << 16  # ids that no token has
_MERGES = {"vocab.json": "merges.txt", "encoder.json": "vocab.bpe"}


class HuggingFaceTokenizer(Tokenizer):
    """A tokenizer.json of Hugging Face `tokenizers`: byte-level, with SentencePiece's spaces and byte fallback, or BERT's
    pieces of words, of which those that begin a word stand for a space and the piece."""

    def __init__(self, content: str, special: SpecialTokens = NO_SPECIAL_TOKENS):
        import tokenizers

        values = json.loads(content)
        require_bounded(values)
        # <|endoftext|> in a document is text, not a separator; only encode_special reads it as a token.
        self._hf, self._hf_special = (tokenizers.Tokenizer.from_str(content) for _ in range(2))
        for each, as_text in ((self._hf, True), (self._hf_special, False)):
            each.no_truncation()
            each.no_padding()
            each.encode_special_tokens = as_text
        kinds, to_bytes = _decoder(values)
        byte_level, self._word_pieces = "ByteLevel" in kinds, "WordPiece" in kinds
        table = _token_bytes(self._hf, byte_level, to_bytes)
        self._byte_ids = {token[0]: i for i, token in reversed(list(enumerate(table))) if len(token) == 1}
        unknown, separator = _unknown(self._hf, values["model"]), self._separator(special, table)
        for i in (unknown, separator):
            if i is not None:
                table[i] = b""
        added = self._hf.get_added_tokens_decoder()
        before, after = self._around()
        super().__init__(
            table,
            {"tokenizer.json": content.encode()} | special.files,
            separator,
            before,
            special.stops,
            dummy_prefix=self._word_pieces or self._adds_space(byte_level),
            special_tokens={token.content: i for i, token in added.items() if token.special},
            after_text=after,
            unknown=unknown,
            bos=self._hf.token_to_id(special.begin),
        )
        model = type(self._hf.model).__name__  # files of 2020 do not name it
        self.lossless = by_steps(values, model, byte_level) if len(self._byte_ids) == 256 else ""
        # A model may form the name of a token without text, or such a piece, from a text.
        silent = filter(None, map(self._hf.id_to_token, np.flatnonzero(self.byte_lengths == 0).tolist()))
        if not returns(self, [text for name in silent for text in (name, to_bytes(name).decode("utf-8", "replace"))]):
            self.lossless = ""

    def piece(self, number: int) -> str:
        """BERT's pieces have their names: those inside a word begin with ##, and those of other words have no space."""
        return str(self._hf.id_to_token(number)) if self._word_pieces else super().piece(number)

    def _encode(self, text: bytes) -> list[int]:
        try:
            return self._encode_text(text.decode("utf-8"))
        except UnicodeDecodeError:
            # surrogateescape turns each invalid byte into a lone surrogate, which becomes the id of that byte.
            runs = re.split("([\udc80-\udcff])", text.decode("utf-8", "surrogateescape"))
            stray = {chr(0xDC00 + byte): [i] for byte, i in self._byte_ids.items() if byte >= 128}
            return [
                i
                for run in runs
                if run
                for i in (stray.get(run) or self._encode_text(run.encode("utf-8", "replace").decode()))
            ]

    def encode_special(self, text: str) -> list[int]:
        return _ids(self._hf_special, text)

    def _encode_text(self, text: str) -> list[int]:
        return _ids(self._hf, text)

    def _adds_space(self, byte_level: bool) -> bool:
        first = [] if byte_level else self._encode_text("a")
        return bool(first) and (self._hf.id_to_token(first[0]) or "").startswith("\u2581")

    def _around(self) -> tuple[int | None, int | None]:
        """The tokens that the post-processor puts before and after a text, or None. Like `transformers`, reads no other
        file."""
        encoding = self._hf.encode("a")
        ids, special = encoding.ids, encoding.special_tokens_mask
        return ids[0] if special[:1] == [1] else None, ids[-1] if special[-1:] == [1] else None

    def _separator(self, special: SpecialTokens, table: list[bytes]) -> int | None:
        """The separator by the name in the settings, else by an id in the settings, else by a customary name."""
        by_name = self._hf.token_to_id(special.end)
        # eos_token_id may be a default value that is the id of an ordinary token: only ids without bytes count.
        by_id = [i for i in special.stops if 0 <= i < len(table) and not table[i]]
        customary = (self._hf.token_to_id(name) for name in _SEPARATORS)
        return next((i for i in (by_name, *by_id, *customary) if i is not None), None)


def _ids(hf, text: str) -> list[int]:
    """Raises UserError for a text on which the library fails: a pattern that goes back and forth over it ends in a panic."""
    try:
        # encode_batch_fast, unlike encode, releases the GIL, so that threads tokenise in parallel.
        return hf.encode_batch_fast([text], add_special_tokens=False)[0].ids if text else []
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":  # which is no Exception
            raise
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise UserError(f"the tokenizer cannot read a text: {reason}") from None


def _decoder(values: dict) -> tuple[set[str], Callable[[str], bytes]]:
    """The kinds of a decoder's steps, and the function that gives the bytes of a token. Raises UserError for an unsupported
    decoder."""
    kinds = set(re.findall(r'"type":\s*"(\w+)"', json.dumps(values.get("decoder") or {})))
    if "ByteLevel" in kinds:
        byte_of = {character: byte for byte, character in _byte_characters().items()}
        # A token with another character than those of bytes is its own text, as in `tokenizers`.
        return kinds, lambda token: bytes(byte_of[c] for c in token) if byte_of.keys() >= {*token} else token.encode()
    if kinds & {"ByteFallback", "Metaspace"}:
        return kinds, piece_bytes
    if "WordPiece" in kinds:
        inside = values["decoder"]["prefix"]
        return kinds, lambda token: (token.removeprefix(inside) if token.startswith(inside) else f" {token}").encode()
    allowed = "ByteLevel, Metaspace, ByteFallback or WordPiece"
    raise UserError(f"tokenizer.json has decoder {', '.join(kinds) or 'none'}; it must be {allowed}")


def _token_bytes(hf, byte_level: bool, to_bytes: Callable[[str], bytes]) -> list[bytes]:
    """The bytes of every id."""
    vocab = hf.get_vocab(with_added_tokens=True)
    added = hf.get_added_tokens_decoder()
    largest = max(vocab.values())
    if largest > 2 * len(vocab) + MAX_GAP:  # the table of ids must not be much larger than the file
        raise UserError(f"tokenizer.json has {len(vocab):,} tokens, but an id of {largest:,}")
    table = [b""] * (largest + 1)
    for token, i in vocab.items():
        if i not in added:
            table[i] = to_bytes(token)
        elif not added[i].special:  # for example Gemma's runs of spaces, written with U+2581
            table[i] = token.encode() if byte_level else piece_bytes(token)
    return table


def _unknown(hf, model: dict) -> int | None:
    """The id of the unknown token, which a Unigram model names by its number and the others by its text."""
    name = getattr(hf.model, "unk_token", None)
    return model.get("unk_id") if name is None else hf.token_to_id(name)


def _byte_characters() -> dict[int, str]:
    """GPT-2's map of each byte to a printable character."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {byte: chr(byte) for byte in printable} | {byte: chr(256 + n) for n, byte in enumerate(others)}


def gpt2_tokenizer(vocabulary: epath.Path, special: SpecialTokens) -> str:
    """The tokenizer.json for GPT-2's two files, which share a prefix: [gpt2_]encoder.json and [gpt2_]vocab.bpe. RoBERTa has
    such files too, with other special tokens, which are around each text.

    Raises UserError for other models with such files (Qwen, Phi): they split words differently or have more tokens.
    """
    import tokenizers
    from tokenizers import decoders, models, pre_tokenizers, processors

    merges = _merges_file(vocabulary)
    added = vocabulary.with_name("added_tokens.json")
    is_gpt2 = special.kind in ("", "GPT2Tokenizer", *_ROBERTA)
    if not is_gpt2 or added.is_file():
        kind = f"GPT-2's with {added.name}" if is_gpt2 else f"a {special.kind}"
        raise UserError(
            f"the tokenizer is {kind}: it needs a tokenizer.json, which transformers' save_pretrained writes"
        )
    with open_to_read(vocabulary) as words, open_to_read(merges) as pairs:
        hf = tokenizers.Tokenizer(models.BPE.from_file(name_of(words), name_of(pairs)))
    hf.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    _require_words_of_gpt2(hf, merges)
    hf.decoder = decoders.ByteLevel()
    if special.kind in _ROBERTA or not special.kind and hf.token_to_id(MASK) is not None:
        return _roberta(hf)
    ids = {name: hf.token_to_id(name) for name in (END_OF_TEXT, special.begin, special.end)}
    ids = {name: i for name, i in ids.items() if i is not None}
    hf.add_special_tokens(list(ids))
    if special.adds_begin and special.begin in ids:  # OPT's texts start with </s>
        pieces = [(special.begin, ids[special.begin])]
        hf.post_processor = processors.TemplateProcessing(single=f"{special.begin} $A", special_tokens=pieces)
    return hf.to_str()


def _roberta(hf) -> str:
    """The tokenizer.json with RoBERTa's special tokens. Raises ValueError if the vocabulary has not all of them."""
    from tokenizers import AddedToken, processors

    names = ("<s>", "<pad>", "</s>", "<unk>")
    ids = {name: hf.token_to_id(name) for name in (*names, MASK)}
    if missing := [name for name, number in ids.items() if number is None]:
        raise ValueError(f"it has no {missing[0]}, which RoBERTa's vocabularies have")
    hf.add_special_tokens([*names, AddedToken(MASK, lstrip=True)])
    pieces = [(name, ids[name]) for name in ("<s>", "</s>")]
    pair = "<s> $A </s> </s> $B </s>"
    hf.post_processor = processors.TemplateProcessing(single="<s> $A </s>", pair=pair, special_tokens=pieces)
    return hf.to_str()


def _require_words_of_gpt2(hf, merges: epath.Path) -> None:
    """Raises UserError if a merge joins characters that GPT-2 puts into two words: another model's files (Qwen's)."""
    byte_of = {character: byte for byte, character in _byte_characters().items()}
    for line in read_bytes(merges).decode().splitlines():
        token = line.replace(" ", "")
        text = bytes(byte_of.get(character, 0) for character in token).decode("utf-8", "replace")
        if line.startswith("#version") or "\ufffd" in text or "\0" in text:  # not a merge, or a part of a character
            continue
        if len(hf.pre_tokenizer.pre_tokenize_str(text)) > 1:
            raise UserError(
                f"these are not GPT-2's files: they merge {text!r}, which GPT-2 splits into two words. Use the "
                "tokenizer.json that transformers' save_pretrained writes"
            )


def _merges_file(vocabulary: epath.Path) -> epath.Path:
    names = [
        vocabulary.name.removesuffix(name) + merges
        for name, merges in _MERGES.items()
        if vocabulary.name.endswith(name)
    ]
    if not names:
        raise UserError("neither a tokenizer.json nor a GPT-2 vocabulary, which is named *vocab.json or *encoder.json")
    merges = inside(vocabulary.parent, names[0])
    if not merges.is_file():
        raise UserError(f"the second file, {names[0]}, is missing")
    return merges
