"""The logit lens, the prediction that each layer would make; and the parts of the model that make the final prediction.

logit lens (nostalgebraist 2020): the stream after a layer, read by the final norm and the head as if it were the last one:

    loss        of the next token, in nats                    agreement   share of tokens with the final most likely token
    divergence  KL(final || layer) in nats

direct attribution (Elhage et al. 2021): the part of the logit of the next token, relative to the mean logit of the
vocabulary, that each sublayer, each head of attention, and each key of a memory adds (contributions.py): its product with
the next token's vector in the output head minus the mean vector. The parts sum to that relative logit, before a softcap.

With an encoder all of this is of the decoder. The final norm and the head never read the encoder's stream, so it has no
predictions: it reaches a logit through the heads of cross-attention, which are parts. Padding does not count.
"""

from collections import Counter
from collections.abc import Iterable, Iterator
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from xfresearch.analysis import coefficients
from xfresearch.analysis.contributions import Pass, directions, not_followed, parts, recorded
from xfresearch.analysis.keys_page import text
from xfresearch.analysis.passes import about
from xfresearch.analysis.registry import analysis
from xfresearch.analysis.result import Result, over_rows
from xfresearch.analysis.sequences import ROWS, Sequences, batches, mean_of_tokens, passed, sequences
from xfresearch.kernels.dtypes import wide_dtype
from xfresearch.models import transformer
from xfresearch.models.block import Stream
from xfresearch.models.memories import memory_of
from xfresearch.models.model_config import ModelConfig, predicts_next
from xfresearch.models.stack import ends_with, layer_ends
from xfresearch.models.taps import captured, of_encoder, request
from xfresearch.pages.figures import HeatMap, Table, table, table_of
from xfresearch.runtime.progress import stage
from xfresearch.runtime.summaries import mean_interval

BATCH = 4
EXAMPLE = 12  # tokens of the first row in the picture
LARGEST = 15  # parts in a table
FIGURES = ("loss", "agreement", "divergence")


def applies(model: ModelConfig) -> str:
    """Why the analysis does not apply to a model; '' if it does."""
    return predicts_next(model) or not_followed(model)


@analysis(applies, "predictions after each layer, and which parts make the final one")
def lens(lm, data=None, count: int = ROWS, sequence_length: int = 0, source=None) -> Result:
    """The figures above on `count` rows of `sequence_length` tokens of `data` (sequences.py).

    .data: loss, agreement, divergence [N]; attribution [parts], with their names in `parts`; by_sublayer [N, sublayers],
    with their names in `sublayers`, and by_head [N, H] of it (`grids`); name_rows: the same for each row;
    'blocks.<layer>.<sublayer>.keys' [K]: that of each key of a memory (models/memories.py); token, probability [N, L]: the
    most likely next token after each layer, of the first row. The intervals of .summary are over rows. Raises UserError for
    data that cannot be read."""
    rows = sequences(lm, data, count, sequence_length, source=source)
    of_batches: dict[str, list] = {}
    by_key: dict[str, np.ndarray] = {}
    example: dict[str, np.ndarray] = {}
    with stage("lens", len(rows), "rows") as progress:
        for some, real in batches(rows, BATCH):
            read = by_depth(lm.config, lm.params, None, some)
            of_parts, of_keys = attributed(lm.config, lm.params, some)
            example = example or {name: np.asarray(read[name][0]) for name in ("token", "probability")}
            for name, value in ({name: read[name] for name in FIGURES} | of_parts).items():
                of_batches.setdefault(name, []).append(np.asarray(value[:real], np.float64))
            for name, value_BK in of_keys.items():
                by_key[name] = by_key.get(name, 0.0) + np.asarray(value_BK[:real], np.float64).sum(0) / len(rows)
            progress.update(real)
    per_row = {name: np.concatenate(values) for name, values in of_batches.items()}
    figures = {name: per_row.pop(name) for name in FIGURES}
    arrays = over_rows(figures).data
    arrays |= {"parts": np.array(list(per_row)), "attribution": np.array([value.mean() for value in per_row.values()])}
    arrays["attribution_rows"] = np.stack(list(per_row.values()), 1)
    arrays |= grids(lm.config, dict(zip(per_row, arrays["attribution"], strict=True)))
    arrays |= {f"{name}.keys": value for name, value in by_key.items()} | example
    tables = tuple(_tables(arrays, by_key))
    pictures = (_example(lm, rows.chosen(slice(0, 1)).inputs, **example), *_pictures(arrays))
    return Result("lens", about(lm, rows, data), lm.step, arrays, _summary(figures), pictures, tables)


@partial(jax.jit, static_argnums=0)
def by_depth(model: ModelConfig, params: dict, translators: dict | None, rows: Sequences) -> dict:
    """{loss, agreement, divergence: [B, N]; token, probability: [B, N, L] of the most likely token} of the streams after all
    layers of the decoder, each read as if it were the last one.

    translators: those of the tuned lens, {matrix: [N, D, D], bias: [N, D]}, or None. Gradients go to them only."""
    ends = layer_ends(model)
    names = [f"{end}.{site}" for end in ends for site in ("residual", *ends_with(model))]
    lm, out = passed(model, params, rows.inputs, request(model, names))
    values = captured(model, out.captures, names)
    real_BL, has_next_BL, next_BL = rows.inputs.real_NL, rows.has_next_NL, rows.next_NL
    residual, *others = (
        jax.lax.stop_gradient(jnp.stack([values[f"{end}.{site}"] for end in ends]))
        for site in ("residual", *ends_with(model))
    )
    streams = Stream(residual, dict(zip(ends_with(model), others, strict=True)))
    final_BLV = jax.lax.stop_gradient(jax.nn.log_softmax(lm.logits(out.hidden_BLD)))

    @jax.checkpoint
    def figures(inputs):
        stream, translator = inputs
        if translator is not None:
            matrix_DD, bias_D = (translator[name].astype(stream.x_BLD.dtype) for name in ("matrix", "bias"))
            stream = stream._replace(x_BLD=stream.x_BLD + stream.x_BLD @ matrix_DD + bias_D)
        bound = transformer.bind(model, params)
        log_p_BLV = jax.nn.log_softmax(bound.logits(bound.end(stream)))
        own_BL = jnp.take_along_axis(log_p_BLV, next_BL[..., None], -1)[..., 0]
        agrees_BL = (log_p_BLV.argmax(-1) == final_BLV.argmax(-1)).astype(final_BLV.dtype)
        return {
            "loss": -mean_of_tokens(own_BL, has_next_BL),
            "agreement": mean_of_tokens(agrees_BL, real_BL),
            "divergence": mean_of_tokens((jnp.exp(final_BLV) * (final_BLV - log_p_BLV)).sum(-1), real_BL),
            "token": log_p_BLV.argmax(-1),
            "probability": jnp.exp(log_p_BLV.max(-1)),
        }

    return {name: value.swapaxes(0, 1) for name, value in jax.lax.map(figures, (streams, translators)).items()}


@partial(jax.jit, static_argnums=0)
def attributed(model: ModelConfig, params: dict, rows: Sequences) -> tuple[dict, dict]:
    """{part: [B]}: the attribution of each part, as the mean over tokens that are no padding; and the same {memory: [B, K]}
    of each key."""
    wanted = [name for memory in read_memories(model) for name in coefficients.sites(model, memory)]
    forward_pass = recorded(model, params, rows.without_last(), tuple(wanted))
    next_BL, real_BL = rows.tokens_NL[:, 1:], rows.real_NL[:, 1:]
    head = forward_pass.lm.logit_head()
    wide = wide_dtype(head.table_VD)
    table_VD = head.scale * head.table_VD.astype(wide)
    towards_BLD = table_VD[next_BL] - table_VD.mean(0)

    def mean(x_BL):
        return mean_of_tokens(x_BL, real_BL)

    of_parts = {name: mean((value.astype(wide) * towards_BLD).sum(-1)) for name, value in parts(forward_pass, True).items()}
    if head.bias_V is not None:
        of_parts["head_bias"] = mean(head.bias_V[next_BL] - head.bias_V.mean())
    return of_parts, {name: mean(value) for name, value in _of_keys(forward_pass, params, towards_BLD).items()}


def read_memories(model: ModelConfig) -> list[str]:
    """The memories that write to the stream which the head reads."""
    return [memory for memory in coefficients.memory_names(model) if not of_encoder(memory)]


def _of_keys(forward_pass: Pass, params: dict, towards_BLD) -> dict[str, jax.Array]:
    """{memory: [B, L, K]}: m_i v_i . d of each key, with the direction d in which its sublayer adds to `towards`."""
    model, of_keys = forward_pass.config, {}
    towards = directions(forward_pass, towards_BLD)
    for memory in read_memories(model):
        by_head = forward_pass.values[f"{memory}.coefficients"].ndim == 4 and f"{memory}.chosen" not in forward_pass.values
        if coefficients.written_by(memory) not in towards or by_head and f"{memory}.gate" in forward_pass.values:
            continue  # another sublayer reads it, or a gate changes the values of the slots
        writes_KD = memory_of(model, params, memory).writes.reshape(-1, model.width)
        m_BLK = coefficients.of_keys(model, memory, forward_pass.values, gated=True).astype(towards_BLD.dtype)
        direction_BLD = towards[coefficients.written_by(memory)].astype(towards_BLD.dtype)
        of_keys[memory] = m_BLK * (direction_BLD @ writes_KD.astype(towards_BLD.dtype).T)
    return of_keys


def grids(model: ModelConfig, attribution: dict[str, float]) -> dict[str, np.ndarray]:
    """by_sublayer [N, sublayers], their names in `sublayers`, and by_head [N, H] of {part: attribution}; where a layer has
    several mixers, by_head/<sublayer> [N, H] of each."""
    names = list(dict.fromkeys(name for block in model.blocks.values() for name in block.sublayers))
    of_sublayer = np.full((model.depth, len(names)), np.nan)
    of_heads: dict[str, dict[tuple[int, int], float]] = {}
    for part, value in attribution.items():
        if part.startswith("blocks."):
            _, number, sublayer, *rest = part.split(".")
            at = int(number), names.index(sublayer)
            of_sublayer[at] = np.nan_to_num(of_sublayer[at]) + value
            if rest and rest[0].isdigit():
                of_heads.setdefault(sublayer, {})[int(number), int(rest[0])] = value
    arrays = {"by_sublayer": of_sublayer, "sublayers": np.array(names)}
    mixers = Counter(layer for heads in of_heads.values() for layer in {layer for layer, _ in heads})
    several = max(mixers.values(), default=0) > 1  # in a layer
    most = 1 + max((head for heads in of_heads.values() for _, head in heads), default=0)
    for sublayer, heads in of_heads.items():
        name = f"by_head/{sublayer}" if several else "by_head"
        grid = arrays.setdefault(name, np.full((model.depth, most), np.nan))
        grid[tuple(np.array(list(heads)).T)] = list(heads.values())
    return arrays


def _summary(figures: dict[str, np.ndarray]) -> dict[str, tuple[float, float]]:
    middle = figures["loss"].shape[1] // 2
    summary = {"loss": mean_interval(figures["loss"][:, -1])}
    if middle:
        summary[f"loss after layer {middle - 1}"] = mean_interval(figures["loss"][:, middle - 1])
        summary[f"agreement after layer {middle - 1}"] = mean_interval(figures["agreement"][:, middle - 1])
    return summary


def _example(lm, row: Sequences, token, probability) -> HeatMap:
    """The most likely next token after each layer, at the last tokens of the row."""
    end = int(np.sum(row.real_NL))
    last = slice(max(end - EXAMPLE, 0), end)
    texts = tuple(tuple(text(lm, [t]) for t in row) for row in token[:, last])
    names = tuple(text(lm, [t]) for t in row.tokens_NL[0, last])
    caption = "after each layer, at the tokens below; colour: its probability; · is a space"
    return HeatMap("Most likely next tokens", caption, probability[:, last], "layer", "token", 0.0, 1.0, names, texts)


def _pictures(data: dict) -> tuple[HeatMap, ...]:
    caption = "part of the next token's logit, relative to the mean logit"
    maps = {"by_sublayer": ("Attribution by sublayer", "sublayer"), "by_head": ("Attribution by head", "head")}
    of_mixers = [name.partition("/")[2] for name in data if name.startswith("by_head/")]
    maps |= {f"by_head/{name}": (f"Attribution by head of {name}", "head") for name in of_mixers}
    pictures = []
    for name, (title, columns) in maps.items():
        if name in data:
            most = float(np.nanmax(np.abs(data[name]))) or 1.0
            names = tuple(map(str, data["sublayers"])) if name == "by_sublayer" else ()
            pictures.append(HeatMap(title, caption, data[name], "layer", columns, -most, most, names))
    return tuple(pictures)


def _tables(data: dict, by_key: dict[str, np.ndarray]) -> Iterator[Table]:
    columns = dict(zip(("loss in nats", "agreement", "divergence in nats"), (data[name] for name in FIGURES), strict=True))
    caption = "of the stream after a layer, read as if it were the last one"
    yield table_of("Predictions by depth", caption, "after layer", range(len(data["loss"])), columns)
    yield _largest("Largest parts", ("part", "logit"), zip(data["parts"], data["attribution"], strict=True))
    if by_key:
        keys = ((name, key, value) for name, value_K in by_key.items() for key, value in enumerate(value_K))
        yield _largest("Largest memories", ("memory", "key", "logit"), keys)


def _largest(title: str, columns: tuple[str, ...], lines: Iterable[tuple]) -> Table:
    """The lines with the largest numbers, which are their last cells."""
    largest = sorted(lines, key=lambda line: -abs(line[-1]))[:LARGEST]
    return table(title, "mean part of the next token's logit, relative to the mean logit", columns, largest)
