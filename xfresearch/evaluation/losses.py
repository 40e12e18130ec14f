"""Held-out loss: of packed batches, as training measures it, and of a token stream with a sliding window.

Losses are in nats per token. The standard error is that of a ratio of sums over independent units (documents if they
are known, otherwise sequences): sqrt(n / (n - 1) sum_i (nll_i - loss tokens_i)^2) / sum_i tokens_i.
"""

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from types import MappingProxyType
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from xfresearch.data.coverage import shares
from xfresearch.data.labels import has_labels
from xfresearch.data.pipeline import prepare, stream_tokens
from xfresearch.kernels.cross_entropy import token_nll
from xfresearch.kernels.defaults import fast_layers
from xfresearch.models import transformer
from xfresearch.models.context import AUTO, Context, Execution, source_in
from xfresearch.models.model_config import ModelConfig, check_length
from xfresearch.run_config.config import Config
from xfresearch.runtime.errors import UserError

SUMS = ("nll", "correct", "tokens")  # and "bytes" for text, "answers" for labels, of which `correct` are right


def make_scorer(
    model: ModelConfig, layers: str = "auto", rows: int = 0, mesh=None, execution: Execution = AUTO
) -> Callable:
    """Returns a jitted scorer(params, batch) -> (nll_BL, correct_BL), 0 at tokens of weight 0. Make it once: every
    scorer compiles its own programs.

    A device holds the logits of `rows` tokens at a time (0: its default). Parameters and batches are sharded over `mesh`.
    """
    layers = str(fast_layers(model.depth, mesh).name) if layers == "auto" else layers

    @jax.jit
    def scorer(params, batch):
        lm = transformer.bind(model, params)
        inputs = {"source": source_in(batch), "prefix_BL": batch.get("prefix")}
        ctx = Context(batch["positions"], batch["segments"], **inputs, mesh=mesh, execution=execution)
        out = lm(batch["tokens"], ctx, layers=layers)
        nll_BL, correct_BL = token_nll(out.hidden_BLD, lm.logit_head(), batch["targets"], rows, mesh)
        scored_BL = batch["weights"] > 0
        return [jnp.where(scored_BL, x_BL, 0) for x_BL in (nll_BL, correct_BL)]

    return scorer


def make_evaluator(model: ModelConfig, layers: str = "auto", rows: int = 0, mesh=None) -> Callable:
    """Returns a jitted evaluator(params, batch, byte_lengths_V=None) -> sums over each sequence, {name: [B]}. The names are
    SUMS, "bytes" unless byte_lengths_V is None, and "answers" for a batch that has them."""
    scorer = make_scorer(model, layers, rows, mesh)

    @jax.jit
    def evaluator(params, batch, byte_lengths_V=None):
        nll_BL, correct_BL = scorer(params, batch)
        scored_BL = batch["weights"] > 0
        each = dict(zip(SUMS, (nll_BL, correct_BL, scored_BL), strict=True))
        if byte_lengths_V is not None:
            each["bytes"] = jnp.where(scored_BL, byte_lengths_V[batch["targets"]], 0)
        sums = {name: x_BL.sum(-1) for name, x_BL in each.items()}
        if "answers" in batch:
            right_BA, sums["answers"] = right_answers(correct_BL, batch["answers"])
            sums["correct"] = right_BA.sum(-1)
        return sums

    return evaluator


def right_answers(correct_BL: jax.Array, answers_BL: jax.Array | np.ndarray) -> tuple[jax.Array, jax.Array]:
    """Whether all labels of each answer are predicted [B, A], and the number of answers [B]. An answer that is not in a
    sequence is false; answer number 0, no answer, is left out."""
    L = answers_BL.shape[1]
    sums_of = jax.vmap(lambda values_L, answers_L: jax.ops.segment_sum(values_L.astype(int), answers_L, L + 1)[1:])
    labels_BA, right_BA = sums_of(jnp.ones_like(answers_BL), answers_BL), sums_of(correct_BL, answers_BL)
    return (labels_BA > 0) & (right_BA == labels_BA), (labels_BA > 0).sum(-1)


def sums_of_batches(evaluator: Callable, params: dict, batches: Iterable[dict], byte_lengths) -> dict:
    """The sums over each sequence of all `batches` [U], by the evaluator's names. Batches may be sharded over any mesh.

    `byte_lengths` int32[V] is the tokenizer's, or None for labels.
    """
    parts = []
    pending = None  # the host fetches one batch's sums while the device computes the next
    for batch in batches:
        sums = evaluator(params, batch, byte_lengths)
        if pending is not None:
            parts.append(on_host(pending))
        pending = sums
    if pending is not None:
        parts.append(on_host(pending))
    names = parts[0] if parts else (*SUMS, *(() if byte_lengths is None else ("bytes",)))
    return {name: np.concatenate([part[name] for part in parts] or [[]]) for name in names}


def on_host(sums: dict) -> dict:
    """The arrays `sums` as NumPy arrays; every process gets all of them."""
    jax.block_until_ready(sums)  # it raises the error of an allocation that has failed (sharding/capacity.py)
    if all(x.is_fully_addressable for x in sums.values()):
        return jax.device_get(sums)
    from jax.experimental.multihost_utils import process_allgather

    return process_allgather(sums, tiled=True)


def summary(sums: dict, meta: Mapping = MappingProxyType({})) -> dict:
    """The metrics of an evaluation from its sums over units [U]: those in SUMS, for text 'bytes' and optionally
    'characters', and for labels 'answers'; and how much of a split with this `meta` does not come back (coverage.shares).
    Metrics are NaN if nothing was scored. The accuracy is that of tokens, or of whole answers.

    The totals are exact (math.fsum), so they do not depend on the order of the units or on rows of padding. Hence any
    batch size and any number of processes give the same metrics from the same losses.
    """
    nll_U, correct_U, tokens_U = (np.asarray(sums[name], np.float64) for name in SUMS)
    nll = math.fsum(nll_U)
    tokens = math.fsum(tokens_U)
    graded = math.fsum(sums["answers"]) if "answers" in sums else tokens
    loss = nll / tokens if tokens else math.nan
    units = int((tokens_U > 0).sum())
    squares = math.fsum(np.square(nll_U - loss * tokens_U))
    spread = math.sqrt(squares * units / (units - 1)) if units > 1 else math.nan
    return {
        "loss": float(loss),
        **(_text_metrics(sums, nll, loss) if "bytes" in sums else {}),
        "accuracy": math.fsum(correct_U) / graded if graded else math.nan,
        "standard_error": float(spread / tokens) if tokens else math.nan,
        "units": units,
        "tokens": int(tokens),
        **shares(meta),
    }


def _text_metrics(sums: dict, nll: float, loss: float) -> dict:
    """Metrics that only text has, from the total `nll` in nats and the `loss` per token. A text of which nothing comes back
    has no bits per byte."""
    sizes = {name: math.fsum(sums[name]) for name in ("bytes", "characters") if name in sums}
    known = {name: size for name, size in sizes.items() if size or math.isnan(loss)}
    bits = {f"bits_per_{name[:-1]}": nll / size / math.log(2) if size else math.nan for name, size in known.items()}
    return {"perplexity": perplexity(loss), **bits, "bytes": round(sizes["bytes"])}


def perplexity(loss: float) -> float:
    """exp(loss), or infinity if that overflows."""
    return math.exp(loss) if not loss > 700 else math.inf


class Window(NamedTuple):
    """Tokens start to end - 1 of a stream. Only predictions of tokens `scored` to end - 1 are scored."""

    start: int
    scored: int
    end: int


def windows(start: int, end: int, length: int, stride: int) -> Iterator[Window]:
    """Windows over tokens `start` to `end` - 1, each of which predicts at most `length` tokens.

    Every token but the first is scored once, in the first window that contains it. Its context is all tokens before it
    if these are fewer than `length`, otherwise more than `length` - `stride` tokens.
    """
    scored = start + 1
    while scored < end:
        window = Window(start, scored, min(start + length + 1, end))
        yield window
        start += stride
        scored = window.end


def pack_windows(all_windows: Iterable[Window], length: int) -> Iterator[list[Window]]:
    """Packs windows in order into rows of at most `length` predictions."""
    row: list[Window] = []
    free = length
    for window in all_windows:
        size = window.end - window.start - 1
        if size > free:
            yield row
            row = []
            free = length
        row.append(window)
        free -= size
    if row:
        yield row


def window_batch(tokens: np.ndarray, rows: Sequence[list[Window]], length: int, batch_size: int) -> dict:
    """A batch [batch_size, length] in the form of packed batches, with one segment per window. `index` is the index of
    each target in `tokens`. Rows after the last of `rows` are padding."""
    names = ("tokens", "targets", "segments", "positions", "index", "weights")
    batch = {name: np.zeros((batch_size, length), np.int32) for name in names}
    for number, row in enumerate(rows):
        first = 0
        for segment, window in enumerate(row, 1):
            targets = np.arange(window.start + 1, window.end)
            here = (number, slice(first, first + len(targets)))
            batch["tokens"][here] = tokens[targets - 1]
            batch["targets"][here] = tokens[targets]
            batch["segments"][here] = segment
            batch["positions"][here] = np.arange(len(targets))
            batch["index"][here] = targets
            batch["weights"][here] = targets >= window.scored
            first += len(targets)
    return batch


class Text(NamedTuple):
    """A stream of tokens [n] and the settings of its evaluation."""

    corpus: str
    split: str
    tokens: np.ndarray
    documents: np.ndarray  # the document of each token
    sizes: dict  # bytes and characters of each token
    rows: list[list[Window]]
    length: int
    stride: int
    unit: str  # of the standard error: documents, or sequences if there is only one document
    digest: str  # of the packed split
    meta: Mapping = MappingProxyType({})  # and what it counted

    @property
    def target(self) -> str:
        """What is predicted."""
        return "token"

    @property
    def description(self) -> str:
        return f"windows of {self.length} tokens, stride {self.stride}"


def batch_size(run: Config, requested: int) -> int:
    """Sequences per batch: `requested` or, if that is 0, the run's evaluation batch size or, if that is 0 too, its
    training batch size."""
    return requested or run.evaluation.batch_size or run.batch_size


def read_text(lm, workdir, corpus="", split="", length=0, stride=0, limit=0) -> Text:
    """Reads a split of a corpus as tokens of `lm`, which was loaded from `workdir`. The defaults are the data and
    settings of the evaluation during its training.

    `limit` is a number of sequences (0: all). Raises UserError if a value does not fit the model or the data.
    """
    length = length or lm.run.sequence_length
    stride = stride or length
    check_length(lm.config, length)
    if stride > length:
        raise UserError(f"stride {stride} is not allowed: it must be at most the sequence length, {length}")
    if has_labels(corpus):
        raise UserError(f"corpus {corpus!r} is not allowed: it has labels, and {workdir} predicts next tokens")
    if lm.tokenizer is None:
        raise UserError(f"{workdir} has no tokenizer, so it cannot be evaluated on text")
    corpus, split = corpus or lm.run.data.corpus[0], split or lm.run.evaluation.split
    # The length only decides how short the text may be: sizes and digest are those of the whole split.
    meta = prepare(replace(lm.run, sequence_length=length), split, corpus, lm.tokenizer).meta
    tokens, documents = stream_tokens(lm.run, split, corpus, lm.tokenizer)
    highest = tokens.max(initial=0)
    last = lm.config.vocab_size - 1
    if highest > last:  # the tokenizer may have ids beyond the embedding table, such as a separator added to it
        raise UserError(f"corpus {corpus!r} has token {highest}, but the model's vocabulary ends at {last}")
    ends = (np.flatnonzero(np.diff(documents)) + 1).tolist() if lm.run.data.packing == "documents" else []
    spans = zip([0, *ends], [*ends, len(tokens)], strict=True)
    all_windows = (window for start, end in spans for window in windows(start, end, length, stride))
    rows = list(islice(pack_windows(all_windows, length), limit or None))
    unit = "documents" if documents[rows[-1][-1].end - 1] > 0 else "sequences"
    sizes = _sizes(lm.tokenizer, tokens, meta)
    return Text(corpus, split, tokens, documents, sizes, rows, length, stride, unit, meta["digest"], meta)


def _sizes(tokenizer, tokens: np.ndarray, meta: dict) -> dict[str, np.ndarray]:
    """Bytes and characters of each token from the tokenizer's table, scaled to the totals of the text.

    A character counts at its first byte. For byte-level tokenizers the scale is 1.
    """
    starts = np.array([sum(byte & 0xC0 != 0x80 for byte in piece) for piece in tokenizer.token_bytes])
    tables = {"bytes": tokenizer.byte_lengths[tokens], "characters": starts[tokens]}
    return {name: size * (meta[f"n_{name}"] / max(size.sum(), 1)) for name, size in tables.items()}


class Scores(NamedTuple):
    """For each token of a stream [n]: its loss, whether it was predicted, and the row that scored it (-1: none)."""

    nll: np.ndarray
    correct: np.ndarray
    row: np.ndarray
    tokens_per_second: float


def score_text(
    scorer: Callable, params: dict, text: Text, batch_size: int, progress=lambda rows: None, place=lambda batch: batch
) -> Scores:
    """Scores `text` with a scorer from `make_scorer`.

    Calls `progress(rows)` after every batch. `place` moves a batch to the scorer's devices. The rate excludes the first
    batch, which waits for compilation, unless it is the only one.
    """
    nll = np.zeros(len(text.tokens))
    correct = np.zeros(len(text.tokens))
    row_of = np.full(len(text.tokens), -1, np.int32)
    start = time.perf_counter()
    count = count_at_start = 0
    for first in range(0, len(text.rows), batch_size):
        rows = text.rows[first : first + batch_size]
        batch = window_batch(text.tokens, rows, text.length, batch_size)
        index_BL = batch.pop("index")
        scored_BL = batch["weights"] > 0
        nll_BL, correct_BL = on_host(dict(enumerate(scorer(params, place(batch))))).values()
        index = index_BL[scored_BL]
        nll[index] = nll_BL[scored_BL]
        correct[index] = correct_BL[scored_BL]
        row_of[index] = first + np.nonzero(scored_BL)[0]
        count += len(index)
        progress(len(rows))
        if first == 0 and len(text.rows) > batch_size:
            start = time.perf_counter()
            count_at_start = count
    return Scores(nll, correct, row_of, (count - count_at_start) / (time.perf_counter() - start))


def text_figures(text: Text, scores: Scores) -> dict:
    """The `summary` of all scored tokens, and the rate."""
    units = text.documents if text.unit == "documents" else scores.row
    return summary(unit_sums(text, scores, units), text.meta) | {"tokens_per_second": scores.tokens_per_second}


def document_figures(text: Text, scores: Scores, tokenizer) -> list[dict]:
    """The `summary` of every scored document, with its number and first characters."""
    sums = unit_sums(text, scores, text.documents)
    starts = np.searchsorted(text.documents, np.arange(len(sums["tokens"])))
    figures = []
    for i in np.flatnonzero(sums["tokens"]).tolist():
        own = summary({name: values[i : i + 1] for name, values in sums.items()})
        own = {name: value for name, value in own.items() if name not in ("standard_error", "units")}
        beginning = tokenizer.decode(text.tokens[starts[i] : starts[i] + 40])[:60]
        figures.append({"document": i, "starts": beginning, **own})
    return figures


def unit_sums(text: Text, scores: Scores, units_T: np.ndarray) -> dict[str, np.ndarray]:
    """Sums [U] over the scored tokens of each unit: those in SUMS, and "bytes" and "characters" that come back, of which the
    same share is lost. `units_T` is the unit of every token."""
    scored = scores.row >= 0
    kept = 1 - shares(text.meta).get("lost_bytes", 0.0)
    sizes = {name: kept * size for name, size in text.sizes.items()}
    values = {"nll": scores.nll, "correct": scores.correct, "tokens": scored, **sizes}
    return {name: np.bincount(units_T[scored], value[scored]) for name, value in values.items()}
