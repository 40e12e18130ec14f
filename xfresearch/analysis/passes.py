"""Compiled passes over rows of tokens, and figures by layer, for all analyses."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import jax
import numpy as np

from xfresearch.analysis.sequences import Sequences, batches, passed
from xfresearch.kernels.dtypes import wide_dtype
from xfresearch.loading.language_model import LanguageModel
from xfresearch.models.context import Source
from xfresearch.models.inputs import tap_shapes
from xfresearch.models.model_config import ModelConfig, check_length
from xfresearch.models.sublayers import Sublayer
from xfresearch.models.taps import ENCODER, Request, outside_of_blocks, request
from xfresearch.models.words import model_line
from xfresearch.runtime.progress import stage

BATCH = 8


def half_of(model: ModelConfig, length: int, most: int) -> int:
    """The number of tokens that `repeated` may repeat: at most half of `length`, and of the tables of positions."""
    return min(length // 2, most, *(stack.longest // 2 for stack in model.all_stacks if stack.longest))


def again(lm: LanguageModel, count: int, seed: int = 0) -> Sequences:
    """Rows of `repeated` tokens, and for an encoder rows of others."""
    tokens_BL = repeated(lm, count, seed=seed)
    return Sequences(tokens_BL, source=Source(repeated(lm, count, seed=seed + 1)) if lm.config.encoder else None)


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
    rows: Sequences,
    sublayers: list[Sublayer],
    values: Sequence[str],
    summary: Callable[[dict[str, Any]], dict[str, Any]],
    batch: int = BATCH,
    title: str = "",
) -> dict[str, dict[str, np.ndarray]]:
    """{name: {path of a sublayer: [N, ...]}}: the summary of each of the `sublayers`, which are of one stack, for every row.

    `summary` is a pure function of those of the `values`, such as 'weights', that a sublayer has, {value: [B, ...]}, and of
    the rows (`rows_of`); it returns {name: [B, ...]}, and {} for a sublayer without the values that it needs. Only one layer
    of one batch is in memory. Calls with the same function object share a compiled program."""
    taps = tap_shapes(lm.config)
    names = frozenset(tap for each in sublayers for value in values if (tap := f"{each.path}.{value}") in taps)
    parts: dict[str, dict[str, list[Any]]] = {}
    with stage(title or "measuring", len(rows), "rows") as progress:
        for some, real in batches(rows, batch) if names else ():
            captures = jax.block_until_ready(_measure(lm.config, names, summary, sublayers[0].prefix, lm.params, some))
            for each in sublayers:
                for name, value in captures.get(each.stack, {}).get(each.name, {}).items():
                    parts.setdefault(name, {}).setdefault(each.path, []).append(np.asarray(value[each.layer.index])[:real])
            progress.update(real)
    return {
        name: {path: np.concatenate(of_batches) for path, of_batches in by_path.items()} for name, by_path in parts.items()
    }


def rows_of(rows: Sequences, prefix: str) -> dict[str, Any]:
    """What a summary gets beside the values: `real` [B, L], which tokens of its stack are no padding; and in a decoder the
    `tokens` that it reads, the `next` ones, and those of the source."""
    own = rows.inputs.of(prefix)
    if rows.source is None or prefix:
        return {"real": own.real_NL}
    beside = {"real": own.real_NL, "tokens": own.tokens_NL, "next": rows.next_NL}
    return beside | {"source_tokens": rows.of_source.tokens_NL, "source_real": rows.of_source.real_NL}


def of_sublayers(
    summary: Callable[[dict[str, Any]], dict[str, Any]], beside: Mapping[str, Any]
) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """A function of a layer's values: {'attention.weights': value} becomes
    {'attention': summary({'weights': value} | beside)}."""

    def of_layer(values: dict[str, Any]) -> dict[str, Any]:
        figures: dict[str, dict[str, Any]] = {}
        for site, value in values.items():
            name, _, rest = site.partition(".")
            figures.setdefault(name, dict(beside))[rest] = value
        return {name: summary(of_sublayer) for name, of_sublayer in figures.items()}

    return of_layer


def wide(x: jax.Array) -> jax.Array:
    """x in float32, or wider if it is."""
    return x.astype(wide_dtype(x))


@partial(jax.jit, static_argnums=(0, 1, 2, 3))
def _measure(
    model: ModelConfig,
    names: frozenset[str],
    summary: Callable[..., Any],
    prefix: str,
    params: dict[str, Any],
    rows: Sequences,
) -> dict[str, Any]:
    taps = Request(request(model, names).record, summary=of_sublayers(summary, rows_of(rows, prefix)))
    return inside_blocks(passed(model, params, rows.inputs, taps)[1].captures)


def inside_blocks(captures: dict[str, Any]) -> dict[str, Any]:
    """The captures of the stacks, without those outside of the blocks."""
    return {stack: values for stack, values in captures.items() if not outside_of_blocks(stack)}


def by_stack(sublayers: list[Sublayer]) -> dict[str, list[Sublayer]]:
    """{'': those of the decoder, 'encoder': those of the encoder} of some sublayers; without stacks that have none."""
    of_stacks: dict[str, list[Sublayer]] = {"": [], ENCODER: []}
    for each in sublayers:
        of_stacks[each.prefix.rstrip(".")].append(each)
    return {name: of for name, of in of_stacks.items() if of}


def by_layer(
    model: ModelConfig, figures: Mapping[str, Mapping[str, np.ndarray]], sublayers: list[Sublayer]
) -> dict[str, np.ndarray]:
    """{name: [N, ...]} of {name: {path: value}} of sublayers of one stack: a row for each layer; or for each of the
    `sublayers`, in the order of computation, if a layer has several. NaN where a sublayer has fewer heads than others, or a
    layer no value at all."""
    own = several(sublayers)
    rows = {each.path: number if own else each.layer.number for number, each in enumerate(sublayers)}
    stack = model.encoder if model.encoder and sublayers[0].prefix else model
    arrays = {}
    for name, values in figures.items():
        shape = np.max([value.shape for value in values.values()], 0)
        arrays[name] = np.full((len(sublayers) if own else stack.depth, *shape), np.nan)
        for path, value in values.items():
            place: tuple[Any, ...] = (rows[path], *map(slice, value.shape))
            arrays[name][place] = value
    return arrays


def several(sublayers: list[Sublayer]) -> bool:
    """Whether a layer has more than one of these sublayers."""
    return len({each.layer for each in sublayers}) < len(sublayers)


def about(lm: LanguageModel, rows: Sequences, data: object) -> str:
    """A line on a model and its data."""
    count, length = rows.tokens_NL.shape
    given = data is not None and not isinstance(data, str)
    of = f"{length} given tokens" if given else f"{length} tokens of {data or 'the held-out text'}"
    of += f" with sources of {rows.of_source.tokens_NL.shape[1]}" if rows.source else ""
    rows_of = "1 row" if count == 1 else f"{count} rows"
    return f"{model_line(lm.config, length)}; step {lm.step}; {rows_of} of {of}"
