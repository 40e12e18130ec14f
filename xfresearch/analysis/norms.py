"""What the norm before attention does (Brody et al. 2023): its projection, its scaling, and keys that no query can select.

LayerNorm is x -> sqrt(D) P x / |P x| with P = I - 1 1^T / D, then a gain and a bias.

    angle      between the ones vector and an input, or a query as a direction of the input, W_K q_l, in degrees from 0
               to 90: a query parallel to 1 gives all projected inputs equal scores
    projected  share of an input's squared norm along 1, which P removes
    spread     standard deviation over mean of |P x| among tokens, which the scaling removes
    hidden     share of the vectors of a row that no query can select, because they are in the convex hull of the others
               (selectable.py): of the inputs before and after the norm, and of the keys of each head

In cross-attention the inputs are those of the decoder, and keys, and with them the directions of queries, are of the source.
Padding does not count. Equal vectors of a row are one vector. In D dimensions, at most D + 1 vectors in general position
hide none.
"""

import numpy as np

from xfresearch.analysis.passes import about, by_layer, by_stack, measure, wide
from xfresearch.analysis.registry import analysis
from xfresearch.analysis.result import Part, Result, joined, over_rows
from xfresearch.analysis.selectable import selectable
from xfresearch.analysis.sequences import Sequences, sequences
from xfresearch.models import transformer
from xfresearch.models.model_config import ModelConfig
from xfresearch.models.sublayers import Sublayer
from xfresearch.pages.figures import Shown, heat_maps, table_of
from xfresearch.runtime.progress import stage
from xfresearch.runtime.summaries import mean_of_known

SITES = ("before", "in", "key", "query", "unrotated_query")
ROWS = 4  # rows whose hidden vectors are counted: each row of L tokens has 2 + G sets of L vectors per layer
TITLES = {
    "hidden_before": "hidden inputs before the norm",
    "hidden_after": "hidden inputs after the norm",
    "hidden_keys": "hidden keys",
    "angle_before": "angle of inputs before the norm",
    "angle_after": "angle of inputs after the norm",
    "angle_query": "angle of queries",
    "projected": "share along the ones vector",
    "spread": "spread of norms",
}
PICTURES = {
    "angle_query": Shown("Angle of queries", "to the ones vector, in degrees", 0.0, 90.0),
    "hidden_keys": Shown("Hidden keys", "share of keys that no query can select", 0.0),
}


def applies(model: ModelConfig) -> str:
    """Why the analysis does not apply to a model; '' if it does."""
    return "" if model.sublayers(has="attends") else "no layer compares queries with the keys of tokens"


@analysis(applies, "angles to the ones vector, and keys that no query can select")
def norms(lm, data=None, count: int = ROWS, sequence_length: int = 0, source=None) -> Result:
    """The figures above of every layer on `count` rows of `sequence_length` tokens of `data` (sequences.py).

    .data: {name: [N], hidden_keys: [N, G], angle_query: [N, H], name_rows: the same for each row}; NaN where a layer has no
    such value. Those of an encoder are encoder/name, those of cross-attention cross/name. The intervals of .summary are over
    rows."""
    rows = sequences(lm, data, count, sequence_length, source=source)
    groups = by_stack(lm.config.sublayers(has="attends"))
    if across := lm.config.sublayers("cross"):
        groups["cross"] = across
    part = joined({name: _of_group(lm, rows, mixers) for name, mixers in groups.items()})
    return Result("norms", about(lm, rows, data), lm.step, *part)


def _of_group(lm, rows: Sequences, mixers: list[Sublayer]) -> Part:
    """The figures of the mixers of one stack."""
    values = measure(lm, rows, mixers, SITES, vectors, title="inputs and keys")
    figures: dict[str, dict[str, np.ndarray]] = {}
    with stage("hidden vectors", len(mixers), "layers") as progress:
        for each in mixers:
            of_mixer = {name: value[each.path] for name, value in values.items() if each.path in value}
            for name, value in _of_mixer(lm, rows, each, of_mixer).items():
                figures.setdefault(name, {})[each.path] = value
            progress.update(1)
    layers = by_layer(lm.config, figures, mixers)
    data, summary, *_ = over_rows({name: value.swapaxes(0, 1) for name, value in layers.items()}, TITLES)
    columns = {TITLES[name]: [mean_of_known(of_layer) for of_layer in data[name]] for name in TITLES if name in data}
    of_layers = table_of("Layers", "means over rows and heads", "layer", range(len(data["hidden_before"])), columns)
    return Part(data, summary, tuple(heat_maps(data, PICTURES)), (of_layers,))


def vectors(values: dict) -> dict:
    """The inputs and keys of a layer with keys, in float32 or wider."""
    return {site: wide(values[site]) for site in SITES if site in values} if "key" in values else {}


def _of_mixer(lm, rows: Sequences, mixer: Sublayer, values: dict) -> dict[str, np.ndarray]:
    """{name: [rows] or [rows, heads]} of a layer from its vectors [rows, L, ...]."""
    values = {name: np.asarray(value, np.float64) for name, value in values.items()}
    real_BL = np.array(rows.inputs.of(mixer.prefix).real_NL)
    keys_BS = np.array(rows.of_source.real_NL) if mixer.role == "cross" else real_BL

    def hidden(x_BLD, real_BL) -> np.ndarray:
        """[B]: the share of the distinct vectors of each row that no query selects."""
        return np.array([1 - selectable(x_LD[of]).selects_N.mean() for x_LD, of in zip(x_BLD, real_BL, strict=True)])

    def mean(x_BL) -> np.ndarray:
        return np.array([x_L[of].mean(0) for x_L, of in zip(x_BL, real_BL, strict=True)])

    before, after = values["before"], values["in"]
    figures = {
        "angle_before": mean(angle(before)),
        "angle_after": mean(angle(after)),
        "projected": mean(projected(before)),
        "spread": np.array([spread(x_LD[of]) for x_LD, of in zip(before, real_BL, strict=True)]),
        "hidden_before": hidden(before, real_BL),
        "hidden_after": hidden(after, real_BL),
        "hidden_keys": np.stack([hidden(values["key"][:, :, g], keys_BS) for g in range(values["key"].shape[2])], 1),
    }
    bound = next(each for each in transformer.bind(lm.config, lm.params).sublayers() if each.sublayer == mixer)
    key_DGK = bound.matrix("key")
    query = values.get("unrotated_query", values["query"])
    if key_DGK is not None and key_DGK.shape[-1] == query.shape[-1]:
        key_DHK = np.repeat(np.asarray(key_DGK, np.float64), query.shape[2] // key_DGK.shape[1], 1)
        figures["angle_query"] = mean(angle(np.einsum("blhk,dhk->blhd", query, key_DHK)))
    return figures


def angle(x) -> np.ndarray:
    """Degrees from 0 to 90 between vectors [..., D] and the line of the ones vector."""
    cosine = np.abs(x.sum(-1)) / np.maximum(np.linalg.norm(x, axis=-1) * np.sqrt(x.shape[-1]), 1e-300)
    return np.degrees(np.arccos(np.minimum(cosine, 1.0)))


def projected(x) -> np.ndarray:
    """The share of |x|^2 along the ones vector."""
    return x.sum(-1) ** 2 / np.maximum(x.shape[-1] * (x**2).sum(-1), 1e-300)


def spread(x_LD) -> float:
    """Standard deviation over mean of the norms |P x| of the L vectors of a row."""
    norms_L = np.linalg.norm(x_LD - x_LD.mean(-1, keepdims=True), axis=-1)
    return float(norms_L.std() / max(norms_L.mean(), 1e-300))
