"""Tokenizers behind one interface: bytes, Hugging Face `tokenizers` (loaded, or BPE trained here), SentencePiece, llama2.c.

Text goes in as bytes and every id knows the bytes that it stands for, so nothing is lost between file and model.
"""

from xfresearch.data.tokenizers.base import ByteTokenizer, Tokenizer
from xfresearch.data.tokenizers.hugging_face import END_OF_TEXT
from xfresearch.data.tokenizers.loading import has_tokenizer, load_tokenizer, tokenizer_for, vocab_size

__all__ = [
    "END_OF_TEXT",
    "ByteTokenizer",
    "Tokenizer",
    "has_tokenizer",
    "load_tokenizer",
    "tokenizer_for",
    "vocab_size",
]
