"""Loads the tokenizer of a file, a directory or a run's config."""

import json

from etils import epath

from xfresearch.data.cache import build_once, cache_root
from xfresearch.data.given import require_given
from xfresearch.data.tokenizers import special_tokens
from xfresearch.data.tokenizers.added_ids import added_ids
from xfresearch.data.tokenizers.base import ByteTokenizer, Tokenizer
from xfresearch.options.run_options import DataConfig
from xfresearch.runtime.errors import UserError, nearest
from xfresearch.runtime.files import (
    exists,
    files_in,
    inside,
    is_directory,
    names_in,
    read_bytes,
    require_no_dangling_link,
)
from xfresearch.runtime.formats import refused, sniff
from xfresearch.runtime.model_paths import if_on_hub, require_path, with_models

VOCABULARY = "vocab.txt"  # BERT's
_FILES = ("bytes.json", "tokenizer.json", "tokenizer.model", "vocab.json", "encoder.json", "llama2c.bin", VOCABULARY)
_WITH_SETTINGS = ("vocab.json", "encoder.json", VOCABULARY)  # files that do not say themselves how a text is split
# Damaged files are of any of these kinds; the libraries say what is wrong with them.
_KINDS = ("tokenizer.json", "sentencepiece", "tokens", "binary", "text", "json object", "json array", "json lines")
_OTHERS = "GPT-2's two files, BERT's vocab.txt, a SentencePiece .model or a llama2.c .bin"
TOKENIZERS = f"a tokenizer must be a tokenizer.json, {_OTHERS}"


def vocab_size(data: DataConfig, tokenizer: Tokenizer | None = None) -> int:
    """The ids of `tokenizer` (by default `tokenizer_for(data)`, without training it), and those that the objective adds."""
    if tokenizer is None and data.tokenizer == "bpe":
        return data.bpe_vocab + added_ids(data.objective, {})
    tokenizer = tokenizer or tokenizer_for(data)
    return tokenizer.vocab_size + added_ids(data.objective, tokenizer.special_tokens)


def tokenizer_for(data: DataConfig) -> Tokenizer:
    """The tokenizer that `data` names. 'bpe' is trained once on the train splits and then cached."""
    if data.tokenizer == "bytes":
        return ByteTokenizer()
    if data.tokenizer != "bpe":
        require_given(data.tokenizer, "tokenizer", "give --config.data.tokenizer")
        return load_tokenizer(data.tokenizer)
    from xfresearch.data.tokenizers import bpe

    return load_tokenizer(
        build_once(cache_root(data) / "tokenizers" / bpe.key(data), lambda directory: bpe.train(data, directory))
    )


def load_tokenizer(path) -> Tokenizer:
    """The tokenizer in a file: tokenizer.json, one of GPT-2's two files, BERT's vocab.txt, a SentencePiece .model or a
    llama2.c .bin.

    In a directory, such as `Tokenizer.save` writes, the settings files next to it define which tokens begin and end a
    text (special_tokens.py); next to vocab.json, encoder.json and vocab.txt always, because these need not be GPT-2's and
    BERT's. Raises UserError if there is no tokenizer or it cannot be read.
    """
    wanted = "it must be 'bytes', 'bpe', or the path of an existing tokenizer file or directory"
    require_path(path, wanted)
    path = epath.Path(path).expanduser()
    require_no_dangling_link(path)
    file = _tokenizer_file(path) if is_directory(path) else path
    if not exists(file) or is_directory(file):
        typo = nearest(str(path), ("bytes", "bpe"))
        raise UserError(
            f"config.data.tokenizer={str(path)!r} is not allowed: {'' if typo else if_on_hub(path)}{wanted}{typo}"
        )
    file_format = sniff(file)
    if file_format.kind not in _KINDS or file_format.compression:
        raise refused(file, file_format, TOKENIZERS)
    reads_settings = is_directory(path) or file.name in _WITH_SETTINGS
    special = special_tokens.read(file.parent) if reads_settings else special_tokens.NO_SPECIAL_TOKENS
    try:
        made = _load(file, file_format.kind, special)
        if special.decoder_start is not None and 0 <= special.decoder_start < made.vocab_size:
            made.decoder_start = special.decoder_start
        first, last = (id if id is not None and 0 <= id < made.vocab_size else None for id in special.forced)
        made.forced = first, last
        return made
    except UserError as error:
        raise UserError(f"{file}: {error}") from None
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # for a damaged file, libraries raise any Exception, or a panic, which is none
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise UserError(f"{file}: not a valid tokenizer: {reason}") from None


def has_tokenizer(directory) -> bool:
    """Whether `load_tokenizer` finds a tokenizer file in `directory`."""
    return bool(_tokenizer_files(epath.Path(directory)))


def is_tokenizer_file(name: str) -> bool:
    """Whether a tokenizer that is saved may have a file of this name."""
    return name in _FILES or name in special_tokens.FILES or name.endswith(".model")


def _tokenizer_files(directory: epath.Path) -> list[epath.Path]:
    there = set(names_in(directory))  # with links that lead nowhere, which are an error
    named = [inside(directory, name) for name in _FILES if name in there]
    return named or files_in(directory, pattern="*.model")


def _tokenizer_file(directory: epath.Path) -> epath.Path:
    found = _tokenizer_files(directory)
    if not found:
        none = f"the directory contains none of {', '.join(_FILES)} or *.model"
        raise UserError(f"config.data.tokenizer={str(directory)!r}: {with_models(directory) or none}")
    return found[0]


def _load(file: epath.Path, kind: str, special: special_tokens.SpecialTokens) -> Tokenizer:
    if kind == "sentencepiece" or file.suffix == ".model":
        from xfresearch.data.tokenizers.sentence_piece import SentencePieceTokenizer

        return SentencePieceTokenizer(read_bytes(file), special)
    if file.suffix == ".bin":
        from xfresearch.data.tokenizers.llama2c import Llama2cTokenizer

        return Llama2cTokenizer(read_bytes(file))
    if file.name == VOCABULARY:
        from xfresearch.data.tokenizers.hugging_face import HuggingFaceTokenizer
        from xfresearch.data.tokenizers.word_piece import bert_tokenizer

        return HuggingFaceTokenizer(bert_tokenizer(file, special), special)
    content = read_bytes(file).decode()
    values = json.loads(content)
    if values == {"kind": "bytes"}:
        return ByteTokenizer()
    from xfresearch.data.tokenizers.hugging_face import HuggingFaceTokenizer, gpt2_tokenizer

    if isinstance(values.get("model"), dict):
        return HuggingFaceTokenizer(content, special)
    return HuggingFaceTokenizer(gpt2_tokenizer(file, special), special)
