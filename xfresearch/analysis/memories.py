"""The feed-forward layer as a memory (Geva et al. 2021), and with it experts and the persistent slots of attention.

A layer is y = sum_i m_i v_i with coefficients m_i of keys k_i (models/memory.py). Over a corpus:

    triggers     of each key, the tokens (ends of prefixes) with the t largest coefficients
    shared       share of the triggers whose last token (shared_2: last two tokens) at least 2 other triggers of the key
                 have too, beside the share for triggers drawn at random from the same rows
    agreement    share of keys whose value's most likely token is the token after the key's first trigger, beside the share
                 for the same values in a random order
    active       mean share of the keys whose coefficient is above 0
    composed     share of tokens at which the most likely token of y is that of no active value (the paper: at least 68 %)
    refinement   of the stream r before the layer and o = r + y after it: the share of tokens at which the most likely token
                 stays (`residual`), becomes that of y (`written`), is the same for all (`both`), or becomes a third one
                 (`third`); `third of changes` is the share of the changes that end on a third token

Triggers are those of all rows; the last three figures are of the first 16 rows. A vector's most likely token is that of the
final norm and the output head, as in the logit lens. y is what the sublayer writes before its own norm and gain. r is the
stream, as the paper defines it; its released code compares the values with the output o instead of y.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from xfresearch.analysis.result import HeatMap, Result, Table
from xfresearch.analysis.running import about, batches, by_layer, rows
from xfresearch.analysis.triggers import empty, update
from xfresearch.model_inputs import forward, tap_shapes
from xfresearch.models import layers, transformer
from xfresearch.models.memory import memory
from xfresearch.models.model_config import ModelConfig
from xfresearch.models.stack import has_dual
from xfresearch.models.taps import captured, request
from xfresearch.progress import stage
from xfresearch.statistics import mean_interval, mean_of_known

ROWS = 256
TOP = 25
BATCH = 8
COMPOSED = 16  # rows for the figures of tokens, which read three vectors of each layer with the output head
SHOWN = 6  # triggers of a key in the report
WIDTH = 40  # characters of a trigger in the report
PARTS = ("residual", "written", "both", "third")


def applies(model: ModelConfig) -> str:
    """Why the analysis does not apply to a model; '' if it does."""
    if not model.causal:
        return "it predicts labels, not next tokens"
    if has_dual(model):
        return "its final norm reads a second stream, so a value alone predicts no token"
    return "" if places(model) else "no layer has keys and values"


def places(model: ModelConfig) -> dict[int, str]:
    """{layer: its sublayer with a memory}: the feed-forward layer, or attention with slots if there is none."""
    found = {}
    for layer in layers.layers(model):
        if "feed_forward" in model.blocks[layer.block].sublayers:
            found[layer.number] = "feed_forward"
        elif _slots(model, layer.number):
            found[layer.number] = "attention"
    return found


def _slots(model: ModelConfig, layer: int) -> int:
    """The number of slots of a layer's attention: a sink alone is none."""
    return getattr(model.blocks[layers.layer(model, layer).block].attention, "memory_slots", 0)


def memories(lm, data=None, count: int = ROWS, length: int = 0, top: int = TOP, seed: int = 0) -> Result:
    """The figures above of every layer with a memory, on `count` rows of `length` tokens of `data` (running.rows).

    .data: {layer/triggers [K, t] (row * length + position), layer/coefficients [K, t], layer/value_tokens [K]: the most
    likely token of each value, tokens [rows, L]}, and [N] of each figure, NaN for layers without a memory; name_rows of
    those with intervals. K are all keys of a layer: of F units, of E experts of F, or of M slots for each of H heads.
    Raises UserError for data that cannot be read."""
    tokens_NL = rows(lm, data, count, length)
    where = places(lm.config)
    states, values, figures = {}, {}, {}
    with stage("memories", tokens_NL.size, "tokens") as progress:
        for number, tokens_BL in enumerate(batches(tokens_NL, BATCH)):
            found = _coefficients(lm.config, tuple(where.items()), lm.params, tokens_BL)
            real = min(len(tokens_BL), len(tokens_NL) - number * len(tokens_BL))
            for layer, of_layer in found.items():
                if layer not in values:
                    values[layer] = _value_tokens(lm, layer, where[layer])
                m_TK = of_layer["coefficients"][:real].reshape(-1, of_layer["coefficients"].shape[-1])
                state = states.get(layer) or empty(m_TK.shape[1], top)
                states[layer] = update(state, m_TK, number * tokens_BL.size)
                if number * BATCH < COMPOSED:
                    new = _composition(lm.config, lm.params, of_layer, values[layer])
                    for name, value in new.items():
                        figures.setdefault(name, {}).setdefault(layer, []).append(np.asarray(value)[:real])
            progress.update(real * tokens_BL.shape[1])
    return _result(lm, tokens_NL, data, states, values, figures, seed)


@partial(jax.jit, static_argnums=(0, 1))
def _coefficients(model: ModelConfig, where: tuple[tuple[int, str], ...], params: dict, tokens_BL) -> dict:
    """{layer: {coefficients [B, L, K], before, raw [B, L, D]}} of the layers in `where`."""
    sites = {layer: f"blocks.{layer}.{sublayer}" for layer, sublayer in where}
    wanted = [f"{at}.{value}" for at in sites.values() for value in ("coefficients", "chosen", "before", "raw", "out")]
    names = [name for name in wanted if name in tap_shapes(model)]
    values = captured(model, forward(model, params, tokens_BL, request(model, names))[1].captures, names)
    found = {}
    for layer, at in sites.items():
        m = values[f"{at}.coefficients"]
        if f"{at}.chosen" in values:  # [B, L, k, F] of the k chosen experts
            experts = model.blocks[layers.layer(model, layer).block].feed_forward.moe.experts
            m = jnp.einsum("blke,blkf->blef", jax.nn.one_hot(values[f"{at}.chosen"], experts, dtype=m.dtype), m)
        elif m.ndim == 4:  # [B, H, L, M] of slots, without the sink, which is the last
            m = m[..., : _slots(model, layer)].transpose(0, 2, 1, 3)
        found[layer] = {"coefficients": m.reshape(*m.shape[:2], -1)}
        found[layer] |= {value: values[f"{at}.{value}"] for value in ("before", "raw", "out")}
    return found


def _value_tokens(lm, layer: int, sublayer: str) -> jax.Array:
    """[K]: the most likely token of each value."""
    writes = memory(lm.config, lm.params, layer, sublayer).writes
    flat = writes.reshape(-1, writes.shape[-1])
    parts = [np.asarray(lm.unembed(flat[first : first + 4096]).argmax(-1)) for first in range(0, len(flat), 4096)]
    return jnp.asarray(np.concatenate(parts))


@partial(jax.jit, static_argnums=0)
def _composition(model: ModelConfig, params: dict, of_layer: dict, value_tokens_K) -> dict:
    """{figure: [B]} of one batch in one layer."""
    lm = transformer.bind(model, params)

    def likeliest(x_BLD):
        return lm.logits(lm.final_norm(x_BLD)).argmax(-1)

    active_BLK = of_layer["coefficients"] > 0
    r, y, o = (likeliest(x) for x in (of_layer["before"], of_layer["raw"], of_layer["before"] + of_layer["out"]))
    agrees_BL = (active_BLK & (value_tokens_K == y[..., None])).any(-1)
    found = {
        "active": active_BLK.mean((1, 2)),
        "composed": (~agrees_BL).mean(1),
        "residual": ((o == r) & (o != y)).mean(1),
        "written": ((o == y) & (o != r)).mean(1),
        "both": ((o == r) & (o == y)).mean(1),
        "third": ((o != r) & (o != y)).mean(1),
    }
    return found | {"changes": (o != r).mean(1)}


def _result(lm, tokens_NL, data, states, values, figures, seed: int) -> Result:
    depth = lm.config.depth
    flat = tokens_NL.reshape(-1)
    found: dict = {"tokens": tokens_NL}
    per_layer = {name: np.full(depth, np.nan) for name in ("shared", "shared_random", "shared_2", "shared_2_random")}
    per_layer |= {name: np.full(depth, np.nan) for name in ("agreement", "agreement_random")}
    for layer, state in states.items():
        at_KT = np.asarray(state["at"])
        found |= {f"{layer}/triggers": at_KT, f"{layer}/coefficients": np.asarray(state["values"])}
        found[f"{layer}/value_tokens"] = np.asarray(values[layer])
        for name, value in patterns(flat, at_KT, np.asarray(values[layer]), tokens_NL.shape[1], seed).items():
            per_layer[name][layer] = value
    per_row = {name: {n: np.concatenate(parts) for n, parts in of_layers.items()} for name, of_layers in figures.items()}
    summary = {}
    for name, of_layers in per_row.items():
        grid = by_layer(of_layers, depth).T
        found |= {name: grid.mean(0), f"{name}_rows": grid}
        summary[name] = mean_interval(mean_of_known(grid, 1))
    with np.errstate(invalid="ignore", divide="ignore"):
        found["third_of_changes"] = found["third"] / found["changes"]
    summary |= {name: (float(mean_of_known(value)), np.nan) for name, value in per_layer.items()}
    found |= per_layer
    tables = (_figures_table(found, depth), *(_keys_table(lm, found, layer) for layer in states))
    return Result("memories", about(lm, tokens_NL, data), lm.step, found, summary, _pictures(found), tables)


def patterns(flat, at_KT, value_tokens_K, length: int, seed: int) -> dict[str, float]:
    """Shared ends of triggers and agreement with the next token, each beside its rate by chance."""
    rng = np.random.default_rng(seed)
    random_KT = rng.integers(len(flat), size=at_KT.shape)
    found = {}
    for name, chosen_KT in (("", np.where(at_KT < 0, 0, at_KT)), ("_random", random_KT)):
        last_KT = flat[chosen_KT].astype(np.int64)
        before_KT = np.where(chosen_KT % length > 0, flat[chosen_KT - 1], -1)
        found[f"shared{name}"] = float((occurrences(last_KT) >= 3).mean())
        found[f"shared_2{name}"] = float((occurrences(last_KT * (flat.max() + 2) + before_KT) >= 3).mean())
    first_K = at_KT[:, 0]
    has_next_K = (first_K >= 0) & (first_K % length < length - 1)
    next_K = flat[np.minimum(first_K + 1, len(flat) - 1)]
    if has_next_K.any():
        own, others = value_tokens_K[has_next_K], next_K[has_next_K]
        found["agreement"] = float((own == others).mean())
        found["agreement_random"] = float(np.mean([(rng.permutation(own) == others).mean() for _ in range(20)]))
    return found


def occurrences(x_KT) -> np.ndarray:
    """[K, T]: how often each number occurs in its row."""
    return np.stack([(x_T[:, None] == x_T).sum(1) for x_T in x_KT])


def _pictures(found: dict) -> tuple[HeatMap, ...]:
    shares = np.stack([found[name] for name in PARTS], 1)
    caption = f"columns: {', '.join(f'{i} {name}' for i, name in enumerate(PARTS))}"
    return (HeatMap("What the layer does to the most likely token", caption, shares, "layer", "outcome", 0.0, 1.0),)


def _figures_table(found: dict, depth: int) -> Table:
    names = ("active", "composed", *PARTS, "third_of_changes", "shared", "shared_random", "agreement", "agreement_random")
    with_memory = [n for n in range(depth) if np.isfinite(found["active"][n])]
    lines = [(str(n), *(round(float(found[name][n]), 4) for name in names)) for n in with_memory]
    return Table("Layers", "shares of tokens or of keys", ("layer", *(name.replace("_", " ") for name in names)), lines)


def _keys_table(lm, found: dict, layer: int, keys: int = 40) -> Table:
    """The keys with the largest coefficients: their first triggers, and the value's most likely token."""
    order = np.argsort(-found[f"{layer}/coefficients"][:, 0])[:keys]
    lines = []
    for key in order:
        chosen = found[f"{layer}/triggers"][key][:SHOWN]
        prefixes = [prefix(lm, found["tokens"], int(at)) for at in chosen if at >= 0]
        lines.append((str(key), " | ".join(prefixes), repr(text(lm, [found[f"{layer}/value_tokens"][key]]))))
    caption = f"the {len(lines)} keys with the largest coefficients; the last token of a trigger is in ><"
    return Table(f"Keys of layer {layer}", caption, ("key", "triggers", "value"), lines)


def text(lm, tokens) -> str:
    """The tokens as text, or as numbers without a tokenizer."""
    numbers = [int(token) for token in tokens]
    return lm.tokenizer.decode(numbers) if lm.tokenizer else " ".join(map(str, numbers))


def prefix(lm, tokens_NL, at: int) -> str:
    """The end of the prefix that ends at token number `at`, with that token in >< ."""
    row, position = divmod(at, tokens_NL.shape[1])
    before = text(lm, tokens_NL[row, :position])[-WIDTH:]
    return f"{before}>{text(lm, tokens_NL[row, position : position + 1])}<".replace("\n", "\\n")
