"""Where the heads of cross-attention look in the source, and what their matrices do.

Of the weights w_ls of query l of the decoder on token s of the source, for each head, averaged over the queries of a row:

    first      w_l0                        last    weight on the last token of the source, which ends it in training
    same       weight on the tokens of the source that equal the token that the decoder reads
    next       weight on those that equal the token that it predicts: a head that copies has much of it
    slots, sink, entropy, and of the matrices rank, copying, matching: as in attention.py and heads.py

Tokens of two sequences have no distance, so there is none here. `by_class` and `even_by_class` are those of the source.
"""

import jax.numpy as jnp
import numpy as np

from xfresearch.analysis.heads import OF_MATRICES, beside_tokens, mean_of_queries, measured, part_of
from xfresearch.analysis.passes import wide
from xfresearch.analysis.result import Part
from xfresearch.analysis.sequences import Sequences, passed
from xfresearch.analysis.token_text import shown
from xfresearch.models.sublayers import Sublayer
from xfresearch.models.taps import captured, request
from xfresearch.pages.figures import SHARE, SIGNED, HeatMap, Shown
from xfresearch.runtime.summaries import mean_of_known

SITES = ("weights", "coefficients", "sink_weight")
SHOWN = {
    "first": Shown("First token", "mean weight on the first token of the source", *SHARE),
    "last": Shown("Last token", "mean weight on the last token of the source", *SHARE),
    "same": Shown("Same token", "mean weight on tokens of the source that equal the token that is read", *SHARE),
    "next": Shown("Next token", "mean weight on tokens of the source that equal the token that is predicted", *SHARE),
    "slots": Shown("Memory slots", "mean weight on all memory slots together", *SHARE),
    "sink": Shown("Sink", "mean weight on the sink", *SHARE),
    "entropy": Shown("Entropy", "of the weights, in nats", *SHARE),
    **OF_MATRICES,
    "copying": Shown("Copying", "eigenvalues of the OV circuit: 1 copies every token of the source", *SIGNED),
    "matching": Shown("Matching", "eigenvalues of the QK circuit: 1 attends to equal tokens of the source", *SIGNED),
}
RANKED = ("first", "last", "same", "next", "slots", "copying", "matching")
EXAMPLE = 24  # tokens of the first pair in the pictures


def part(lm, rows: Sequences, mixers: list[Sublayer]) -> Part:
    """The figures above of these sublayers: .data as those of attention.py, and pattern [sublayers, H, L, S], the weights of
    the first row, without padding, NaN for heads that a sublayer does not have."""
    figures = measured(lm, rows, mixers, SITES, statistics, "cross-attention")
    seen_BLS = np.array(rows.inputs.real_NL)[:, :, None] & np.array(rows.of_source.real_NL)[:, None]
    found = part_of(lm, mixers, figures, rows.of_source, seen_BLS, SHOWN, RANKED)
    pattern_XHLS, names = pattern(lm, rows, mixers)
    pictures = (*found.pictures, *_examples(pattern_XHLS, mixers, names))
    return found._replace(data=found.data | {"pattern": pattern_XHLS}, pictures=pictures)


def statistics(values: dict, sink: bool) -> dict:
    """{name: [B, H]} of one sublayer's weights; see the top of the file. sink: whether the last coefficient is a sink's."""
    if "weights" not in values:
        return {}
    w_BHLS = wide(values["weights"])
    m_BHLM = values.get("sink_weight", values.get("coefficients"))
    of_source_BS, real_BS = values["source_tokens"], values["source_real"]
    last_BS = jnp.arange(real_BS.shape[1]) == real_BS.sum(1)[:, None] - 1

    def on(tokens_BL):
        """The weight of each query on the tokens of the source that equal one of its own."""
        equal_BLS = (tokens_BL[:, :, None] == of_source_BS[:, None]) & real_BS[:, None]
        return (w_BHLS * equal_BLS[:, None]).sum(-1)

    of_queries = {
        "first": w_BHLS[..., 0],
        "last": (w_BHLS * last_BS[:, None, None]).sum(-1),
        "same": on(values["tokens"]),
        "next": on(values["next"]),
        "received": w_BHLS,
        **beside_tokens(w_BHLS, None if m_BHLM is None else wide(m_BHLM), sink),
    }
    return {name: mean_of_queries(x_BHL, values["real"]) for name, x_BHL in of_queries.items()}


def pattern(lm, rows: Sequences, mixers: list[Sublayer]) -> tuple[np.ndarray, tuple[tuple[str, ...], tuple[str, ...]]]:
    """The weights [sublayers, H, L, S] in the first row, and the texts of its tokens and of those of its source."""
    first = rows.chosen(slice(0, 1))
    read = first.inputs
    length, source = int(np.sum(read.real_NL)), int(np.sum(read.of_source.real_NL))
    names = [f"{each.path}.weights" for each in mixers]
    taps = captured(lm.config, passed(lm.config, lm.params, read, request(lm.config, names))[1].captures, names)
    of_sublayers = [np.asarray(wide(taps[name])[0, :, :length, :source], np.float64) for name in names]
    weights = np.full((len(names), max(map(len, of_sublayers)), length, source), np.nan)
    for number, w_HLS in enumerate(of_sublayers):
        weights[number, : len(w_HLS)] = w_HLS
    predicted, of_source = (
        tuple(shown(lm.tokenizer, [token]) for token in each)
        for each in (first.tokens_NL[0, 1 : length + 1], read.of_source.tokens_NL[0, :source])
    )
    return weights, (predicted, of_source)


def _examples(pattern_XHLS: np.ndarray, mixers: list[Sublayer], names: tuple) -> list[HeatMap]:
    """The weights of each sublayer in the first row."""
    caption = "mean weight of the heads in the first pair, of the query that predicts a row's token, from the bottom: "
    caption += " ".join(names[0][:EXAMPLE])
    axes = "predicted token", "source", *SHARE, names[1][:EXAMPLE]
    means = [mean_of_known(w_HLS, 0)[:EXAMPLE, :EXAMPLE] for w_HLS in pattern_XHLS]
    return [HeatMap(f"Weights of {each.path}", caption, w, *axes) for each, w in zip(mixers, means, strict=True)]
