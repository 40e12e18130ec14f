"""Builders of the files of small tokenizers."""

import io
import json
import struct
from functools import cache

LINES = [
    "the cat and the dog",
    "return x  # größer",
    "a man\ta plan",
    "naïve café",
    "    indented text",
    "0123456789",
] * 5


@cache
def sentence_piece(**options) -> bytes:
    """A .model of 400 pieces. By default like Llama's: no normalisation, byte fallback for unknown characters."""
    import sentencepiece

    options = {
        "model_type": "bpe",
        "normalization_rule_name": "identity",
        "byte_fallback": True,
        "remove_extra_whitespaces": False,
    } | options
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(LINES),
        model_writer=model,
        vocab_size=400 if options["byte_fallback"] else 80,
        hard_vocab_limit=False,
        minloglevel=2,
        **options,
    )
    return model.getvalue()


def llama2c(model: bytes) -> bytes:
    """A SentencePiece .model in the format that llama2.c's tokenizer.py exports."""
    import sentencepiece

    sp = sentencepiece.SentencePieceProcessor(model_proto=model)
    pieces = [sp.id_to_piece(i).replace("\u2581", " ").encode() for i in range(sp.get_piece_size())]
    pieces[sp.bos_id()], pieces[sp.eos_id()] = b"\n<s>\n", b"\n</s>\n"
    records = [struct.pack("<fi", sp.get_score(i), len(piece)) + piece for i, piece in enumerate(pieces)]
    return struct.pack("<i", max(map(len, pieces))) + b"".join(records)


def byte_level(**parts) -> str:
    """A tokenizer.json like GPT-2's, with all bytes and a few words. `parts` replace its components."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    pieces = ["<|endoftext|>", *sorted(pre_tokenizers.ByteLevel.alphabet()), "th", "the", "\u0120a"]
    merges = [("t", "h"), ("th", "e"), ("\u0120", "a")]
    hf = Tokenizer(models.BPE({piece: i for i, piece in enumerate(pieces)}, merges))
    hf.pre_tokenizer, hf.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    return _finished(hf, ["<|endoftext|>"], parts)


def byte_fallback(**parts) -> str:
    """A tokenizer.json like Llama 2's: U+2581 for spaces, a dummy space in front, byte fallback."""
    from tokenizers import Tokenizer, decoders, models, normalizers

    special = ["<unk>", "<s>", "</s>"]
    pieces = [
        *special,
        *(f"<0x{byte:02X}>" for byte in range(256)),
        "\u2581",
        "\u2581\u2581",
        *"athe",
        "\u2581a",
        "th",
        "the",
    ]
    merges = [("\u2581", "\u2581"), ("\u2581", "a"), ("t", "h"), ("th", "e")]
    vocabulary = {piece: i for i, piece in enumerate(pieces)}
    hf = Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    hf.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    hf.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return _finished(hf, special, parts)


def _finished(hf, special: list[str], parts: dict) -> str:
    hf.add_special_tokens(special)
    hf.add_tokens(parts.pop("words", []))
    for name, part in parts.items():
        setattr(hf, name, part)
    return hf.to_str()


BERT_WORDS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "the", "cat", "and", "dog", "##s", "is", ".", "a", "##b")
# RoBERTa's files: special tokens, the alphabet of bytes, and a few words.
ROBERTA_WORDS = ("<s>", "<pad>", "</s>", "<unk>")


def word_pieces() -> str:
    """A vocab.txt like BERT's."""
    return "".join(f"{word}\n" for word in BERT_WORDS)


def roberta() -> dict:
    """A vocab.json and a merges.txt like RoBERTa's."""
    from tokenizers import pre_tokenizers

    words = (*ROBERTA_WORDS, *sorted(pre_tokenizers.ByteLevel.alphabet()), "th", "the", "\u0120a", "<mask>")
    return {
        "vocab.json": {word: number for number, word in enumerate(words)},
        "merges.txt": "#version: 0.2\nt h\nth e\n\u0120 a\n",
    }


def template(token: str, i: int):
    """A post-processor that puts `token` before every text."""
    from tokenizers import processors

    return processors.TemplateProcessing(single=f"{token} $A", special_tokens=[(token, i)])


def write(directory, files: dict) -> None:
    """Writes files by name. The content is bytes, text, or a value that is written as JSON."""
    directory.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        if not isinstance(content, bytes):
            content = (content if isinstance(content, str) else json.dumps(content)).encode()
        (directory / name).write_bytes(content)
