"""Tokenizers with one interface: bytes, Hugging Face `tokenizers` (loaded or trained here), SentencePiece, llama2.c.

Text is passed as bytes, and every id has its bytes, so nothing is lost between file and model.
"""

from xfresearch.data.tokenizers.base import ByteTokenizer, Tokenizer
from xfresearch.data.tokenizers.loading import (
    has_tokenizer,
    is_tokenizer_file,
    load_tokenizer,
    tokenizer_for,
    vocab_size,
)

__all__ = [
    "ByteTokenizer",
    "Tokenizer",
    "has_tokenizer",
    "is_tokenizer_file",
    "load_tokenizer",
    "tokenizer_for",
    "vocab_size",
]
