"""Features of a tap: sparse dictionaries of its activations, which are trained here (sparse.py), and their errors.

A dictionary reads a tap and predicts it, or another tap, the target (a transcoder). On rows that it was not trained on:

    L0                     coefficients above 0 per token
    unexplained variance   sum (y - y')^2 / sum (y - mean)^2 over tokens and dimensions
    loss recovered         (ablated - replaced) / (ablated - model): losses of the next token if the target is everywhere its
                           mean over training tokens (mean ablation), if it is y', and as it is
    dead                   share of features that no token of these rows uses

with the features' triggers, as those of memories.py. Padding does not count. A tap of an encoder has the tokens of the
source, and its dictionaries recover the loss of the decoder. Dictionaries of several sizes see the same activations in
training.
"""


import jax
import jax.numpy as jnp
import numpy as np

from xfresearch.analysis import sparse
from xfresearch.analysis.keys_page import keys_page
from xfresearch.analysis.passes import about
from xfresearch.analysis.registry import analysis
from xfresearch.analysis.result import Result
from xfresearch.analysis.sequences import Sequences, batches, mean_of_tokens, sequences, training_rows
from xfresearch.analysis.tap_vectors import BATCH, Shuffled, activations, one_tap, stack_of, width_of
from xfresearch.analysis.triggers import empty, update
from xfresearch.analysis.unfinished import Unfinished
from xfresearch.models.inputs import tap_shapes
from xfresearch.models.model_config import ModelConfig, predicts_next
from xfresearch.models.stack import ends_with, layer_ends
from xfresearch.models.tap_aliases import lens_names
from xfresearch.models.taps import of_encoder
from xfresearch.pages.charts import with_interval
from xfresearch.pages.figures import LineChart, Table, table_of
from xfresearch.runtime.errors import UserError
from xfresearch.runtime.progress import stage
from xfresearch.runtime.summaries import mean_interval, ratio_interval

ROWS = 256
TOP = 25  # triggers of a feature
WORDS = 5
K = 16
STEPS = 1000
TOKENS = 1024  # of a batch
TOGETHER = 8  # batches of a pass of the model
WIDTHS = (2, 4, 8)  # sizes of the dictionaries, by default
STREAM = ("embed", "before", "residual", "out")  # values in the space of the residual stream
FIGURES = {"L0": "l0", "unexplained variance": "unexplained", "loss recovered": "recovered", "dead": "dead"}


@analysis(predicts_next, "sparse dictionaries of a tap: what they leave out, and what triggers them")
def features(
    lm,
    data=None,
    count: int = ROWS,
    sequence_length: int = 0,
    *,
    tap: str = "",
    target: str = "",
    sizes=None,
    k: int = K,
    steps: int = STEPS,
    training=None,
    seed: int = 0,
    resume="",
    source=None,
) -> Result:
    """Trains a dictionary of each of `sizes` features (default: 2, 4 and 8 widths of the tap), and measures it on `count`
    rows of `sequence_length` tokens of `data` (sequences.py).

    tap: a name of lm.tap_names() whose value is a vector of each token; by default the stream after the middle layer.
    target: the tap to predict, by default the same, in the same stack. k: mean number of coefficients of a token. steps:
    batches of 1,024 tokens of `training` (token ids [N, L], or Sequences; None for the train split of `data`, or of the
    model's run if `data` are given). resume: a file that keeps the state once a minute, so that the same call after an
    interruption goes on from it. .data: sizes [S]; l0, unexplained, recovered, dead [S]; loss, ablated_loss [rows];
    replaced_loss, l0_rows, error_rows [rows, S] and variance_rows [rows]; tokens [rows, L]; and of each size F with inputs
    of D and outputs of E dimensions the arrays of sparse.Dictionary as F/encoder_DF ..., F/frequency [F], the share of
    tokens with the feature, F/triggers and F/coefficients [F, 25], and F/value_tokens [F, 5], the most likely tokens of what
    it writes to the stream ([F, 0] for other targets). .files: dictionary_F, a folder that SAELens reads, and pages. Raises
    UserError for other taps, for a k
    above a size, and for data that cannot be read."""
    rows = sequences(lm, data, count, sequence_length, source=source)
    taps = two_taps(lm.config, tap, target, rows.tokens_NL.shape[1])
    widths = [width_of(lm.config, name) for name in taps]
    sizes = checked([n * widths[0] for n in WIDTHS] if sizes is None else sizes, k)
    needed = -(-steps * TOKENS // rows.tokens_NL.shape[1])
    training = training_rows(lm, training, data, rows, needed)
    kept = Unfinished(resume, lm.config, lm.params, training, taps, sizes, k, steps, seed)
    stream = Shuffled(lm, training, taps, TOKENS, min(TOGETHER, steps), seed)
    scales = [sparse.scale_of(values) for values in stream.read(0)]
    states = {F: sparse.start(seed, widths[0], F, widths[1] if taps[0] != taps[1] else 0) for F in sizes}
    states = train(stream, scales, states, k, steps, kept)
    dictionaries = {F: sparse.folded(state, *scales) for F, state in states.items()}
    measured = measure(lm, rows, taps, dictionaries, scales[1].mean)
    path = " to ".join(dict.fromkeys(taps))
    line = f"{about(lm, rows, data)}; {path}; {steps} batches of {stream.batch} tokens, {k} features of a token"
    return _result(lm, line, rows, taps, dictionaries, measured)


def two_taps(model: ModelConfig, tap: str, target: str, length: int) -> tuple[str, str]:
    """The names of the tap and of the target. Raises UserError if the target is computed before the tap, or in another
    stack."""
    tap = one_tap(model, "tap", tap or f"{layer_ends(model)[(model.depth - 1) // 2]}.residual", length)
    after = one_tap(model, "target", target or tap, length)
    if of_encoder(after) != of_encoder(tap):
        raise UserError(f"target={target!r} is not allowed: it must be in the stack of tap={tap!r}, whose tokens it has")
    order = list(tap_shapes(model))
    if order.index(after) < order.index(tap):
        raise UserError(f"target={target!r} is not allowed: it must be computed after tap={tap!r}")
    return tap, after


def checked(sizes, k: int) -> tuple[int, ...]:
    """The sizes in order. Raises UserError if there are none, and for a k above the smallest."""
    sizes = tuple(sorted({int(size) for size in sizes}))
    if not sizes:
        raise UserError("sizes=() is not allowed: it must be one number or more")
    if k > sizes[0]:
        raise UserError(f"k={k} is not allowed: it must be at most the smallest size, {sizes[0]}")
    return sizes


def train(stream: Shuffled, scales: list, states: dict, k: int, steps: int, kept: Unfinished) -> dict:
    """The states of all sizes after `steps` batches of the stream."""
    done, states = _last(kept, states)
    with stage("features", steps, "batches") as progress:
        progress.update(done)
        while done < steps:
            values = stream.read(done // stream.together)
            x_CTD, y_CTE = (scale(value)[: steps - done] for scale, value in zip(scales, values, strict=True))
            states = {F: sparse.train(state, x_CTD, y_CTE, k, steps) for F, state in states.items()}
            done += len(x_CTD)
            progress.update(len(x_CTD))
            kept.save({"done": done} | {str(n): leaf for n, leaf in enumerate(jax.tree.leaves(states))})
    return states


def _last(kept: Unfinished, states: dict) -> tuple[int, dict]:
    """The number of batches that an interrupted call has done, and its states; 0 and the given ones without one."""
    saved = kept.load()
    leaves, structure = jax.tree.flatten(states)
    if not saved:
        return 0, states
    return int(saved["done"]), jax.tree.unflatten(structure, [jnp.asarray(saved[str(n)]) for n in range(len(leaves))])


def measure(lm, rows: Sequences, taps: tuple[str, str], dictionaries: dict, mean_E) -> dict:
    """{figure: [rows] or [rows, S]}, and {size: {values, at: triggers; uses: [F]}}."""
    figures: dict[str, list] = {}
    dtype = jnp.promote_types(lm.config.dtype, jnp.float32)
    best = {F: empty(F, TOP, dtype) | {"uses": np.zeros(F)} for F in dictionaries}
    with stage("measuring", len(rows), "rows") as progress:
        for number, (some, real) in enumerate(batches(rows, BATCH)):
            x_TD, y_TE = activations(lm, some, taps)
            real_BL = np.asarray(stack_of(some, taps[1]).inputs.real_NL)
            read = {F: _read(dictionary, x_TD, y_TE, real_BL) for F, dictionary in dictionaries.items()}
            losses = [loss_with(lm, some, taps[1], y) for y in (mean_E, *(each["y_TE"] for each in read.values()))]
            batch: dict = {"loss": loss(lm, some), "ablated_loss": losses[0], "replaced_loss": np.stack(losses[1:], 1)}
            batch["variance_rows"] = jnp.where(real_BL, jnp.square(y_TE - mean_E).sum(1).reshape(real_BL.shape), 0).sum(1)
            for name in ("l0_rows", "error_rows"):
                batch[name] = np.stack([each[name] for each in read.values()], 1)
            for name, value in batch.items():
                figures.setdefault(name, []).append(np.asarray(value, np.float64)[:real])
            for F, each in read.items():
                f_TF = each["f_TF"][: real * real_BL.shape[1]]
                uses_F = best[F].pop("uses") + np.asarray((f_TF > 0).sum(0))
                best[F] = update(best[F], f_TF, number * real_BL.size) | {"uses": uses_F}
            progress.update(real)
    return {name: np.concatenate(parts) for name, parts in figures.items()} | best


@jax.jit
def _read(dictionary: sparse.Dictionary, x_TD, y_TE, real_BL) -> dict:
    """{coefficients, which are 0 for padding, prediction, and of each row L0 and the squared error}."""
    f_TF = sparse.encode(dictionary, x_TD)
    rebuilt_TE = sparse.decode(dictionary, f_TF)
    f_TF = jnp.where(real_BL.reshape(-1, 1), f_TF, 0)
    error_B = jnp.where(real_BL, jnp.square(y_TE - rebuilt_TE).sum(1).reshape(real_BL.shape), 0).sum(1)
    l0_BL = (f_TF > 0).sum(1).reshape(real_BL.shape).astype(f_TF.dtype)
    return {"f_TF": f_TF, "y_TE": rebuilt_TE, "l0_rows": mean_of_tokens(l0_BL, real_BL), "error_rows": error_B}


def loss(lm, rows: Sequences, **replaced) -> np.ndarray:
    """[B]: the loss of the next token, as the mean over those that are no padding."""
    return np.asarray(mean_of_tokens(lm.loss(**rows.arguments(), **replaced), jnp.asarray(rows.real_NL[:, 1:])))


def loss_with(lm, rows: Sequences, tap: str, y) -> np.ndarray:
    """[B]: the same with the values [T, E] (or [E] for all tokens) of the tokens that the model reads at the tap."""
    of_stack, read = stack_of(rows, tap), stack_of(rows, tap).inputs
    sizes = (*rows.tokens_NL.shape, *(rows.of_source.tokens_NL.shape[1:] if rows.source is not None else ()))
    shape = tap_shapes(lm.config, *sizes)[tap].shape
    y_BLE = jnp.broadcast_to(y, (read.tokens_NL.size, y.shape[-1])).reshape(*read.tokens_NL.shape, -1)
    unread = of_stack.tokens_NL.shape[1] - read.tokens_NL.shape[1]  # the last token of a pair is only predicted
    y_BLE = jnp.pad(y_BLE, ((0, 0), (0, unread), (0, 0)))
    return loss(lm, rows, replace={tap: y_BLE.reshape(shape)})


def value_tokens(lm, target: str, rows_FE) -> np.ndarray:
    """[F, 5]: the most likely tokens of each row of the decoder; [F, 0] if the target is not in the space of the stream that
    the head reads."""
    in_stream = target.split(".")[-1] in (*STREAM, "final") and not of_encoder(target)
    if not in_stream or ends_with(lm.config) and target != "final":
        return np.zeros((len(rows_FE), 0), np.int32)
    many = min(WORDS, lm.config.vocab_size)
    parts = [rows_FE[first : first + 4096] for first in range(0, len(rows_FE), 4096)]
    return np.concatenate([np.asarray(jax.lax.top_k(lm.unembed(p, normed=target == "final"), many)[1]) for p in parts])


def _result(lm, line: str, rows: Sequences, taps, dictionaries: dict, measured: dict) -> Result:
    sizes, read = tuple(dictionaries), stack_of(rows, taps[1]).inputs
    tokens_NL, real = np.asarray(read.tokens_NL), int(np.sum(read.real_NL))
    data: dict = {"sizes": np.array(sizes), "taps": np.array(taps), "tokens": tokens_NL}
    data |= {name: value for name, value in measured.items() if name not in sizes}
    figures: dict[str, list] = {name: [] for name in FIGURES}
    files = {}
    for n, F in enumerate(sizes):
        recovered = data["ablated_loss"] - data["replaced_loss"][:, n], data["ablated_loss"] - data["loss"]
        figures["L0"].append(mean_interval(data["l0_rows"][:, n]))
        figures["unexplained variance"].append(ratio_interval(data["error_rows"][:, n], data["variance_rows"]))
        figures["loss recovered"].append(ratio_interval(*recovered))
        figures["dead"].append((float((measured[F]["uses"] == 0).mean()), np.nan))
        arrays = {name: np.asarray(value) for name, value in dictionaries[F]._asdict().items()}
        at_FT, f_FT = (np.asarray(measured[F][name]) for name in ("at", "values"))
        at_FT, f_FT = np.where(f_FT > 0, at_FT, -1), np.maximum(f_FT, 0)
        words_FW = value_tokens(lm, taps[1], arrays["decoder_FE"])
        arrays |= {"frequency": measured[F]["uses"] / real, "triggers": at_FT, "coefficients": f_FT}
        data |= {f"{F}/{name}": value for name, value in (arrays | {"value_tokens": words_FW}).items()}
        title = f"{F} features of {taps[1]}"
        files[f"features_{F}.html"] = keys_page(lm, title, line, tokens_NL, at_FT, f_FT, words_FW, "features")
        files |= _folder(lm, taps, F, dictionaries[F], tokens_NL.shape[1])
    data |= {short: np.array([value for value, _ in figures[name]]) for name, short in FIGURES.items()}
    summary = {f"{name}, {F} features": figures[name][n] for n, F in enumerate(sizes) for name in FIGURES}
    summary |= {"loss": mean_interval(data["loss"]), "loss with the mean": mean_interval(data["ablated_loss"])}
    return Result("features", line, lm.step, data, summary, _pictures(sizes, figures), (_table(data),), files)


def _folder(lm, taps, size: int, dictionary: sparse.Dictionary, length: int) -> dict[str, bytes]:
    """{name: content} of the dictionary's files, under TransformerLens' names of the taps for values that it has too, and
    ours otherwise."""
    theirs = {ours: name for name, ours in lens_names(lm.config).items()}
    read, written = (theirs.get(tap, tap) for tap in taps)
    content = sparse.files(dictionary, read, written, {"context_size": length, "tap": taps[0], "target": taps[1]})
    return {f"dictionary_{size}/{name}": each for name, each in content.items()}


def _pictures(sizes, figures: dict) -> tuple[LineChart, ...]:
    captions = {"L0": "coefficients above 0 per token", "unexplained variance": "share", "dead": "share of features"}
    captions["loss recovered"] = "1: the model's loss, 0: that with the mean"
    points = {name: np.array([(F, *pair) for F, pair in zip(sizes, of, strict=True)]) for name, of in figures.items()}
    return tuple(
        LineChart(name, captions[name], "number of features", tuple(with_interval(of))) for name, of in points.items()
    )


def _table(data: dict) -> Table:
    columns = {name: data[short] for name, short in FIGURES.items()} | {"loss": data["replaced_loss"].mean(0)}
    caption = "loss: with the prediction instead of the target; dead: not used by any token of these rows"
    return table_of("Dictionaries", caption, "features", data["sizes"], columns)
