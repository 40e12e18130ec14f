"""Rows of tokens, compiled passes over them, and names of layers, for all analyses."""

from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from typing import Any

import jax
import numpy as np

from xfresearch.data.labelled import LabelledSplit
from xfresearch.data.labels import has_labels
from xfresearch.kernels.dtypes import wide_dtype
from xfresearch.loading.language_model import LanguageModel
from xfresearch.models.inputs import as_tokens, forward, tap_shapes
from xfresearch.models.model_config import ModelConfig, check_length
from xfresearch.models.sublayers import Sublayer
from xfresearch.models.taps import Request, request
from xfresearch.runtime.errors import UserError
from xfresearch.runtime.progress import stage

ROWS = 32  # by default
BATCH = 8


def rows(lm: LanguageModel, data: Any = None, count: int = ROWS, length: int = 0, split: str = "") -> np.ndarray:
    """Token ids [N, L]: `count` rows of a corpus (its name; None for that of the model's run), or the given token ids
    [N, L] (those of a text are lm.tokens(text)). The default split is that of the held-out text. Raises UserError if there
    are none, and for rows of a single token, which predicts nothing."""
    if data is None or isinstance(data, str):
        tokens_NL = _of_corpus(lm, data or lm.run.data.corpus[0], count, length or lm.run.sequence_length, split)
    else:
        tokens_NL = np.asarray(as_tokens(lm.config, lm.tokenizer, data))
    if tokens_NL.shape[1] < 2:
        raise UserError(f"rows of {tokens_NL.shape[1]} token are not allowed: they must have at least 2 tokens")
    return tokens_NL


def _of_corpus(lm: LanguageModel, corpus: str, count: int, length: int, split: str) -> np.ndarray:
    if has_labels(corpus):
        check_length(lm.config, length)
        sequences = LabelledSplit(corpus, split or lm.run.evaluation.split, length)
        tokens_NL: np.ndarray = sequences.examples(range(min(count, len(sequences)))).tokens
        return tokens_NL
    taken = list(lm.batches(corpus, split, batch_size=count, length=length, limit=count))
    if not taken or not len(taken[0]):
        raise UserError(f"data={corpus!r} has no row of {length} tokens: give a smaller length")
    return taken[0]


def repeated(lm: LanguageModel, count: int, rows: int = BATCH, seed: int = 0) -> np.ndarray:
    """Random token ids [rows, 2 count] whose second half repeats the first (Olsson et al. 2022). The tokens of a half differ
    from each other, if the vocabulary has enough."""
    rng, vocab_size = np.random.default_rng(seed), lm.config.vocab_size
    half_BL = np.stack([rng.choice(vocab_size, count, replace=count > vocab_size) for _ in range(rows)])
    tokens_BL = np.concatenate([half_BL, half_BL], 1)
    check_length(lm.config, 2 * count)
    return tokens_BL


def measure(
    lm: LanguageModel,
    tokens_NL: np.ndarray,
    sublayers: list[Sublayer],
    values: Sequence[str],
    summary: Callable[[dict[str, Any]], dict[str, Any]],
    batch: int = BATCH,
    title: str = "",
) -> dict[str, dict[str, np.ndarray]]:
    """{name: {path of a sublayer: [N, ...]}}: the summary of each of the `sublayers`, for every row.

    `summary` is a pure function of those of the `values`, such as 'weights', that a sublayer has, {value: [B, ...]}; it
    returns {name: [B, ...]}, and {} for a sublayer without the values that it needs. Only one layer of one batch is in
    memory. Calls with the same function object share a compiled program."""
    taps = tap_shapes(lm.config)
    names = frozenset(tap for each in sublayers for value in values if (tap := f"{each.path}.{value}") in taps)
    parts: dict[str, dict[str, list[Any]]] = {}
    with stage(title or "measuring", len(tokens_NL), "rows") as progress:
        for tokens_BL in batches(tokens_NL, batch):
            captures = _measure(lm.config, names, of_sublayers(summary), lm.params, tokens_BL)
            for each in sublayers:
                for name, value in captures.get(each.layer.stack, {}).get(each.name, {}).items():
                    parts.setdefault(name, {}).setdefault(each.path, []).append(np.asarray(value[each.layer.index]))
            progress.update(len(tokens_BL))
    return {
        name: {path: np.concatenate(of_batches)[: len(tokens_NL)] for path, of_batches in by_path.items()}
        for name, by_path in parts.items()
    }


@cache
def of_sublayers(summary: Callable[[dict[str, Any]], dict[str, Any]]) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """A function of a layer's values: {'attention.weights': value} becomes {'attention': summary({'weights': value})}. It is
    one object for each summary, so that calls share a compiled program."""

    def of_layer(values: dict[str, Any]) -> dict[str, Any]:
        figures: dict[str, dict[str, Any]] = {}
        for site, value in values.items():
            name, _, rest = site.partition(".")
            figures.setdefault(name, {})[rest] = value
        return {name: summary(of_sublayer) for name, of_sublayer in figures.items()}

    return of_layer


def wide(x: jax.Array) -> jax.Array:
    """x in float32, or wider if it is."""
    return x.astype(wide_dtype(x))


@partial(jax.jit, static_argnums=(0, 1, 2))
def _measure(
    model: ModelConfig,
    names: frozenset[str],
    summary: Callable[..., Any],
    params: dict[str, Any],
    tokens_BL: jax.Array,
) -> dict[str, Any]:
    taps = Request(request(model, names).record, summary=summary)
    return {stack: values for stack, values in forward(model, params, tokens_BL, taps)[1].captures.items() if stack}


def batches(tokens_NL: np.ndarray, batch: int) -> Iterator[np.ndarray]:
    """The rows in batches of one size; the last one repeats its last row."""
    batch = min(batch, len(tokens_NL))
    for first in range(0, len(tokens_NL), batch):
        part = tokens_NL[first : first + batch]
        yield np.concatenate([part, np.repeat(part[-1:], batch - len(part), 0)])


def by_layer(values: dict[str, np.ndarray], sublayers: list[Sublayer], depth: int) -> np.ndarray:
    """[N, ...] of {path of a sublayer: value}: a row for each layer; or for each of the `sublayers`, in the order of
    computation, if a layer has several. NaN where a sublayer has fewer heads than others, or a layer no value at all."""
    shape = np.max([value.shape for value in values.values()], 0)
    rows = {each.path: number if several(sublayers) else each.layer.number for number, each in enumerate(sublayers)}
    of_layers = np.full((len(sublayers) if several(sublayers) else depth, *shape), np.nan)
    for path, value in values.items():
        own: tuple[Any, ...] = (rows[path], *(slice(size) for size in value.shape))
        of_layers[own] = value
    return of_layers


def several(sublayers: list[Sublayer]) -> bool:
    """Whether a layer has more than one of these sublayers."""
    return len({each.layer for each in sublayers}) < len(sublayers)


def about(lm: LanguageModel, tokens_NL: np.ndarray, data: object) -> str:
    """A line on a model and its data."""
    from xfresearch.models.words import model_line

    count, length = tokens_NL.shape
    given = data is not None and not isinstance(data, str)
    source = f"{length} given tokens" if given else f"{length} tokens of {data or 'the held-out text'}"
    rows_of = "1 row" if count == 1 else f"{count} rows"
    return f"{model_line(lm.config, length)}; step {lm.step}; {rows_of} of {source}"
