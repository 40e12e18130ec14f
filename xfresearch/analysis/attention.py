"""Statistics of the weights of attention heads, and of their matrices.

Of the weights w_ls of query l on key s, for each head, averaged over the queries of a row except the first one:

    first      w_l0: the attention sink (Xiao et al. 2023)     previous   w_l,l-1
    self       w_ll                                            distance   sum_s w_ls (l - s), in tokens
    slots      sum of the weights of memory slots              sink       weight of a learned or constant sink
    entropy    - sum w log w in nats, over keys and slots      own value  cos of a head's output and its own value

Shaped attention can have negative weights, which are no distribution: a head with any has no entropy (NaN).

`by_class`: the mean weight on the tokens of each class, words, punctuation and so on (token_classes.py), beside that of
equal weights on all tokens that a query sees, `even_by_class`.

On random tokens that are repeated once (Olsson et al. 2022): `induction`, the weight on the token after the last
occurrence of the current one, and `duplicate`, the weight on that occurrence.

Of the matrices, in float64, without norms, biases and positions (Elhage et al. 2021):

    rank       effective rank of W_Q W_K^T, exp of the entropy of its normalised singular values (Roy & Vetterli 2007)
    copying    sum(Re z) / sum |z| of the eigenvalues z of the OV circuit W_U^T W_O^T W_V^T W_E, which maps tokens to logits
    matching   the same of the QK circuit W_E^T W_Q W_K^T W_E
"""

from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from xfresearch.analysis.passes import ROWS, about, by_layer, measure, repeated, rows, wide
from xfresearch.analysis.registry import analysis
from xfresearch.analysis.result import HeatMap, Result, Table
from xfresearch.analysis.token_classes import CLASSES, by_class, classes, even
from xfresearch.models import transformer
from xfresearch.models.mixers.softmax.config import longest
from xfresearch.models.model_config import ModelConfig
from xfresearch.models.sublayers import Bound, Sublayer
from xfresearch.runtime.summaries import mean_interval, mean_of_known

SITES = ("weights", "coefficients", "sink_weight", "heads", "value")
TITLES = {
    "first": ("First token", "mean weight on the first token of the row"),
    "previous": ("Previous token", "mean weight on the token before"),
    "self": ("Itself", "mean weight on the token itself"),
    "distance": ("Distance", "mean distance to the token that is attended to, in tokens"),
    "slots": ("Memory slots", "mean weight on all memory slots together"),
    "sink": ("Sink", "mean weight on the sink"),
    "entropy": ("Entropy", "of the weights, in nats"),
    "own_value": ("Own value", "cosine of a head's output and the value of its own token"),
    "induction": ("Induction", "mean weight on the token after the last occurrence, on repeated random tokens"),
    "duplicate": ("Duplicates", "mean weight on the last occurrence, on repeated random tokens"),
    "rank": ("Rank of W_Q W_K", "effective rank, at most the head's size"),
    "copying": ("Copying", "eigenvalues of the OV circuit: 1 copies every token"),
    "matching": ("Matching", "eigenvalues of the QK circuit: 1 attends to equal tokens"),
    "span": ("Span", "learned span, in tokens"),
}
SHARES = ("first", "previous", "self", "slots", "sink", "induction", "duplicate")
SIGNED = ("copying", "matching", "own_value")


def applies(model: ModelConfig) -> str:
    """Why the analysis does not apply to a model; '' if it does."""
    return "" if model.sublayers(has="attends") else "no layer has softmax attention over tokens"


@analysis(applies, "where heads look, and what their matrices do")
def attention(lm, data=None, count: int = ROWS, length: int = 0, seed: int = 0) -> Result:
    """The statistics above of every head on `count` rows of `length` tokens of `data` (passes.rows).

    .data: {name: [N, H], name_rows: [rows, N, H]}; NaN where a layer has no such head or value; and with a tokenizer
    by_class [N, H, C], even_by_class [C] of token_classes.CLASSES. The intervals of .summary are over rows. Raises UserError
    for data that cannot be read."""
    tokens_NL = rows(lm, data, count, length)
    mixers = lm.config.sublayers(has="attends")
    figures = _measured(lm, tokens_NL, mixers)
    received = figures.pop("received")
    half = min(tokens_NL.shape[1] // 2, 64)
    if half > 1:
        again_NL = repeated(lm, half, seed=seed)
        figures |= measure(lm, again_NL, mixers, ["weights"], repetition_of(half), title="induction")
    per_row = {name: by_layer(values, mixers, lm.config.depth).swapaxes(0, 1) for name, values in figures.items()}
    per_row = {name: value for name, value in per_row.items() if not np.isnan(value).all()}
    values = {name: mean_of_known(value, 0) for name, value in per_row.items()} | matrices(lm)
    shown = [name for name in TITLES if name in per_row]
    summary = {TITLES[name][0]: mean_interval(mean_of_known(per_row[name], (1, 2))) for name in shown}
    of_rows = {f"{name}_rows": value for name, value in per_row.items()}
    arrays = values | of_rows | _classes(lm, tokens_NL, mixers, received)
    line = about(lm, tokens_NL, data)
    return Result("attention", line, lm.step, arrays, summary, _pictures(arrays), _tables(arrays))


def _measured(lm, tokens_NL, mixers: list[Sublayer]) -> dict[str, dict[str, np.ndarray]]:
    """The statistics of all mixers. The last coefficient of one with a sink is the sink's."""
    figures: dict[str, dict[str, np.ndarray]] = {}
    for sink in (False, True):
        chosen = [each for each in mixers if each.options.sinks == sink]
        if chosen:
            for name, values in measure(lm, tokens_NL, chosen, SITES, statistics_of(sink), title="attention").items():
                figures.setdefault(name, {}).update(values)
    return figures


def _classes(lm, tokens_NL, mixers: list[Sublayer], received: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """by_class and even_by_class."""
    if lm.tokenizer is None:
        return {}
    class_V = classes(lm.tokenizer, lm.config.vocab_size)
    by_path = {path: by_class(value, tokens_NL, class_V) for path, value in received.items()}
    of_classes = by_layer(by_path, mixers, lm.config.depth)
    return {"by_class": of_classes, "even_by_class": even(tokens_NL, class_V, lm.config.causal)}


def statistics(values: dict, sink: bool) -> dict:
    """{name: [B, H]} of one mixer's weights; see the top of the file. sink: whether the last coefficient is a sink's."""
    if "weights" not in values or values["weights"].ndim != 4:
        return {}
    w_BHLS = wide(values["weights"])
    m_BHLM = values.get("sink_weight", values.get("coefficients"))
    length = w_BHLS.shape[2]
    distance_LS = jnp.arange(length)[:, None] - jnp.arange(length)
    figures = {
        "first": w_BHLS[:, :, 1:, 0].mean(-1),
        "previous": (w_BHLS * (distance_LS == 1)).sum(-1)[:, :, 1:].mean(-1),
        "self": (w_BHLS * (distance_LS == 0)).sum(-1)[:, :, 1:].mean(-1),
        "distance": (w_BHLS * distance_LS).sum(-1)[:, :, 1:].mean(-1),
    }
    all_BHLX = w_BHLS
    if m_BHLM is not None and m_BHLM.ndim == 4:
        m_BHLM = wide(m_BHLM)
        all_BHLX = jnp.concatenate([w_BHLS, m_BHLM], -1)
        of_slots = m_BHLM[..., :-1] if sink else m_BHLM
        figures |= {"sink": m_BHLM[:, :, 1:, -1].mean(-1)} if sink else {}
        figures |= {"slots": of_slots[:, :, 1:].sum(-1).mean(-1)} if of_slots.shape[-1] else {}
    entropy_BHL = jax.scipy.special.entr(all_BHLX).sum(-1)  # -inf for a negative weight
    figures["entropy"] = jnp.where(jnp.isneginf(entropy_BHL), jnp.nan, entropy_BHL)[:, :, 1:].mean(-1)
    return figures | _own_value(values)


def _own_value(values: dict) -> dict:
    """{"own_value": [B, H]}: the cosine of each head's output and the value of its own token."""
    o_BLHV, v_BLGV = (wide(values[site]) for site in ("heads", "value"))
    if v_BLGV.shape[-1] != o_BLHV.shape[-1]:
        return {}
    v_BLHV = jnp.repeat(v_BLGV, o_BLHV.shape[2] // v_BLGV.shape[2], 2)
    norms = jnp.linalg.norm(o_BLHV, axis=-1) * jnp.linalg.norm(v_BLHV, axis=-1)
    cosines_BLH = (o_BLHV * v_BLHV).sum(-1) / jnp.maximum(norms, jnp.finfo(norms.dtype).tiny)
    return {"own_value": cosines_BLH[:, 1:].mean(1)}


@cache
def statistics_of(sink: bool):
    """`statistics` with its option, and `received` [B, H, S], the mean weight on each token: one function object for all
    calls and checkpoints, so that they share a compiled program."""

    def all_of(values: dict) -> dict:
        figures = statistics(values, sink)
        return figures and figures | {"received": wide(values["weights"][:, :, 1:]).mean(2)}

    return all_of


@cache
def repetition_of(half: int):
    """`repetition` with its option, for the same reason."""
    return partial(repetition, half=half)


def repetition(values: dict, half: int) -> dict:
    """{name: [B, H]}: weights on the last occurrence of the current token, and on the token after it."""
    if "weights" not in values or values["weights"].ndim != 4:
        return {}
    w_BHLS = wide(values["weights"])
    second = np.arange(half, 2 * half)
    return {
        "induction": w_BHLS[:, :, second, second - half + 1].mean(-1),
        "duplicate": w_BHLS[:, :, second, second - half].mean(-1),
    }


def matrices(lm) -> dict[str, np.ndarray]:
    """{name: [N, H]} of the matrices of each mixer that has them."""
    embed_VD = np.asarray(lm.params["embed"]["table"], np.float64)
    head_VD = np.asarray(lm.params.get("head", lm.params["embed"])["table"], np.float64)
    figures: dict[str, dict[str, np.ndarray]] = {}
    mixers = lm.config.sublayers(has="attends")
    for bound in transformer.bind(lm.config, lm.params).sublayers(has="attends"):
        each, of_mixer = bound.sublayer, _of_mixer(bound, embed_VD, head_VD)
        span = getattr(bound.module, "span", None)
        if span is not None:
            options: Any = each.options  # of softmax attention: only its spans are learned
            of_mixer["span"] = np.asarray(span.fraction[...], np.float64) * longest(options, lm.config.max_length)
        for name, value in of_mixer.items():
            figures.setdefault(name, {})[each.path] = value
    return {name: by_layer(values, mixers, lm.config.depth) for name, values in figures.items()}


def _of_mixer(mixer: Bound, embed_VD, head_VD) -> dict[str, np.ndarray]:
    figures = {}
    matrices = map(mixer.matrix, ("query", "key", "value", "output"))
    q_DHK, k_DGK, v_DGV, o_HVD = (None if each is None else np.asarray(each, np.float64) for each in matrices)
    if q_DHK is not None and k_DGK is not None and q_DHK.shape[2] == k_DGK.shape[2]:
        share = q_DHK.shape[1] // k_DGK.shape[1]
        pairs = [(q_DHK[:, h], k_DGK[:, h // share]) for h in range(q_DHK.shape[1])]
        gram_DD = embed_VD.T @ embed_VD
        figures["rank"] = np.array([effective_rank(q @ k.T, q.shape[1]) for q, k in pairs])
        figures["matching"] = np.array([positive_share(k.T @ gram_DD @ q) for q, k in pairs])
    if v_DGV is not None and o_HVD is not None and v_DGV.ndim == o_HVD.ndim == 3 and v_DGV.shape[2] == o_HVD.shape[1]:
        share = o_HVD.shape[0] // v_DGV.shape[1]
        between_DD = head_VD.T @ embed_VD
        figures["copying"] = np.array(
            [positive_share(o_VD @ between_DD @ v_DGV[:, h // share]) for h, o_VD in enumerate(o_HVD)]
        )
    return figures


def effective_rank(matrix: np.ndarray, most: int) -> float:
    """exp of the entropy of the singular values divided by their sum (Roy & Vetterli 2007), of the largest `most`; NaN for
    zeros."""
    s = np.linalg.svd(matrix, compute_uv=False)[:most]
    if not s.any():
        return np.nan
    p = s[s > 0] / s.sum()
    return float(np.exp(-(p * np.log(p)).sum()))


def positive_share(matrix: np.ndarray) -> float:
    """sum(Re z) / sum |z| of the eigenvalues z: 1 if all are positive, -1 if all are negative, NaN if all are 0."""
    z = np.linalg.eigvals(matrix)
    return float(z.real.sum() / np.abs(z).sum()) if z.any() else np.nan


def _pictures(values: dict[str, np.ndarray]) -> tuple[HeatMap, ...]:
    pictures = []
    for name, (title, caption) in TITLES.items():
        if name in values:
            low, high = (0.0, None) if name in SHARES else (-1.0, 1.0) if name in SIGNED else (None, None)
            pictures.append(HeatMap(title, caption, values[name], "layer", "head", low, high))
    if "by_class" in values:
        shares = mean_of_known(values["by_class"], 1)
        texts = tuple(tuple(f"{share:.2f}" for share in row) for row in shares)
        caption = "mean weight on tokens of a class, of all heads"
        pictures.append(HeatMap("Classes of tokens", caption, shares, "layer", "class", 0.0, None, CLASSES, texts))
    return tuple(pictures)


def _tables(values: dict[str, np.ndarray]) -> tuple[Table, ...]:
    """The strongest heads of each kind, and those with the most weight on each class of tokens."""
    strongest_heads = []
    for name in ("first", "previous", "induction", "duplicate", "slots", "copying"):
        if name in values:
            best = np.argsort(np.nan_to_num(values[name], nan=-np.inf).ravel())[::-1][:3]
            heads = [f"{at // values[name].shape[1]}.{at % values[name].shape[1]}" for at in best]
            shown = [f"{head} ({values[name].ravel()[at]:.3f})" for head, at in zip(heads, best, strict=True)]
            strongest_heads.append((TITLES[name][0], *shown, *[""] * (3 - len(shown))))
    strongest = Table("Strongest heads", "layer.head (value)", ("what", "1", "2", "3"), strongest_heads)
    if "by_class" not in values:
        return (strongest,)
    lines = []
    for number, name in enumerate(CLASSES):
        grid = np.nan_to_num(values["by_class"][..., number], nan=-1.0)
        layer, head = np.unravel_index(grid.argmax(), grid.shape)
        mean, even_share = mean_of_known(values["by_class"][..., number]), values["even_by_class"][number]
        lines.append((name, *(round(float(share), 4) for share in (mean, even_share, grid[layer, head])), f"{layer}.{head}"))
    titles = ("class", "mean of all heads", "equal weights", "most of a head", "head")
    return (strongest, Table("Classes of tokens", "mean weight on the tokens of a class", titles, lines))
