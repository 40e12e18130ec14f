"""The inputs of a LanguageModel: text or token ids, and names of taps with wildcards."""

import fnmatch
from collections.abc import Iterable, Mapping
from functools import cache, partial
from numbers import Integral

import jax
import jax.numpy as jnp
import numpy as np

from xfresearch.kernels.defaults import fast_layers
from xfresearch.models import layers, transformer
from xfresearch.models.context import Context, Source
from xfresearch.models.model_config import LIMITS, ModelConfig, longest_sequence
from xfresearch.models.stack import StackConfig
from xfresearch.models.tap_aliases import lens_names
from xfresearch.models.taps import ENCODER, EVERYTHING, NO_TAPS, OUTSIDE, Patch, Request, captured, of_encoder
from xfresearch.models.traced import traced
from xfresearch.runtime.errors import UserError, nearest


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
        allowed = f"at most {rows}, by {LIMITS}"
        raise UserError(f"tokens of length {shape[1]} are not allowed: the length must be {allowed}")


def each_token(name: str, numbers, tokens_BL, limit: int = 0):
    """int32[B, L]: numbers of tokens, such as their positions; None for None. Raises UserError for another shape and,
    with a `limit`, for numbers below 0 or from the limit on. Under jit the numbers are not known."""
    if numbers is None or isinstance(numbers, jax.core.Tracer):
        return numbers
    try:
        numbers = np.asarray(numbers)
    except ValueError as error:
        raise UserError(f"{name} has rows of different lengths: it must be integers {list(tokens_BL.shape)}") from error
    if numbers.shape != tokens_BL.shape or not jnp.issubdtype(numbers.dtype, np.integer):
        allowed = f"integers of the shape of the tokens, {tokens_BL.shape}"
        raise UserError(f"{name} of shape {numbers.shape} and type {numbers.dtype} is not allowed: it must be {allowed}")
    low, high = int(numbers.min()), int(numbers.max())
    if limit and not 0 <= low <= high < limit:
        wrong = low if low < 0 else high
        raise UserError(f"{name} has {wrong}, which is not allowed: it must be at least 0 and below {limit}")
    return jnp.asarray(numbers, jnp.int32)


def prefix_of(model: ModelConfig, prefix_BL, tokens_BL):
    """`each_token` for prefix_BL, not 0 for the tokens of a prefix. Raises UserError, too, for a model without prefixes."""
    if prefix_BL is not None and (why := model.without_prefix):
        raise UserError(f"prefix_BL is not allowed: {why}")
    return each_token("prefix_BL", prefix_BL, tokens_BL)


def types_of(model: ModelConfig, token_types_BL, tokens_BL):
    """`each_token` for token_types_BL, the types of tokens. Raises UserError, too, for a model without a table of types."""
    if token_types_BL is not None and not model.token_types:
        raise UserError("token_types_BL is not allowed: this model has no table of token types (model.token_types)")
    return each_token("token_types_BL", token_types_BL, tokens_BL, limit=model.token_types)


def prompt_ids(model: ModelConfig, tokenizer, given) -> tuple[list[list[int]], bool]:
    """The tokens of each prompt, and whether `given` is a single prompt: a text, or a list of ids. Several prompts are a
    list of texts or of lists of ids. Ids stay as they are; an empty prompt starts a new text.

    Raises UserError for anything else, and for ids beyond the vocabulary."""
    given = given.tolist() if isinstance(given, np.ndarray | jax.Array) else given
    given = [given] if isinstance(given, str) else list(given) if isinstance(given, Iterable) else given
    one = isinstance(given, list) and bool(given) and all(isinstance(each, Integral) for each in given)
    each = [given] if one else given
    if not isinstance(each, list):
        allowed = "a text, a list of texts, the ids of a text, or a list of them"
        raise UserError(f"prompt={given!r} is not allowed: it must be {allowed}")
    return [_prompt(model, tokenizer, prompt) for prompt in each], one


def _prompt(model: ModelConfig, tokenizer, prompt) -> list[int]:
    if not isinstance(prompt, list | tuple) or not prompt:
        return encode(model, tokenizer, prompt or "", "prompt")
    return np.asarray(as_tokens(model, tokenizer, [prompt])[0]).tolist()


def encode(model: ModelConfig, tokenizer, text: str, name: str, special_tokens: bool = False) -> list[int]:
    """The tokens of `text` after the begin-of-text token. If the tokenizer has no such token, an empty text is the
    end-of-text token. A model that is not causal also reads what the tokenizer puts after a text, such as BERT's [SEP].
    `name` is that of the argument, for errors. With `special_tokens`, those in the text are tokens, and a begin-of-text
    token at its start is not repeated."""
    if tokenizer is None:
        raise UserError("this model has no tokenizer, so it cannot read or write text: call it on token ids")
    if not isinstance(text, str):
        raise UserError(f"{name}={text!r} is not allowed: it must be a string or a list of strings")
    try:
        ids = tokenizer.encode_special(text) if special_tokens else tokenizer.encode(text.encode()).tolist()
    except UnicodeEncodeError as error:
        raise UserError(f"{name}={text!r} is not allowed: it must be text that UTF-8 can encode") from error
    begin = tokenizer.begin_of_text
    ids = ids[1:] if special_tokens and ids[:1] == [begin] else ids
    tokens = (ids or [tokenizer.end_of_text]) if begin is None else [begin, *ids]
    tokens += [] if model.causal or tokenizer.after_text in (None, tokens[-1]) else [tokenizer.after_text]
    if max(tokens) >= model.vocab_size:  # the tokenizer may have ids beyond the model's embedding table
        top = model.vocab_size - 1
        raise UserError(f"{name}={text!r} has token {max(tokens)}, but the model's vocabulary ends at {top}")
    return tokens


@cache
def tap_shapes(
    model: ModelConfig, rows: int = 1, length: int = 1, source_length: int = 1
) -> dict[str, jax.ShapeDtypeStruct]:
    """{name: shape and dtype} of all taps in a pass over tokens [rows, length], in the order of computation."""
    shapes = {}

    def trace(params, tokens_BL, source):
        captures = forward(model, params, tokens_BL, Request(EVERYTHING), source=source)[1].captures
        names = _names(model, captures)
        if model.encoder:
            names = [f"{ENCODER}.{name}" for name in _names(model.encoder, captures, f"{ENCODER}/")] + names
        values = captured(model, captures, names)
        shapes.update({name: jax.ShapeDtypeStruct(value.shape, value.dtype) for name, value in values.items()})

    tokens = jax.ShapeDtypeStruct((rows, length), jnp.int32)
    source = Source(jax.ShapeDtypeStruct((rows, source_length), jnp.int32)) if model.encoder else None
    jax.eval_shape(trace, transformer.abstract(model), tokens, source)
    return shapes


def _names(config: StackConfig, captures: dict, prefix: str = "") -> list[str]:
    """The taps of a stack whose captures have names with this prefix."""
    of_layers = [(layer.number, captures[f"{prefix}{layer.stack}"]) for layer in layers.layers(config)]
    before, *after = captures[f"{prefix}{OUTSIDE}"]
    return [before, *(f"blocks.{number}.{site}" for number, sites in of_layers for site in sites), *after]


def matching(model: ModelConfig, patterns: Iterable[str]) -> dict[str, tuple[str, str]]:
    """{name: (tap, pattern)} of the names that match: names of taps, or TransformerLens' names (tap_aliases.py). `*`
    stands for any part of a name. Raises UserError for a pattern that matches none."""
    taps = tap_shapes(model)
    names = {name: name for name in taps} | {theirs: ours for theirs, ours in lens_names(model).items() if ours in taps}
    if model.encoder:  # the decoder's values have the names that they have in a model without an encoder, and these
        names |= {f"decoder.{name}": name for name in taps if not of_encoder(name)}
    order = {tap: number for number, tap in enumerate(taps)}
    matched: dict = {}
    for pattern in patterns:
        matches = fnmatch.filter(taps, pattern) or fnmatch.filter(names, pattern)
        if not matches:
            hint = nearest(pattern, names)
            raise UserError(f"tap {pattern!r}: this model has no such value{hint} (lm.tap_names() lists them)")
        matched |= {name: (names[name], pattern) for name in matches}
    return dict(sorted(matched.items(), key=lambda item: order[item[1][0]]))


def patches(
    model: ModelConfig, replace: Mapping, rows: int, length: int, source_length: int = 1
) -> dict[str, Patch]:
    """{tap: Patch} for a pass over tokens [rows, length], from {pattern: replacement}.

    A replacement is a function of the value, the new value, or a Patch. Raises UserError for a result of another shape."""
    if not replace:
        return {}  # the shapes of taps need a trace
    shapes = tap_shapes(model, rows, length, source_length)
    by_tap = {}
    for name, (tap, pattern) in matching(model, replace).items():
        new = replace[pattern]
        if not isinstance(new, Patch):
            new = Patch(new) if callable(new) else Patch(arguments=(_array(pattern, new),))
        _check(pattern, partial(new.apply, name), shapes[tap])
        by_tap[tap] = new
    return by_tap


def _check(pattern: str, change, value: jax.ShapeDtypeStruct) -> None:
    """Raises UserError if a replacement returns another shape, or if JAX cannot trace it."""
    try:
        jax.eval_shape(change, value)
    except jax.errors.JAXTypeError as error:
        allowed = "it must use jax.numpy, without branches on values, because it is compiled"
        raise UserError(f"replace[{pattern!r}] cannot be traced: {allowed}") from error


def _array(pattern: str, value):
    try:
        return jnp.asarray(value)
    except (TypeError, ValueError) as error:
        raise UserError(f"replace[{pattern!r}] must be a function, the new value or an xf.Patch") from error


def shared(
    model: ModelConfig, given: dict[str, Patch], rows: int, length: int, source_length: int = 1
) -> dict[str, Patch]:
    """The patches with traced functions, so that passes with the same operations share a compiled program."""
    shapes = tap_shapes(model, rows, length, source_length) if given else {}
    return {name: patch if patch.arguments else traced(patch, shapes[name]) for name, patch in given.items()}


def forward(
    model: ModelConfig,
    params: dict,
    tokens_BL,
    taps: Request = NO_TAPS,
    positions_BL=None,
    segments_BL=None,
    source=None,
    token_types_BL=None,
    prefix_BL=None,
) -> tuple:
    """The bound model, and its Output for token ids [B, L]. By default all tokens are one document, from position 0."""
    lm = transformer.bind(model, params)
    if positions_BL is None:
        positions_BL = jnp.broadcast_to(jnp.arange(tokens_BL.shape[1]), tokens_BL.shape)
    if prefix_BL is not None and segments_BL is None:
        segments_BL = jnp.ones_like(tokens_BL)
    ctx = Context(positions_BL, segments_BL, source=source, token_types_BL=token_types_BL, prefix_BL=prefix_BL)
    return lm, lm(tokens_BL, ctx, layers=str(fast_layers(model.depth).name), taps=taps)
