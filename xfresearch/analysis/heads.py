"""What the weights and the matrices of heads of attention have in common, whatever they attend to.

Of the matrices, in float64, without norms, biases and positions (Elhage et al. 2021):

    rank       effective rank of W_Q W_K^T, exp of the entropy of its normalised singular values (Roy & Vetterli 2007)
    copying    sum(Re z) / sum |z| of the eigenvalues z of the OV circuit W_U^T W_O^T W_V^T W_E, which maps tokens to logits
    matching   the same of the QK circuit W_E^T W_Q W_K^T W_E

E embeds the tokens that keys and values are of: in cross-attention those of the source. The head does not read an encoder,
so its heads have no `copying`.
"""

from collections.abc import Callable, Iterable, Mapping
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from xfresearch.analysis.passes import by_layer, measure
from xfresearch.analysis.result import Part, over_rows
from xfresearch.analysis.sequences import Sequences
from xfresearch.analysis.token_classes import CLASSES, by_class, classes, even
from xfresearch.models import transformer
from xfresearch.models.mixers.softmax.config import longest
from xfresearch.models.sublayers import Bound, Sublayer
from xfresearch.pages.figures import SHARE, SIGNED, HeatMap, Shown, Table, heat_maps, table
from xfresearch.runtime.summaries import mean_of_known

OF_MATRICES = {
    "rank": Shown("Rank of W_Q W_K", "effective rank, at most the head's size", *SHARE),
    "copying": Shown("Copying", "eigenvalues of the OV circuit: 1 copies every token", *SIGNED),
    "matching": Shown("Matching", "eigenvalues of the QK circuit: 1 attends to equal tokens", *SIGNED),
    "span": Shown("Span", "learned span, in tokens"),
}


def measured(
    lm, rows: Sequences, mixers: list[Sublayer], sites: tuple[str, ...], statistics: Callable, title: str
) -> dict[str, dict[str, np.ndarray]]:
    """{name: {path of a mixer: [N, ...]}} of all mixers (passes.measure), with the summary `statistics`, whose option is
    whether the last coefficient of the mixers is a sink's."""
    figures: dict[str, dict[str, np.ndarray]] = {}
    for sink in (False, True):
        if chosen := [each for each in mixers if each.options.sinks == sink]:
            for name, values in measure(lm, rows, chosen, sites, given(statistics, sink=sink), title=title).items():
                figures.setdefault(name, {}).update(values)
    return figures


@cache
def given(summary: Callable, **option: int) -> Callable:
    """`summary` with its option, as one function object for all calls and checkpoints, so that they share a compiled
    program."""
    return partial(summary, **option)


def part_of(lm, mixers: list[Sublayer], figures: dict, read: Sequences, seen_BLS, shown: dict[str, Shown], ranked) -> Part:
    """The figures of the mixers of one stack, those of their matrices and the weights on classes of tokens.

    figures: those of `measured`, with the weights `received` by the tokens of `read`. seen_BLS: which of these a query sees.
    ranked: names of the figures whose strongest heads are in a table."""
    received = figures.pop("received")
    by_rows = {name: value.swapaxes(0, 1) for name, value in by_layer(lm.config, figures, mixers).items()}
    known = {name: by_rows[name] for name in shown if name in by_rows and not np.isnan(by_rows[name]).all()}
    data, summary, *_ = over_rows(known, {name: each.title for name, each in shown.items()})
    data |= matrices(lm, mixers)
    pictures, tables = heat_maps(data, shown), [strongest(data, ranked, shown)]
    if lm.tokenizer is not None:
        class_V = classes(lm.tokenizer, lm.config.vocab_size)
        of_classes = {path: by_class(value, read.tokens_NL, class_V) for path, value in received.items()}
        data |= by_layer(lm.config, {"by_class": of_classes}, mixers)
        data["even_by_class"] = even(read.tokens_NL, class_V, seen_BLS)
        caption, shares = "mean weight on tokens of a class, of all heads", mean_of_known(data["by_class"], 1)
        pictures.append(HeatMap("Classes of tokens", caption, shares, "layer", "class", *SHARE, CLASSES, ".2f"))
        tables.append(_classes_table(data["by_class"], data["even_by_class"]))
    return Part(data, summary, tuple(pictures), tuple(tables))


def strongest(arrays: Mapping[str, np.ndarray], names: Iterable[str], shown: Mapping[str, Shown]) -> Table:
    """The three heads with the largest values of each of these arrays [N, H] that is there."""
    lines = []
    for name in names:
        if name in arrays:
            best = np.argsort(np.nan_to_num(arrays[name], nan=-np.inf).ravel())[::-1][:3]
            heads = [divmod(int(at), arrays[name].shape[1]) for at in best]
            cells = [f"{layer}.{head} ({arrays[name][layer, head]:.3f})" for layer, head in heads]
            lines.append((shown[name].title, *cells, *[""] * (3 - len(cells))))
    return table("Strongest heads", "layer.head (value)", ("what", "1", "2", "3"), lines)


def _classes_table(by_class_NHC: np.ndarray, even_C: np.ndarray) -> Table:
    """The heads with the most weight on each class of tokens."""
    lines = []
    for number, name in enumerate(CLASSES):
        grid = np.nan_to_num(by_class_NHC[..., number], nan=-1.0)
        layer, head = np.unravel_index(grid.argmax(), grid.shape)
        mean = mean_of_known(by_class_NHC[..., number])
        lines.append((name, mean, even_C[number], grid[layer, head], f"{layer}.{head}"))
    titles = ("class", "mean of all heads", "equal weights", "most of a head", "head")
    return table("Classes of tokens", "mean weight on the tokens of a class", titles, lines)


def beside_tokens(w_BHLS, m_BHLM, sink: bool) -> dict:
    """{name: [B, H, L]}: the entropy of all weights, and those of slots and of a sink, where there are any."""
    figures: dict[str, jax.Array] = {}
    all_BHLX = w_BHLS
    if m_BHLM is not None and m_BHLM.ndim == 4:
        all_BHLX = jnp.concatenate([w_BHLS, m_BHLM], -1)
        of_slots = m_BHLM[..., :-1] if sink else m_BHLM
        figures |= {"sink": m_BHLM[..., -1]} if sink else {}
        figures |= {"slots": of_slots.sum(-1)} if of_slots.shape[-1] else {}
    entropy_BHL = jax.scipy.special.entr(all_BHLX).sum(-1)  # -inf for a negative weight
    return figures | {"entropy": jnp.where(jnp.isneginf(entropy_BHL), jnp.nan, entropy_BHL)}


def mean_of_queries(x_BHL, counted_BL):
    """[B, H]: the mean over the queries that count; of [B, H, L, ...] [B, H, ...]."""
    counted = counted_BL.reshape(counted_BL.shape[:1] + (1,) + counted_BL.shape[1:] + (1,) * (x_BHL.ndim - 3))
    return jnp.where(counted, x_BHL, 0).sum(2) / counted.sum(2)


def matrices(lm, mixers: list[Sublayer]) -> dict[str, np.ndarray]:
    """{name: [N, H]} of the matrices of each of these mixers of one stack that has them."""
    embeds = embeddings(lm)
    head_VD = np.asarray(lm.params.get("head", lm.params["embed"])["table"], np.float64)
    figures: dict[str, dict[str, np.ndarray]] = {}
    for bound in transformer.bind(lm.config, lm.params).sublayers():
        each = bound.sublayer
        if each not in mixers:
            continue
        own, read = embeds[each.prefix], embeds["encoder." if each.role == "cross" else each.prefix]
        of_mixer = _of_mixer(bound, own, read, None if each.prefix else head_VD)
        span = getattr(bound.module, "span", None)
        if span is not None:
            options: Any = each.options  # of softmax attention: only its spans are learned
            of_mixer["span"] = np.asarray(span.fraction[...], np.float64) * longest(options, each.place.max_length)
        for name, value in of_mixer.items():
            figures.setdefault(name, {})[each.path] = value
    return by_layer(lm.config, figures, mixers)


def embeddings(lm) -> dict[str, np.ndarray]:
    """{prefix of a stack: its token embedding [V, D]}; an encoder may have the decoder's."""
    own = lm.params["embed"]["table"]
    of_encoder = lm.params.get("encoder", {}).get("embed", lm.params["embed"])["table"]
    return {"": np.asarray(own, np.float64), "encoder.": np.asarray(of_encoder, np.float64)}


def _of_mixer(mixer: Bound, embed_VD, read_VW, head_VD) -> dict[str, np.ndarray]:
    """The figures of a mixer's matrices. read_VW: the embedding of the tokens that its keys and values are of. head_VD: None
    for a stack that the head does not read."""
    figures = {}
    matrices = map(mixer.matrix, ("query", "key", "value", "output"))
    q_DHK, k_WGK, v_WGV, o_HVD = (None if each is None else np.asarray(each, np.float64) for each in matrices)
    if q_DHK is not None and k_WGK is not None and q_DHK.shape[2] == k_WGK.shape[2]:
        share = q_DHK.shape[1] // k_WGK.shape[1]
        pairs = [(q_DHK[:, h], k_WGK[:, h // share]) for h in range(q_DHK.shape[1])]
        gram_WD = read_VW.T @ embed_VD
        figures["rank"] = np.array([effective_rank(q @ k.T, q.shape[1]) for q, k in pairs])
        figures["matching"] = np.array([positive_share(k.T @ gram_WD @ q) for q, k in pairs])
    if v_WGV is None or o_HVD is None or head_VD is None:
        return figures
    if v_WGV.ndim == o_HVD.ndim == 3 and v_WGV.shape[2] == o_HVD.shape[1]:
        share = o_HVD.shape[0] // v_WGV.shape[1]
        between_DW = head_VD.T @ read_VW
        figures["copying"] = np.array(
            [positive_share(o_VD @ between_DW @ v_WGV[:, h // share]) for h, o_VD in enumerate(o_HVD)]
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
