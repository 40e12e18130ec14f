"""The feed-forward layer as a memory (Geva et al. 2021), and with it experts and the persistent slots of attention.

A memory is y = sum_i m_i v_i with coefficients m_i of keys k_i (coefficients.py). Over a corpus, with the stream r before
the layer, y, which the layer adds to it, and the stream o after the layer:

    triggers     of each key, the tokens (ends of prefixes) with the t largest coefficients, as far as these are above 0: a
                 key that no token activates has none
    shared, shared_2, shared_word, agreement: patterns of the triggers, each beside its rate by chance, see below
    active       mean share of the keys whose coefficient is above 0
    composed     share of tokens at which y predicts a token that no active value predicts alone (the paper: at least 68 %)
    refinement   the share of tokens at which the most likely token of o is that of r (`residual`), of y (`written`), of both
                 (`both`), or a third one (`third`); `third of changes` is the share of the changes from r to o that end on a
                 third token. NaN in layouts that do not add y to r, such as those with skip gains, without skips, and
                 deep_norm

Triggers are those of all rows; the last three figures are of the first 16 rows. A vector's most likely token is that of the
final norm and the output head, as in the logit lens. y is all that the sublayer adds, after its own norm (peri_norm,
output_norm) and gain, and v_i is as well, with that norm as the linear map that it is at v_i: with slots, y includes what
attention reads from tokens. In an encoder the triggers are tokens of the source, and values predict no token, so the figures
of tokens are NaN there: the final norm and the head do not read its stream. o is after a norm of the sum (post_norm,
all_attention). r is the stream, as the paper defines it; its released code compares the values with the output o instead of
y.

Shallow patterns of the triggers (section 3 of the paper), found without a reader, beside their rates by chance: for triggers
drawn at random from the same rows, and for the values in a random order.

    shared        share of the triggers whose last token at least 2 other triggers of the key have too
    shared_2      the same for the last two tokens
    shared_word   the same for the last word: the letters and digits that end in or before the last token
    agreement     share of keys whose value's most likely token is the token after the key's first trigger
"""

import re
from collections.abc import Iterator
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from xfresearch.analysis.coefficients import memory_names, of_keys, sites, sublayer_of, written_by
from xfresearch.analysis.contributions import scaled
from xfresearch.analysis.keys_page import keys_page, text, trigger
from xfresearch.analysis.passes import about
from xfresearch.analysis.registry import analysis
from xfresearch.analysis.result import Result, over_rows
from xfresearch.analysis.sequences import Sequences, batches, mean_of_tokens, passed, sequences
from xfresearch.analysis.tap_vectors import stack_of
from xfresearch.analysis.token_text import plain
from xfresearch.analysis.triggers import empty, update
from xfresearch.analysis.unfinished import Unfinished
from xfresearch.kernels.dtypes import wide_dtype
from xfresearch.models import transformer
from xfresearch.models.connections.connection import ONE
from xfresearch.models.memories import memory_of
from xfresearch.models.model_config import ModelConfig, predicts_next
from xfresearch.models.stack import end_formula, ends_with
from xfresearch.models.stream import Stream
from xfresearch.models.taps import captured, of_encoder, request
from xfresearch.pages.figures import HeatMap, Table, table_of
from xfresearch.runtime.progress import stage
from xfresearch.runtime.summaries import mean_of_known

ROWS = 256
TOP = 25
BATCH = 8
COMPOSED = 16  # rows for the figures of tokens, which read three vectors of each layer with the output head
WORDS = 5  # tokens of a value
SHOWN = 6  # triggers of a key in the report
PARTS = ("residual", "written", "both", "third")
REPEATED = 3  # triggers of a key make a pattern, as in the paper
COMPARED = 500  # keys whose words are compared: words need the tokenizer
REACH = 12  # tokens in which the last word is looked for
ORDERS = 20
CHANCE = ("shared", "shared_2", "shared_word", "agreement")  # figures that have a rate by chance


def applies(model: ModelConfig) -> str:
    """Why the analysis does not apply to a model; '' if it does."""
    if reason := predicts_next(model):
        return reason
    if ends_with(model):
        return f"its head reads {end_formula(model)}, so a value alone predicts no token"
    return "" if memories_of(model) else "no layer has keys and values"


def memories_of(model: ModelConfig) -> list[str]:
    """The memories whose values are vectors of the stream: all but slots of a sublayer without an output matrix, whose heads
    the next sublayer reads."""
    return [memory for memory in memory_names(model) if not sublayer_of(model, memory).branch.bare]


def adds(model: ModelConfig, memory: str) -> bool:
    """Whether the block adds the sublayer's output to the stream, without a factor of the stream."""
    written = sublayer_of(model, memory)
    of_layer = [each for each in model.sublayers() if (each.prefix, each.layer) == (written.prefix, written.layer)]
    return all(each.connection.adds_to == "stream" and each.connection.skip == ONE for each in of_layer)


@analysis(applies, "triggers and values of every key of feed-forwards, experts and slots")
def memories(
    lm, data=None, count: int = ROWS, sequence_length: int = 0, top: int = TOP, seed: int = 0, resume="", source=None
) -> Result:
    """The figures above of every memory, on `count` rows of `sequence_length` tokens of `data` (sequences.py). Padding is no
    trigger.

    resume: a file that keeps the state once a minute, so that the same call after an interruption goes on from it. .data:
    memories [P], the names of the memories, as in 'blocks.0.feed_forward'; [P] of each figure; name_rows [rows, P] of those
    with intervals; tokens [rows, L] that the model reads, and source [rows, S]; and of each memory with K keys (F units, E
    experts of F, or M slots of each of H heads) memory/triggers [K, t], as row * length + position, -1 for none;
    memory/coefficients [K, t], the largest ones, above 0 or not; and memory/value_tokens [K, 5], the most likely tokens of
    each value ([K, 0] in an encoder). Raises UserError for
    data that cannot be read."""
    rows = sequences(lm, data, count, sequence_length, source=source)
    names = memories_of(lm.config)
    values = {memory: value_tokens(lm, memory) for memory in names}
    kept = Unfinished(resume, lm.config, lm.params, rows, top)
    state: dict = {"next": 0, "top": top}
    state |= kept.load()
    with stage("memories", len(rows), "rows") as progress:
        for number, (some, real) in enumerate(batches(rows, BATCH)):
            progress.update(real)
            if number < state["next"]:
                continue
            of_places = _values(lm.config, lm.params, some)
            for memory in names:
                real_BL = stack_of(some, memory).inputs.real_NL
                m_BLK = jnp.where(real_BL[..., None], of_places[memory]["m"], -jnp.inf)[:real]
                _update(state, memory, m_BLK.reshape(-1, m_BLK.shape[-1]), number * real_BL.size)
                if number * BATCH < COMPOSED:
                    for name, value in _figures(lm, memory, of_places[memory], values[memory], real_BL).items():
                        of_rows = f"{memory}/rows/{name}"
                        state[of_rows] = np.concatenate([state.get(of_rows, np.zeros(0)), np.asarray(value)[:real]])
            state["next"] = number + 1
            kept.save(state)
    return _result(lm, rows, data, state, values, seed)


def _tokens(rows: Sequences) -> np.ndarray:
    return np.asarray(rows.inputs.tokens_NL)


def _update(state: dict, memory: str, m_TK, first: int) -> None:
    """Merges the coefficients of T tokens, the first of which has the number `first`, into the triggers of a memory."""
    best = {name: jnp.asarray(state[f"{memory}/{name}"]) for name in ("values", "at") if f"{memory}/{name}" in state}
    wide = wide_dtype(m_TK)
    best = update(best or empty(m_TK.shape[1], int(state["top"]), wide), m_TK, first)
    state |= {f"{memory}/{name}": value for name, value in best.items()}


@partial(jax.jit, static_argnums=0)
def _values(model: ModelConfig, params: dict, rows: Sequences) -> dict:
    """{memory: {m [B, L, K], and of its sublayer before, out, residual [B, L, D]}}."""
    stream = ("before", "out", "residual")
    wanted = {memory: [f"{written_by(memory)}.{value}" for value in stream] for memory in memories_of(model)}
    names = [name for memory, taps in wanted.items() for name in (*sites(model, memory), *taps)]
    values = captured(model, passed(model, params, rows.inputs, request(model, names))[1].captures, names)
    return {
        memory: {"m": of_keys(model, memory, values)} | {name.split(".")[-1]: values[name] for name in taps}
        for memory, taps in wanted.items()
    }


def value_tokens(lm, memory: str) -> np.ndarray:
    """[K, 5]: the most likely tokens of each value, the most likely first; [K, 0] in an encoder."""
    if of_encoder(memory):
        return np.zeros((memory_of(lm.config, lm.params, memory).writes[..., 0].size, 0), np.int32)
    flat_KD = as_added(lm.config, lm.params, memory)
    many = min(WORDS, lm.config.vocab_size)
    parts = [jax.lax.top_k(lm.unembed(flat_KD[first : first + 4096]), many)[1] for first in range(0, len(flat_KD), 4096)]
    return np.concatenate([np.asarray(part) for part in parts])


def as_added(model: ModelConfig, params: dict, memory: str):
    """[K, D]: each value as the block adds it to the stream, after the sublayer's own norm and gain."""
    writes = memory_of(model, params, memory).writes
    flat_KD = writes.reshape(-1, writes.shape[-1])
    bound = next(each for each in transformer.bind(model, params).sublayers() if each.sublayer.path == written_by(memory))
    return scaled(bound, flat_KD, flat_KD)


def _figures(lm, memory: str, values: dict, words_KW: np.ndarray, real_BL) -> dict:
    """{figure: [B]} of one batch in one memory; NaN for the figures of tokens in an encoder."""
    if of_encoder(memory):
        active_BL = (values["m"] > 0).mean(-1, dtype=wide_dtype(values["m"]))
        active_B = mean_of_tokens(active_BL, jnp.asarray(real_BL))
        return {name: jnp.full(len(active_B), jnp.nan) for name in ("composed", *PARTS, "changes")} | {"active": active_B}
    return _composition(lm.config, adds(lm.config, memory), lm.params, values, words_KW[:, 0], real_BL)


@partial(jax.jit, static_argnums=(0, 1))
def _composition(model: ModelConfig, refines: bool, params: dict, values: dict, value_token_K, real_BL) -> dict:
    """{figure: [B]} of one batch in one memory. Without `refines`, the figures of the stream are NaN."""
    lm = transformer.bind(model, params)

    def wide(x):
        return x.astype(wide_dtype(values["out"]))

    def likeliest(x_BLD):
        return lm.logits(lm.end(Stream(x_BLD))).argmax(-1)

    active_BLK = values["m"] > 0
    r, y, o = (likeliest(values[name]) for name in ("before", "out", "residual"))
    agrees_BL = (active_BLK & (value_token_K == y[..., None])).any(-1)
    counted = {
        "active": active_BLK,
        "composed": ~agrees_BL,
        "residual": (o == r) & (o != y),
        "written": (o == y) & (o != r),
        "both": (o == r) & (o == y),
        "third": (o != r) & (o != y),
        "changes": o != r,
    }
    figures = {name: mean_of_tokens(wide(each).reshape(*o.shape, -1).mean(-1), real_BL) for name, each in counted.items()}
    of_stream = {} if refines else {name: jnp.full(len(o), jnp.nan) for name in (*PARTS, "changes")}
    return figures | of_stream


def patterns(lm, rows: Sequences, at_KT, value_token_K, seed: int = 0) -> dict[str, float]:
    """The shares above, and {name_random: by chance}; NaN if there are no triggers. at_KT: numbers of tokens that the model
    reads, row * L + position; -1 for none. value_token_K: None for values that predict no token, which have no agreement."""
    tokens_NL, real_T = np.asarray(rows.inputs.tokens_NL), np.flatnonzero(rows.inputs.real_NL)
    rng = np.random.default_rng(seed)
    real_KT = at_KT >= 0
    random_KT = np.where(real_KT, real_T[rng.integers(len(real_T), size=at_KT.shape)], -1)
    some_K = np.sort(rng.permutation(np.flatnonzero(real_KT.any(1)))[:COMPARED])
    figures = {}
    for name, chosen_KT in (("", at_KT), ("_random", random_KT)):
        last_KT, two_KT = ends(tokens_NL, chosen_KT)
        figures[f"shared{name}"] = _shared(last_KT, real_KT)
        figures[f"shared_2{name}"] = _shared(two_KT, real_KT)
        if lm.tokenizer:
            figures[f"shared_word{name}"] = _shared(last_words(lm, tokens_NL, chosen_KT[some_K]), real_KT[some_K])
    return figures if value_token_K is None else figures | agreement(rows, at_KT[:, 0], value_token_K, rng)


def ends(tokens_NL, at_KT) -> tuple[np.ndarray, np.ndarray]:
    """[K, T]: the last token of each trigger, and a number for its last two tokens."""
    flat = tokens_NL.reshape(-1).astype(np.int64)
    last_KT = flat[at_KT]
    before_KT = np.where(at_KT % tokens_NL.shape[1] > 0, flat[at_KT - 1], -1)
    return last_KT, last_KT * (flat.max() + 2) + before_KT


def last_words(lm, tokens_NL, at_KT) -> np.ndarray:
    """[K, T]: a number for the last word of each trigger; different negative ones for triggers without a word."""
    numbers: dict[str, int] = {}
    word_KT = -1 - np.arange(at_KT.size).reshape(at_KT.shape)
    for place, at in np.ndenumerate(at_KT):
        row, position = divmod(int(at), tokens_NL.shape[1])
        read = plain(lm.tokenizer, tokens_NL[row, max(position - REACH, 0) : position + 1])
        if word := re.findall(r"\w+", read.casefold())[-1:]:
            word_KT[place] = numbers.setdefault(word[0], len(numbers))
    return word_KT


def _shared(x_KT, real_KT) -> float:
    """The share of real triggers whose number at least REPEATED real triggers of their key have; NaN if there are none."""
    if not real_KT.any():
        return np.nan
    x_KT = np.where(real_KT, x_KT, np.iinfo(np.int64).min)
    return float((occurrences(x_KT) >= REPEATED)[real_KT].mean())


def occurrences(x_KT) -> np.ndarray:
    """[K, T]: how often each number occurs in its row."""
    return np.stack([(x_T[:, None] == x_T).sum(1) for x_T in x_KT])


def agreement(rows: Sequences, first_K, value_token_K, rng) -> dict[str, float]:
    """The share of keys whose value's most likely token follows their first trigger; {} if no trigger has a next token."""
    has_next_K = (first_K >= 0) & np.asarray(rows.has_next_NL).reshape(-1)[first_K]
    if not has_next_K.any():
        return {}
    own, next_token = value_token_K[has_next_K], np.asarray(rows.next_NL).reshape(-1)[first_K[has_next_K]]
    by_chance = np.mean([(rng.permutation(own) == next_token).mean() for _ in range(ORDERS)])
    return {"agreement": float((own == next_token).mean()), "agreement_random": float(by_chance)}


def _result(lm, rows: Sequences, data, state: dict, values: dict, seed: int) -> Result:
    names = list(values)
    line = about(lm, rows, data)
    arrays: dict = {"memories": np.array(names), "tokens": rows.inputs.tokens_NL}
    arrays |= {"source": rows.of_source.tokens_NL} if rows.source is not None else {}
    summary: dict = {}
    files = {}
    for figure in ("active", "composed", *PARTS, "changes"):
        rows_NP = np.stack([state[f"{memory}/rows/{figure}"] for memory in names], 1).astype(np.float64)
        of_figure = over_rows({figure: rows_NP})
        arrays, summary = arrays | of_figure.data, summary | of_figure.summary
    with np.errstate(invalid="ignore", divide="ignore"):
        arrays["third_of_changes"] = arrays["third"] / arrays["changes"]
    arrays |= {name: np.full(len(names), np.nan) for figure in CHANCE for name in (figure, f"{figure}_random")}
    for number, memory in enumerate(names):
        at_KT, m_KT = (np.asarray(state[f"{memory}/{name}"]) for name in ("at", "values"))
        at_KT, read = np.where(m_KT > 0, at_KT, -1), stack_of(rows, memory)  # at 0 the earliest stay
        arrays |= {f"{memory}/triggers": at_KT, f"{memory}/coefficients": m_KT, f"{memory}/value_tokens": values[memory]}
        first_K = values[memory][:, 0] if values[memory].size else None
        for name, value in patterns(lm, read, at_KT, first_K, seed).items():
            arrays[name][number] = value
        files[f"{memory}.html"] = keys_page(lm, f"Keys of {memory}", line, _tokens(read), at_KT, m_KT, values[memory])
    known = [name for figure in CHANCE for name in (figure, f"{figure}_random") if not np.isnan(arrays[name]).all()]
    summary |= {name: (float(mean_of_known(arrays[name])), np.nan) for name in known}
    keys = (_keys_table(lm, arrays, _tokens(stack_of(rows, memory)), memory) for memory in names)
    tables = (*_figures_tables(arrays, known), *keys)
    return Result("memories", line, lm.step, arrays, summary, (_picture(arrays),), tables, files)


def _picture(data: dict) -> HeatMap:
    shares = np.stack([data[name] for name in PARTS], 1)
    title = "What the layer does to the most likely token"
    return HeatMap(title, "share of tokens", shares, "memory", "outcome", 0.0, 1.0, PARTS, ".2f")


def _figures_tables(data: dict, known: list[str]) -> Iterator[Table]:
    of_tokens = ("active", "composed", *PARTS, "third_of_changes")
    of_triggers = "shares of triggers or of keys; random: by chance"
    captions = {"Memories": "shares of keys (active) and of tokens", "Triggers": of_triggers}
    for (title, caption), names in zip(captions.items(), (of_tokens, known), strict=True):
        columns = {name.replace("_", " "): data[name] for name in names}
        yield table_of(title, caption, "memory", data["memories"], columns)


def _keys_table(lm, data: dict, tokens_NL, memory: str, keys: int = 12) -> Table:
    """The keys with the largest coefficients: their first triggers, and the value's most likely tokens."""
    order = np.argsort(-data[f"{memory}/coefficients"][:, 0], kind="stable")
    order = order[data[f"{memory}/triggers"][order, 0] >= 0][:keys]
    lines = []
    for key in order:
        chosen = data[f"{memory}/triggers"][key][:SHOWN]
        triggers = [trigger(lm, tokens_NL, int(at), 0.0) for at in chosen if at >= 0]
        prefixes = " | ".join(f"{each.before[-40:]}>{each.token}<" for each in triggers)
        words = " ".join(f"'{text(lm, [token])}'" for token in data[f"{memory}/value_tokens"][key])
        lines.append((str(key), prefixes, words))
    caption = f"the {len(lines)} keys with the largest coefficients; the last token of a trigger is in ><"
    return Table(f"Keys of {memory}", caption, ("key", "triggers", "value"), lines)
