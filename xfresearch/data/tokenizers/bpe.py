"""A byte-level BPE trained on the corpus (Sennrich et al. 2016). Its pre-tokenizer suits code as well as prose."""

import math
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

from xfresearch.data.cache import digest
from xfresearch.data.corpora import TextCorpus, open_corpus, open_split
from xfresearch.data.tokenizers.hugging_face import END_OF_TEXT
from xfresearch.options.run_options import DataConfig
from xfresearch.runtime.progress import stage

# GPT-4's pattern: a word includes one character before it, numbers are split into at most three digits, punctuation
# includes the line ends after it, and line ends are separate from the indentation after them.
PATTERN = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
SAMPLE_BYTES = 32_000_000
_PIECE = 1 << 16


def key(data: DataConfig) -> str:
    """The cache key of the trained tokenizer: a hash of everything that it depends on."""
    corpora = [open_corpus(corpus, data).identity() for corpus in data.corpus]
    return "bpe-" + digest([corpora, data.bpe_vocab, PATTERN, SAMPLE_BYTES, version("tokenizers")])


def train(data: DataConfig, directory: Path) -> None:
    """Writes a tokenizer.json with exactly `data.bpe_vocab` ids; id 0 is end_of_text."""
    import tokenizers
    from tokenizers import decoders, models, pre_tokenizers, trainers

    hf = tokenizers.Tokenizer(models.BPE())
    split = pre_tokenizers.Split(tokenizers.Regex(PATTERN), behavior="isolated")
    hf.pre_tokenizer = pre_tokenizers.Sequence(
        [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    hf.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=data.bpe_vocab, special_tokens=[END_OF_TEXT], initial_alphabet=alphabet, show_progress=False
    )
    with stage(f"training a BPE tokenizer of {data.bpe_vocab:,} ids") as progress:
        hf.train_from_iterator(_counted(_sample(data), progress), trainer)
    missing = data.bpe_vocab - hf.get_vocab_size()  # a small corpus has too few pairs to merge
    hf.add_special_tokens([f"<|unused{n}|>" for n in range(missing)])
    hf.save(str(directory / "tokenizer.json"))


def _counted(texts: Iterator[str], progress) -> Iterator[str]:
    for text in texts:
        progress.update(len(text))
        yield text


def _sample(data: DataConfig) -> Iterator[str]:
    """Evenly spaced pieces of the train splits, about SAMPLE_BYTES in total at most, so that training is fast."""
    for corpus in data.corpus:
        opened = open_split(corpus, "train", data)
        if isinstance(opened, TextCorpus):
            texts, size = opened.sample("train")
        else:
            texts, size = opened.documents("train"), opened.n_bytes("train")
        every = max(1, math.ceil(size * len(data.corpus) / SAMPLE_BYTES))
        pieces = (text[start : start + _PIECE] for text in texts for start in range(0, len(text), _PIECE))
        yield from (piece.decode("utf-8", "ignore") for n, piece in enumerate(pieces) if n % every == 0)
