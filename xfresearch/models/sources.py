"""The source of a model with an encoder, as a user gives it: texts or token ids, of different lengths or padded."""

from collections.abc import Sequence
from numbers import Integral
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from xfresearch.models.context import Source
from xfresearch.models.inputs import encode, prompt_ids
from xfresearch.models.model_config import ModelConfig
from xfresearch.runtime.errors import UserError, shortened

# A text or token ids for one sequence, several of either, ids [B, S], or a Source with segments and positions.
SourceText: TypeAlias = str | Sequence[str] | ArrayLike | Sequence[Sequence[int]] | Source


def source_of(model: ModelConfig, tokenizer: Any, given: Any, rows: int) -> Source | None:
    """The source of a pass over `rows` sequences (0: any number): a text or ids for one, several of either, or a Source.

    Shorter ones are padded on the right, with segment 0. Raises UserError if the model needs a source and there is none, or
    the other way round, for another number of rows, and for ids beyond the vocabulary."""
    if model.encoder is None:
        if given is not None:
            raise UserError("source is not allowed: this model has no encoder (model.stacks)")
        return None
    if given is None:
        raise UserError("source is missing: this model has an encoder, which reads a text or token ids [B, S]")
    source = given if isinstance(given, Source) else _read(model, tokenizer, given)
    count, length = source.tokens_BS.shape
    if rows and count != rows:
        raise UserError(f"source has {count} rows, which is not allowed: there are {rows} sequences of tokens")
    longest = model.encoder.longest
    if longest and length > longest:
        raise UserError(f"source of {length} tokens is not allowed: at most {longest}, by the encoder's position table")
    return source


def _read(model: ModelConfig, tokenizer: Any, given: Any) -> Source:
    if isinstance(given, jax.core.Tracer):  # under jit its values are not known: only its type is checked
        _check(given)
        return Source(given.astype(jnp.int32))
    if isinstance(given, jax.Array | np.ndarray):
        _check(given)
        return Source(jnp.asarray(_in_vocabulary(model, given)))
    given = [given] if isinstance(given, str) or _is_ids(given) else given
    if not isinstance(given, list | tuple) or not given or not all(isinstance(one, str) or _is_ids(one) for one in given):
        allowed = "a text, its token ids, a list of these, or integers [B, S]"
        raise UserError(f"source={shortened(repr(given))} is not allowed: it must be {allowed}")
    texts = [source_ids(model, tokenizer, one) if isinstance(one, str) else _in_vocabulary(model, one) for one in given]
    return padded([list(map(int, ids)) for ids in texts])


def source_ids(model: ModelConfig, tokenizer: Any, text: str, special_tokens: bool = False) -> list[int]:
    """The ids of a text as a source, which ends with end_of_text, as in training. With `special_tokens`, special tokens in
    the text are read as tokens, and an end_of_text at its end is not repeated."""
    ids = encode(model, tokenizer, text, "source", special_tokens)
    end, own = tokenizer.end_of_text, ids[tokenizer.begin_of_text is not None :]
    return ids if own[-1:] == [end] else [*ids, end]


def prompts_of(
    model: ModelConfig, tokenizer: Any, prompt: Any, source: SourceText | None
) -> tuple[list[list[int]], bool, Source | None]:
    """The tokens of each prompt, whether there is a single one, and the source of a model with an encoder.

    With an encoder, a prompt is the beginning of the target ('' by default) after the id that the decoder starts from, and a
    single prompt is used for every source. Raises UserError as `source_of` and `prompt_ids` do."""
    if model.encoder is None:
        source_of(model, tokenizer, source, 0)
        tokens, one = prompt_ids(model, tokenizer, prompt)
        return tokens, one or isinstance(prompt, str), None
    read = source_of(model, tokenizer, source, 0)
    assert read is not None
    rows = len(read.tokens_BS)
    one = rows == 1 and (isinstance(source, str) or _is_ids(source))
    given = [prompt] * rows if isinstance(prompt, str) else prompt
    ids = [target_ids(model, tokenizer, each) if isinstance(each, str) else each for each in given]
    tokens, _ = prompt_ids(model, tokenizer, ids)
    source_of(model, tokenizer, read, len(tokens))
    return tokens, one, read


def target_ids(model: ModelConfig, tokenizer: Any, text: str, special_tokens: bool = False) -> list[int]:
    """The ids that the decoder reads first, for a target that begins with `text`, as in training: begin_of_text is not
    repeated if the decoder starts from it. With `special_tokens`, special tokens in the text are read as tokens."""
    ids = encode(model, tokenizer, text, "prompt", special_tokens)
    start, ids = tokenizer.decoder_start, ids if text else []
    return ids if ids and ids[0] == tokenizer.begin_of_text == start else [start, *ids]


def _is_ids(given: Any) -> bool:
    return isinstance(given, list | tuple) and bool(given) and all(isinstance(each, Integral) for each in given)


def _in_vocabulary(model: ModelConfig, given: Any) -> np.ndarray:
    """int32 ids. Raises UserError for ids beyond the vocabulary."""
    array = np.asarray(given)
    low, high = int(array.min()), int(array.max())
    if low < 0 or high >= model.vocab_size:
        wrong = low if low < 0 else high
        raise UserError(f"source has token {wrong}, which is not allowed: ids are 0 to {model.vocab_size - 1}")
    return array.astype(np.int32)


def _check(given: Any) -> None:
    if given.ndim != 2 or 0 in given.shape or not jnp.issubdtype(given.dtype, np.integer):
        raise UserError(f"source of shape {given.shape} and type {given.dtype} is not allowed: it must be integers [B, S]")


def padded(ids: list[list[int]]) -> Source:
    """Sources of different lengths as one array, padded on the right; without segments if there is no padding."""
    longest = max(map(len, ids))
    tokens_BS, segments_BS = np.zeros((2, len(ids), longest), np.int32)
    for row, each in enumerate(ids):
        tokens_BS[row, : len(each)], segments_BS[row, : len(each)] = each, 1
    return Source(jnp.asarray(tokens_BS), None if segments_BS.all() else jnp.asarray(segments_BS))
