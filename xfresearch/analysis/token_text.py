"""The text of tokens in the middle of a text, for any model and tokenizer.

A leading space stays: `tokenizer.decode` drops that of SentencePiece, as if every token were the first of a text. A model
may have more ids than its tokenizer.
"""


def plain(tokenizer, tokens) -> str:
    """The text; special tokens and ids that the tokenizer does not have give none."""
    return b"".join(_bytes(tokenizer, int(token)) for token in tokens).decode("utf8", "replace")


def shown(tokenizer, tokens) -> str:
    """The text in one line for a reader. A token without text is its number, <300>; without a tokenizer all are numbers."""
    if tokenizer is None:
        return " ".join(str(int(token)) for token in tokens)
    parts = [_bytes(tokenizer, int(token)) or b"<%d>" % token for token in tokens]
    return b"".join(parts).decode("utf8", "replace").replace("\n", "\\n")


def _bytes(tokenizer, token: int) -> bytes:
    return tokenizer.token_bytes[token] if token < len(tokenizer.token_bytes) else b""
