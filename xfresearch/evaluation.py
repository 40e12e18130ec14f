"""Held-out loss: of packed batches, as training measures it, and of a stream of tokens under a sliding window.

Losses are nats per token. The standard error is that of a ratio of sums over units drawn independently (documents where
they are known, otherwise sequences): sqrt(n / (n - 1) sum_i (nll_i - loss tokens_i)^2) / sum_i tokens_i.
"""

import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import islice
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from xfresearch.config.run import Config
from xfresearch.data.labels import has_labels
from xfresearch.data.pipeline import LabelledSplit, evaluation_batches, prepare, stream_tokens
from xfresearch.errors import UserError
from xfresearch.kernels.cross_entropy import token_nll
from xfresearch.models import transformer
from xfresearch.models.context import Context, Execution
from xfresearch.models.decoding import fast_layers
from xfresearch.models.model_config import ModelConfig, longest_sequence

SUMS = ("nll", "correct", "tokens")  # and "bytes", where the tokens are of a text


def make_scorer(
    model: ModelConfig, layers: str = "auto", rows: int = 1024, mesh=None, execution: Execution = Execution()
) -> Callable:
    """scorer(params, batch) -> (nll_BL, correct_BL), 0 where the batch's weight is 0. Jitted; make it once.

    `rows` is how many tokens' logits a device has at once, `mesh` what the parameters and batches lie on.
    """
    layers = fast_layers(mesh) if layers == "auto" else layers

    @jax.jit
    def scorer(params, batch):
        lm = transformer.bind(model, params)
        ctx = Context(batch["positions"], batch["segments"], mesh=mesh, execution=execution)
        out = lm(batch["tokens"], ctx, layers=layers)
        nll_BL, correct_BL = token_nll(out.hidden_BLD, lm.logit_head(), batch["targets"], rows, mesh)
        scored_BL = batch["weights"] > 0
        return [jnp.where(scored_BL, x_BL, 0) for x_BL in (nll_BL, correct_BL)]

    return scorer


def make_evaluator(model: ModelConfig, layers: str = "auto", rows: int = 1024, mesh=None) -> Callable:
    """evaluator(params, batch, byte_lengths_V) -> sums over each sequence, {name: [B]} for the names in SUMS, and for
    "bytes" unless byte_lengths_V is None."""
    scorer = make_scorer(model, layers, rows, mesh)

    @jax.jit
    def evaluator(params, batch, byte_lengths_V):
        nll_BL, correct_BL = scorer(params, batch)
        scored_BL = batch["weights"] > 0
        each = dict(zip(SUMS, (nll_BL, correct_BL, scored_BL), strict=True))
        if byte_lengths_V is not None:
            each["bytes"] = jnp.where(scored_BL, byte_lengths_V[batch["targets"]], 0)
        return {name: x_BL.sum(-1) for name, x_BL in each.items()}

    return evaluator


def evaluate_batches(evaluator: Callable, params: dict, batches: Iterable[dict], byte_lengths) -> dict:
    """`summary` over all `batches`, whose arrays may lie on any mesh. Reads one batch while the device has the next.

    `byte_lengths` [V] is the tokenizer's, or None for labels."""
    byte_lengths = None if byte_lengths is None else np.asarray(byte_lengths, np.int32)
    parts, waiting, names = [], None, SUMS if byte_lengths is None else (*SUMS, "bytes")
    for batch in batches:
        sums = evaluator(params, batch, byte_lengths)
        if waiting is not None:
            parts.append(on_host(waiting))
        waiting = sums
    if waiting is not None:
        parts.append(on_host(waiting))
    return summary({name: np.concatenate([part[name] for part in parts] or [[]]) for name in names})


def on_host(sums: dict) -> dict:
    """The arrays `sums` as NumPy's, whole in every process."""
    if all(x.is_fully_addressable for x in sums.values()):
        return jax.device_get(sums)
    from jax.experimental.multihost_utils import process_allgather

    return process_allgather(sums, tiled=True)


def summary(sums: dict) -> dict:
    """The figures of an evaluation from sums over its units [U], those in SUMS, and of a text 'bytes' and perhaps
    'characters'; NaN where nothing was scored.

    Sums are exact (math.fsum): they do not depend on the order of the units, nor on rows of padding between them, so
    that any batch size and any number of processes give the same figures from the same losses.
    """
    nll_U, correct_U, tokens_U = (np.asarray(sums[name], np.float64) for name in SUMS)
    nll, tokens = math.fsum(nll_U), math.fsum(tokens_U)
    loss = nll / tokens if tokens else math.nan
    units = int((tokens_U > 0).sum())
    squares = math.fsum(np.square(nll_U - loss * tokens_U))
    spread = math.sqrt(squares * units / (units - 1)) if units > 1 else math.nan
    return {
        "loss": float(loss),
        **(_of_text(sums, nll, loss) if "bytes" in sums else {}),
        "accuracy": math.fsum(correct_U) / tokens if tokens else math.nan,
        "standard_error": float(spread / tokens) if tokens else math.nan,
        "units": units,
        "tokens": int(tokens),
    }


def _of_text(sums: dict, nll: float, loss: float) -> dict:
    """What a loss says of a text, and of no labels: `nll` nats in all, `loss` by token."""
    sizes = {name: math.fsum(sums[name]) for name in ("bytes", "characters") if name in sums}
    bits = {name: nll / size / math.log(2) if size else math.nan for name, size in sizes.items()}
    by_character = {"bits_per_character": bits["characters"]} if "characters" in bits else {}
    return {
        "perplexity": perplexity(loss),
        "bits_per_byte": bits["bytes"],
        **by_character,
        "bytes": round(sizes["bytes"]),
    }


def perplexity(loss: float) -> float:
    """exp(loss), infinite beyond what a float holds."""
    return math.exp(loss) if not loss > 700 else math.inf


class Window(NamedTuple):
    """Tokens start to end - 1 of a stream, of which those from `scored` on are predicted and counted."""

    start: int
    scored: int
    end: int


def windows(start: int, end: int, length: int, stride: int) -> Iterator[Window]:
    """Windows over tokens `start` to `end` - 1, each predicting at most `length` tokens.

    Every token but the first is scored once, in the first window that holds it: with all that stands before it where
    that is less than `length` tokens, otherwise with more than `length` - `stride` tokens.
    """
    scored = start + 1
    while scored < end:
        window = Window(start, scored, min(start + length + 1, end))
        yield window
        start, scored = start + stride, window.end


def pack_windows(all_windows: Iterable[Window], length: int) -> Iterator[list[Window]]:
    """Windows side by side in rows of `length` predictions, in order."""
    row, room = [], length
    for window in all_windows:
        size = window.end - window.start - 1
        if size > room:
            yield row
            row, room = [], length
        row.append(window)
        room -= size
    if row:
        yield row


def window_batch(tokens: np.ndarray, rows: Sequence[list[Window]], length: int, batch_size: int) -> dict:
    """A batch [batch_size, length] as the packed ones are, a segment per window; and `index`, where in `tokens` each
    target stands. Rows beyond `rows` are padding."""
    names = ("tokens", "targets", "segments", "positions", "index", "weights")
    batch = {name: np.zeros((batch_size, length), np.int32) for name in names}
    for number, row in enumerate(rows):
        first = 0
        for segment, window in enumerate(row, 1):
            targets = np.arange(window.start + 1, window.end)
            here = (number, slice(first, first + len(targets)))
            batch["tokens"][here], batch["targets"][here] = tokens[targets - 1], tokens[targets]
            batch["segments"][here], batch["positions"][here] = segment, np.arange(len(targets))
            batch["index"][here], batch["weights"][here] = targets, targets >= window.scored
            first += len(targets)
    return batch


class Text(NamedTuple):
    """A stream of tokens [n] and how it is evaluated."""

    corpus: str
    split: str
    tokens: np.ndarray
    documents: np.ndarray  # the document of each token
    sizes: dict  # bytes and characters that each token stands for
    rows: list[list[Window]]
    length: int
    stride: int
    unit: str  # what the standard error is over: documents, or sequences where there is only one document

    each = "token"  # that is predicted

    @property
    def rows_are(self) -> str:
        return f"windows of {self.length} tokens, stride {self.stride}"


def check_length(model: ModelConfig, length: int) -> None:
    """UserError where the model's tables of positions do not reach `length` tokens."""
    rows = longest_sequence(model)
    if rows and length > rows:
        raise UserError(
            f"sequence length {length} is not allowed: it must be at most {rows}, the rows of its positions"
        )


def batch_size(run: Config, asked: int) -> int:
    """Sequences at once: as `asked`, as the run evaluates, or as it trains; 0 leaves it to the next of them."""
    return asked or run.evaluation.batch_size or run.batch_size


def read_text(lm, workdir, corpus="", split="", length=0, stride=0, limit=0) -> Text:
    """A split of a corpus in the tokens of `lm`, loaded from `workdir`; by default what its training evaluates.

    `limit` is of sequences (0: all). UserError where a value does not fit the model or the data.
    """
    length = length or lm.run.sequence_length
    stride = stride or length
    check_length(lm.config, length)
    if stride > length:
        raise UserError(f"stride {stride} is not allowed: it must be at most the sequence length, {length}")
    if has_labels(corpus):
        raise UserError(f"corpus {corpus!r} is not allowed: it has labels, and {workdir} predicts next tokens")
    if lm.tokenizer is None:
        raise UserError(f"{workdir} has no tokenizer, so that there are no tokens of a text to evaluate on")
    kept = workdir / "tokenizer"  # by a run; a model of others names its own
    data = replace(lm.run.data, tokenizer=str(kept)) if kept.exists() else lm.run.data
    config, corpus, split = replace(lm.run, data=data), corpus or data.corpus[0], split or lm.run.evaluation.split
    meta = prepare(config, split, corpus).meta
    tokens, documents = stream_tokens(config, split, corpus)
    top, highest = lm.config.vocab_size - 1, tokens.max(initial=0)
    if highest > top:  # a tokenizer may have ids that its model has no rows for, such as a separator made up for it
        raise UserError(f"as tokens, corpus {corpus!r} has {highest}; the model's vocabulary ends at {top}")
    ends = np.flatnonzero(np.diff(documents)) + 1 if data.packing == "documents" else []
    spans = zip([0, *ends], [*ends, len(tokens)], strict=True)
    every = (window for start, end in spans for window in windows(start, end, length, stride))
    rows = list(islice(pack_windows(every, length), limit or None))
    unit = "documents" if documents[rows[-1][-1].end - 1] > 0 else "sequences"
    return Text(corpus, split, tokens, documents, _sizes(lm.tokenizer, tokens, meta), rows, length, stride, unit)


class Labels(NamedTuple):
    """A split of a data set with labels, and how it is evaluated."""

    corpus: str
    split: str
    sequences: LabelledSplit
    rows: range  # as many sequences as are evaluated, evenly spread over the split
    length: int
    unit: str = "sequences"

    each = "label"

    @property
    def rows_are(self) -> str:
        return f"sequences of {self.length} tokens"


def read_labels(lm, workdir, corpus="", split="", length=0, limit=0) -> Labels:
    """A split of a data set with labels; by default what the training of `lm`, loaded from `workdir`, evaluates.

    `limit` is of sequences (0: all). UserError where a value does not fit the model or the data.
    """
    corpus, split = corpus or lm.run.data.corpus[0], split or lm.run.evaluation.split
    length = length or lm.run.sequence_length
    check_length(lm.config, length)
    if not has_labels(corpus):
        raise UserError(f"corpus {corpus!r} is not allowed: it has no labels, and {workdir} predicts labels")
    sequences = prepare(replace(lm.run, sequence_length=length), split, corpus)
    classes, top = sequences.meta["vocab_size"], lm.config.vocab_size
    if classes > top:
        raise UserError(f"corpus {corpus!r} has {classes} classes; the model's vocabulary has {top}")
    return Labels(corpus, split, sequences, range(min(limit or len(sequences), len(sequences))), length)


def label_figures(
    scorer: Callable,
    params: dict,
    labels: Labels,
    batch_size: int,
    progress=lambda rows: None,
    place=lambda batch: batch,
) -> dict:
    """`summary` of all labels, each unit a sequence, with a scorer of `make_scorer`; calls `progress(rows)` after every
    batch. `place` puts a batch where the scorer wants it."""
    parts = []
    for batch in evaluation_batches(labels.sequences, batch_size, len(labels.rows)):
        nll_BL, correct_BL = on_host(dict(enumerate(scorer(params, place(batch))))).values()
        parts.append((nll_BL.sum(-1), correct_BL.sum(-1), batch["weights"].sum(-1)))
        progress(int(batch["segments"].any(-1).sum()))  # the last batch is filled up with rows of nothing
    return summary(dict(zip(SUMS, map(np.concatenate, zip(*parts, strict=True)), strict=True)))


def _sizes(tokenizer, tokens: np.ndarray, meta: dict) -> dict[str, np.ndarray]:
    """Bytes and characters of each token by the tokenizer's table, scaled so that they sum to what the text has.

    A character is counted where its first byte is. Tables of byte-level tokenizers need no scaling.
    """
    starts = np.array([sum(byte & 0xC0 != 0x80 for byte in piece) for piece in tokenizer.token_bytes])
    tables = {"bytes": tokenizer.byte_lengths[tokens], "characters": starts[tokens]}
    return {name: size * (meta[f"n_{name}"] / max(size.sum(), 1)) for name, size in tables.items()}


class Scores(NamedTuple):
    """Of each token of a stream [n]: its loss and whether it was predicted; the row that scored it, -1 where none did."""

    nll: np.ndarray
    correct: np.ndarray
    row: np.ndarray
    tokens_per_second: float


def score_text(
    scorer: Callable, params: dict, text: Text, batch_size: int, progress=lambda rows: None, place=lambda batch: batch
) -> Scores:
    """Scores `text` with a scorer of `make_scorer`; calls `progress(rows)` after every batch. `place` puts a batch where
    the scorer wants it.

    The rate leaves out the first batch, which waits for compilation, unless it is the only one.
    """
    nll, correct = np.zeros(len(text.tokens)), np.zeros(len(text.tokens))
    row_of = np.full(len(text.tokens), -1, np.int32)
    begin, before, count = time.perf_counter(), 0, 0
    for first in range(0, len(text.rows), batch_size):
        rows = text.rows[first : first + batch_size]
        batch = window_batch(text.tokens, rows, text.length, batch_size)
        index_BL, scored_BL = batch.pop("index"), batch["weights"] > 0
        nll_BL, correct_BL = on_host(dict(enumerate(scorer(params, place(batch))))).values()
        at = index_BL[scored_BL]
        nll[at], correct[at], row_of[at] = nll_BL[scored_BL], correct_BL[scored_BL], first + np.nonzero(scored_BL)[0]
        count += len(at)
        progress(len(rows))
        if first == 0 and len(text.rows) > batch_size:
            begin, before = time.perf_counter(), count
    return Scores(nll, correct, row_of, (count - before) / (time.perf_counter() - begin))


def text_figures(text: Text, scores: Scores) -> dict:
    """`summary` of all that was scored, and the rate."""
    units = text.documents if text.unit == "documents" else scores.row
    return summary(_sums(text, scores, units)) | {"tokens_per_second": scores.tokens_per_second}


def document_figures(text: Text, scores: Scores, tokenizer) -> list[dict]:
    """`summary` of every document that was scored, with its number and how it starts."""
    sums = _sums(text, scores, text.documents)
    starts = np.searchsorted(text.documents, np.arange(len(sums["tokens"])))
    figures = []
    for i in np.flatnonzero(sums["tokens"]).tolist():
        own = summary({name: values[i : i + 1] for name, values in sums.items()})
        own = {name: value for name, value in own.items() if name not in ("standard_error", "units")}
        beginning = tokenizer.decode(text.tokens[starts[i] : starts[i] + 40])[:60]
        figures.append({"document": i, "starts": beginning, **own})
    return figures


def _sums(text: Text, scores: Scores, units_T: np.ndarray) -> dict[str, np.ndarray]:
    """Sums [U] over the scored tokens of each unit, `units_T` being the unit of every token."""
    scored = scores.row >= 0
    values = {"nll": scores.nll, "correct": scores.correct, "tokens": scored, **text.sizes}
    return {name: np.bincount(units_T[scored], value[scored]) for name, value in values.items()}
