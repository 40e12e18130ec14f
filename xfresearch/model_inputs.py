"""The inputs of a LanguageModel: text or token ids, and names of taps with wildcards."""

from collections.abc import Iterable
from fnmatch import fnmatchcase
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np

from xfresearch.errors import UserError, nearest
from xfresearch.models import decoding, transformer
from xfresearch.models.context import Context
from xfresearch.models.model_config import ModelConfig, longest_sequence
from xfresearch.models.taps import Taps


def as_tokens(model: ModelConfig, tokenizer, given) -> jax.Array:
    """Token ids int32[B, L] of a text, of several texts with equally many tokens, or of ids [B, L].

    Raises UserError for anything else, for ids beyond the vocabulary, and for sequences that are longer than the table
    of positions.
    """
    if isinstance(given, jax.core.Tracer):  # under jit its values are not known: only its type is checked
        _check_shape(model, given.shape, given.dtype)
        return given.astype(jnp.int32)
    texts = [given] if isinstance(given, str) else given
    if isinstance(texts, list | tuple) and texts and all(isinstance(text, str) for text in texts):
        given = [encode(model, tokenizer, text, "text") for text in texts]
        lengths = [len(ids) for ids in given]
        if len(set(lengths)) > 1:
            raise UserError(f"texts of {lengths} tokens are not allowed together: they must have equally many tokens")
    try:
        tokens = np.asarray(given)
    except ValueError as error:
        raise UserError("tokens are not rows of equal length: they must be integers [B, L]") from error
    _check_shape(model, tokens.shape, tokens.dtype)
    low, high = int(tokens.min()), int(tokens.max())
    top = model.vocab_size - 1
    if low < 0 or high > top:
        raise UserError(f"token {low if low < 0 else high} is not allowed: the model's token ids are 0 to {top}")
    return jnp.asarray(tokens, jnp.int32)


def _check_shape(model: ModelConfig, shape: tuple[int, ...], dtype) -> None:
    if len(shape) != 2 or 0 in shape or not jnp.issubdtype(dtype, np.integer):
        hint = "; for a single sequence pass [tokens]" if len(shape) == 1 else ""
        raise UserError(
            f"tokens of shape {shape} and type {dtype} are not allowed: they must be integers [B, L], or a text{hint}"
        )
    rows = longest_sequence(model)
    if rows and shape[1] > rows:
        allowed = f"at most {rows}, the rows of the model's position table"
        raise UserError(f"tokens of length {shape[1]} are not allowed: the length must be {allowed}")


def encode(model: ModelConfig, tokenizer, text: str, name: str) -> list[int]:
    """The tokens of `text` after the begin-of-text token. If the tokenizer has no such token, an empty text is the
    end-of-text token. `name` is that of the argument, for errors."""
    if tokenizer is None:
        raise UserError("this model has no tokenizer, so it cannot read or write text: call it on token ids")
    if not isinstance(text, str):
        raise UserError(f"{name}={text!r} is not allowed: it must be a string or a list of strings")
    try:
        ids = tokenizer.encode(text.encode()).tolist()
    except UnicodeEncodeError as error:
        raise UserError(f"{name}={text!r} is not allowed: it must be text that UTF-8 can encode") from error
    begin = tokenizer.begin_of_text
    tokens = (ids or [tokenizer.end_of_text]) if begin is None else [begin, *ids]
    if max(tokens) >= model.vocab_size:  # the tokenizer may have ids beyond the model's embedding table
        top = model.vocab_size - 1
        raise UserError(f"{name}={text!r} has token {max(tokens)}, but the model's vocabulary ends at {top}")
    return tokens


@cache
def tap_names(model: ModelConfig) -> tuple[str, ...]:
    """The names of all taps, in the order of computation."""
    taps = Taps()
    tokens = jax.ShapeDtypeStruct((1, 1), jnp.int32)
    jax.eval_shape(lambda params, tokens: forward(model, params, tokens, taps), transformer.abstract(model), tokens)
    return tuple(taps.names)


def matching(model: ModelConfig, patterns: Iterable[str]) -> dict[str, str]:
    """{name of a tap: the pattern that it matches}; `*` matches any part of a name. Raises UserError for a pattern that
    matches none."""
    names = tap_names(model)
    found = {}
    for pattern in patterns:
        matches = [name for name in names if fnmatchcase(name, pattern)]
        if not matches:
            hint = nearest(pattern, names)
            raise UserError(f"tap {pattern!r}: this model has no such value{hint} (lm.tap_names() lists them)")
        found |= dict.fromkeys(matches, pattern)
    return found


def replacements(model: ModelConfig, replace: dict) -> dict:
    """{name of a tap: function} of {pattern: function}. Raises UserError for a value that is not a function."""
    if not replace:
        return {}  # the names of taps need a trace
    for pattern, function in replace.items():
        if not callable(function):
            raise UserError(f"replace[{pattern!r}] must be a function: to set a fixed value, pass lambda _: value")
    return {name: replace[pattern] for name, pattern in matching(model, replace).items()}


def forward(model: ModelConfig, params: dict, tokens_BL, taps: Taps | None = None):
    """The bound model, and its final hidden states [B, L, D] for token ids [B, L]."""
    lm = transformer.bind(model, params)
    positions_BL = jnp.broadcast_to(jnp.arange(tokens_BL.shape[1]), tokens_BL.shape)
    out = lm(tokens_BL, Context(positions_BL, taps=taps), layers=decoding.fast_layers())
    return lm, out.hidden_BLD
