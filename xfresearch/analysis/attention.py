"""Statistics of the weights of attention heads, and of their matrices.

Of the weights w_ls of query l on key s, for each head, averaged over the queries of a row except the first one:

    first      w_l0: the attention sink (Xiao et al. 2023)     previous   w_l,l-1
    self       w_ll                                            distance   sum_s w_ls |l - s|, in tokens
    slots      sum of the weights of memory slots              sink       weight of a learned or constant sink
    entropy    - sum w log w in nats, over keys and slots      own value  cos of a head's output and its own value

Shaped attention can have negative weights, which are no distribution: a head with any has no entropy (NaN).

`by_class`: the mean weight on the tokens of each class, words, punctuation and so on (token_classes.py), beside that of
equal weights on all tokens that a query sees, `even_by_class`.

On random tokens that are repeated once (Olsson et al. 2022): `induction`, the weight on the token after the last
occurrence of the current one, and `duplicate`, the weight on that occurrence.

Of the matrices `rank`, `copying` and `matching`: heads.py. Of cross-attention: alignment.py.
"""

import jax.numpy as jnp
import numpy as np

from xfresearch.analysis import alignment
from xfresearch.analysis.heads import OF_MATRICES, beside_tokens, given, mean_of_queries, measured, part_of
from xfresearch.analysis.passes import about, again, by_stack, half_of, measure, wide
from xfresearch.analysis.registry import analysis
from xfresearch.analysis.result import Part, Result, joined
from xfresearch.analysis.sequences import ROWS, Sequences, sequences
from xfresearch.analysis.token_classes import seen
from xfresearch.models.model_config import ModelConfig
from xfresearch.models.sublayers import Sublayer
from xfresearch.pages.figures import SHARE, SIGNED, Shown

SITES = ("weights", "coefficients", "sink_weight", "heads", "value")
SHOWN = {
    "first": Shown("First token", "mean weight on the first token of the row", *SHARE),
    "previous": Shown("Previous token", "mean weight on the token before", *SHARE),
    "self": Shown("Itself", "mean weight on the token itself", *SHARE),
    "distance": Shown("Distance", "mean distance to the token that is attended to, in tokens"),
    "slots": Shown("Memory slots", "mean weight on all memory slots together", *SHARE),
    "sink": Shown("Sink", "mean weight on the sink", *SHARE),
    "entropy": Shown("Entropy", "of the weights, in nats", *SHARE),
    "own_value": Shown("Own value", "cosine of a head's output and the value of its own token", *SIGNED),
    "induction": Shown("Induction", "mean weight on the token after the last occurrence, on repeated random tokens", *SHARE),
    "duplicate": Shown("Duplicates", "mean weight on the last occurrence, on repeated random tokens", *SHARE),
    **OF_MATRICES,
}
RANKED = ("first", "previous", "induction", "duplicate", "slots", "copying")


def applies(model: ModelConfig) -> str:
    """Why the analysis does not apply to a model; '' if it does."""
    return "" if model.sublayers(has="attends") else "no layer has softmax attention over tokens"


@analysis(applies, "where heads look, and what their matrices do")
def attention(lm, data=None, count: int = ROWS, sequence_length: int = 0, seed: int = 0, source=None) -> Result:
    """The statistics above of every head on `count` rows of `sequence_length` tokens of `data` (sequences.py).

    .data: {name: [N, H], name_rows: [rows, N, H]}; NaN where a layer has no such head or value; and with a tokenizer
    by_class [N, H, C], even_by_class [C] of token_classes.CLASSES. Those of an encoder are encoder/name, and those of
    cross-attention (alignment.py) cross/name. The intervals of .summary are over rows. Raises UserError for data that cannot
    be read."""
    rows = sequences(lm, data, count, sequence_length, source=source)
    half = half_of(lm.config, rows.tokens_NL.shape[1], 64)
    repeated = again(lm, half, seed) if half > 1 else None
    groups = by_stack(lm.config.sublayers(has="attends"))
    parts = {name: _of_stack(lm, rows, repeated, half, mixers) for name, mixers in groups.items()}
    if across := lm.config.sublayers("cross"):
        parts["cross"] = alignment.part(lm, rows, across)
    part = joined(parts)
    return Result("attention", about(lm, rows, data), lm.step, *part)


def _of_stack(lm, rows: Sequences, repeated: Sequences | None, half: int, mixers: list[Sublayer]) -> Part:
    """The figures of the mixers of one stack."""
    figures = measured(lm, rows, mixers, SITES, statistics, "attention")
    if repeated is not None:
        figures |= measure(lm, repeated, mixers, ["weights"], given(repetition, half=half), title="induction")
    read = rows.inputs.of(mixers[0].prefix)
    return part_of(lm, mixers, figures, read, seen(read, mixers[0].place.causal), SHOWN, RANKED)


def statistics(values: dict, sink: bool) -> dict:
    """{name: [B, H]} of one mixer's weights; see the top of the file. sink: whether the last coefficient is a sink's."""
    if "weights" not in values or values["weights"].ndim != 4:
        return {}
    w_BHLS = wide(values["weights"])
    m_BHLM = values.get("sink_weight", values.get("coefficients"))
    length = w_BHLS.shape[2]
    distance_LS = jnp.arange(length)[:, None] - jnp.arange(length)
    of_queries = {
        "first": w_BHLS[..., 0],
        "previous": (w_BHLS * (distance_LS == 1)).sum(-1),
        "self": (w_BHLS * (distance_LS == 0)).sum(-1),
        "distance": (w_BHLS * abs(distance_LS)).sum(-1),
        **beside_tokens(w_BHLS, None if m_BHLM is None else wide(m_BHLM), sink),
        **_own_value(values),
        "received": w_BHLS,
    }
    counted_BL = _counted(values)
    return {name: mean_of_queries(x_BHL, counted_BL) for name, x_BHL in of_queries.items()}


def _counted(values: dict):
    """[B, L]: the queries of a mixer's figures: all but the first one and padding."""
    tokens = values["weights"].shape[0], values["weights"].shape[2]
    return values.get("real", jnp.ones(tokens, bool)) & (jnp.arange(tokens[1]) > 0)


def _own_value(values: dict) -> dict:
    """{"own_value": [B, H, L]}: the cosine of each head's output and the value of its own token."""
    o_BLHV, v_BLGV = (wide(values[site]) for site in ("heads", "value"))
    if v_BLGV.shape[-1] != o_BLHV.shape[-1]:
        return {}
    v_BLHV = jnp.repeat(v_BLGV, o_BLHV.shape[2] // v_BLGV.shape[2], 2)
    norms = jnp.linalg.norm(o_BLHV, axis=-1) * jnp.linalg.norm(v_BLHV, axis=-1)
    cosines_BLH = (o_BLHV * v_BLHV).sum(-1) / jnp.maximum(norms, jnp.finfo(norms.dtype).tiny)
    return {"own_value": cosines_BLH.swapaxes(1, 2)}


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
