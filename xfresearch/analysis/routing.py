"""How a mixture of experts routes tokens.

    load          share of all choices that go to each expert              mass     mean router probability of each expert
    busiest       largest load times the number of experts (1: even)       entropy  of a token's router distribution, in nats
    margin        score of the last choice minus that of the next expert; with balance='bias' the bias is part of the score
    dropped       share of the choices that are above the capacity
    together      of the tokens that choose an expert (row), the share that also choose another one (column)
    by token      mutual information of a token's first choice and its id, in bits, minus that of shuffled ids
    by position   the same for the position, in eight parts of the row
    by corpus     the same for the corpus, of rows of several corpora
    kept          share of the choices that another checkpoint makes too (saturation, Muennighoff et al. 2024, OLMoE)

The router's distribution is s / sum(s), with its scores s: those of a softmax have the sum 1, those of a sigmoid do not.
Mass, entropy and margin are those of the statistics of training (models/feed_forwards/moe.py).
"""

import jax
import numpy as np

from xfresearch.analysis.passes import ROWS, about, by_layer, measure, rows, several, wide
from xfresearch.analysis.registry import analysis
from xfresearch.analysis.result import HeatMap, Result, Table
from xfresearch.models.model_config import ModelConfig
from xfresearch.models.sublayers import Sublayer
from xfresearch.runtime.summaries import mean_interval, mean_of_known

SITES = ("router_probabilities", "chosen", "dropped")
PARTS = 8  # of a row
SHUFFLES = 10
OF_ROWS = ("entropy", "margin", "dropped", "kept")  # figures that each row has
OF_ALL = ("busiest", "by_token", "by_position", "by_corpus")  # of all rows together


def applies(model: ModelConfig) -> str:
    """Why the analysis does not apply to a model; '' if it does."""
    if not model.sublayers(has="mixture"):
        return "the model has no mixture of experts"
    return "" if chosen_by_tokens(model) else "its experts choose tokens"


@analysis(applies, "load, entropy, co-activation, specialisation and saturation of experts")
def routing(lm, data=None, count: int = ROWS, length: int = 0, seed: int = 0, corpora=(), against=None) -> Result:
    """The figures above of every layer with experts (N rows; if a layer has several mixtures, a row for each of them, which
    `mixtures` names), on `count` rows of `length` tokens of `data` (passes.rows).

    corpora: more corpora, of each `count` rows, for `by_corpus`; the other figures are of all rows. against: the model at
    another step of the same run, for `kept`. .data: load, mass [N, E]; together [N, E, E]; corpus_load [corpora, N, E]; and
    entropy, margin, dropped, busiest, by_token, by_position, by_corpus, kept [N]; NaN for layers without experts. The
    intervals of .summary are over rows. Raises UserError for data that cannot be read."""
    parts = [rows(lm, each, count, length) for each in (data, *corpora)]
    tokens_NL = np.concatenate(parts)
    corpus_N = np.repeat(np.arange(len(parts)), list(map(len, parts))) if corpora else None
    mixtures = chosen_by_tokens(lm.config)
    values = measure(lm, tokens_NL, mixtures, SITES, choices, title="routing")
    bias = biases(lm)
    figures: dict[str, dict[str, np.ndarray]] = {}
    for path in values["chosen"]:
        of_mixture = {name: value[path] for name, value in values.items() if path in value}
        for name, value in of_rows(of_mixture, bias[path], tokens_NL, seed, corpus_N).items():
            figures.setdefault(name, {})[path] = value
    if against is not None:
        other = measure(against, tokens_NL, mixtures, SITES, choices, title=f"routing of step {against.step}")["chosen"]
        figures["kept"] = {path: kept(chosen, other[path]) for path, chosen in values["chosen"].items()}
    of_layers = {name: by_layer(value, mixtures, lm.config.depth) for name, value in figures.items()}
    per_row = {name: of_layers[name].T for name in OF_ROWS if name in figures}
    arrays = {name: value for name, value in of_layers.items() if name not in per_row}
    if several(mixtures):
        arrays["mixtures"] = np.array([each.path for each in mixtures])
    if corpora:
        arrays["corpus_load"] = arrays["corpus_load"].swapaxes(0, 1)
    arrays |= {name: mean_of_known(value, 0) for name, value in per_row.items()}
    summary = {name: mean_interval(mean_of_known(value, 1)) for name, value in per_row.items()}
    summary |= {name.replace("_", " "): (float(mean_of_known(arrays[name])), np.nan) for name in OF_ALL if name in figures}
    arrays |= {f"{name}_rows": value for name, value in per_row.items()}
    line = about(lm, tokens_NL, data) + "".join(f", {each if isinstance(each, str) else 'other tokens'}" for each in corpora)
    return Result("routing", line, lm.step, arrays, summary, _pictures(arrays), (_table(arrays),))


def chosen_by_tokens(model: ModelConfig) -> list[Sublayer]:
    """The mixtures whose experts tokens choose."""
    return [each for each in model.sublayers(has="mixture") if each.options.mixture.routing == "token_choice"]


def choices(values: dict) -> dict:
    """The choices of a layer with experts that tokens choose, and what their figures need."""
    if "chosen" not in values:
        return {}
    scores_BLE = wide(values["router_probabilities"])
    p_BLE = scores_BLE / scores_BLE.sum(-1, keepdims=True)
    entropy_BL = -jax.scipy.special.xlogy(p_BLE, p_BLE).sum(-1)
    of_tokens = {"chosen": values["chosen"], "scores": scores_BLE, "entropy": entropy_BL}
    return of_tokens | ({"dropped": values["dropped"]} if "dropped" in values else {})


def biases(lm) -> dict[str, np.ndarray]:
    """{path of a mixture: [E]}: what the choice of experts adds to the scores; 0 without balance='bias'."""
    by_path = {}
    for each in lm.config.sublayers(has="mixture"):
        bias_RE = lm.params["blocks"][each.layer.stack][each.name].get("router_bias")
        by_path[each.path] = np.zeros((), np.float32) if bias_RE is None else np.asarray(bias_RE[each.layer.index])
    return by_path


def of_rows(values: dict, bias_E, tokens_BL, seed: int, corpus_B=None) -> dict[str, np.ndarray]:
    """The figures of one layer from its values of every token: those of OF_ROWS for each row, the others of all tokens.
    bias_E: see `biases`. corpus_B: the number of each row's corpus."""
    chosen_BLk = values["chosen"]
    scores_BLE = values["scores"]
    E, k = scores_BLE.shape[-1], chosen_BLk.shape[-1]
    chosen_TE = (chosen_BLk.reshape(-1, k)[..., None] == np.arange(E)).any(1)
    load_E = chosen_TE.sum(0) / chosen_BLk.size
    both_EE = chosen_TE.T.astype(np.float64) @ chosen_TE
    first_BL = chosen_BLk[..., 0]
    ranked_BLE = np.sort(scores_BLE + bias_E, -1)
    length = first_BL.shape[1]
    parts_BL = np.broadcast_to(np.arange(length) * PARTS // length, first_BL.shape)
    figures = {
        "load": load_E,
        "mass": (scores_BLE / scores_BLE.sum(-1, keepdims=True)).mean((0, 1)),
        "busiest": load_E.max() * E,
        "together": both_EE / np.maximum(np.diag(both_EE)[:, None], 1),
        "by_token": information(first_BL, tokens_BL, seed),
        "by_position": information(first_BL, parts_BL, seed),
        "entropy": values["entropy"].mean(1),
        "margin": (ranked_BLE[..., -k] - ranked_BLE[..., -min(k + 1, E)]).mean(1),
    }
    if corpus_B is not None:
        figures["by_corpus"] = information(first_BL, np.broadcast_to(corpus_B[:, None], first_BL.shape), seed)
        of_row_BLE = chosen_TE.reshape(*first_BL.shape, E) / k
        figures["corpus_load"] = np.stack([of_row_BLE[corpus_B == corpus].mean((0, 1)) for corpus in np.unique(corpus_B)])
    return figures | ({"dropped": values["dropped"].mean((1, 2))} if "dropped" in values else {})


def information(a, b, seed: int) -> np.ndarray:
    """Mutual information of two integer arrays in bits, minus its mean for SHUFFLES random orders of b: few samples of many
    values have information even if they are independent."""
    a, b = (np.unique(x, return_inverse=True)[1].ravel() for x in (a, b))
    rng = np.random.default_rng(seed)
    by_chance = np.mean([_information(a, rng.permutation(b)) for _ in range(SHUFFLES)])
    return np.asarray(_information(a, b) - by_chance)


def _information(a, b) -> float:
    counts = np.zeros((a.max() + 1, b.max() + 1))
    np.add.at(counts, (a, b), 1)
    p = counts / counts.sum()
    independent = p.sum(1, keepdims=True) * p.sum(0, keepdims=True)
    return float((p[p > 0] * np.log2(p[p > 0] / independent[p > 0])).sum())


def kept(chosen_BLk, before_BLk) -> np.ndarray:
    """[B]: the share of a row's choices that are among those of the same token in `before_BLk`."""
    return (chosen_BLk[..., None] == before_BLk[..., None, :]).any(-1).mean((1, 2))


def _pictures(data: dict) -> tuple[HeatMap, ...]:
    row = "mixture" if "mixtures" in data else "layer"
    load = HeatMap("Load", "share of all choices", data["load"], row, "expert", 0.0)
    mass = HeatMap("Mass", "mean router probability", data["mass"], row, "expert", 0.0)
    numbers = [n for n, matrix in enumerate(data["together"]) if not np.isnan(matrix).all()]
    caption = "share of the row's tokens that the column's expert gets too"
    together = [
        HeatMap(f"Together, {row} {n}", caption, data["together"][n], "expert", "expert too", 0.0, 1.0) for n in numbers
    ]
    by_corpus = [
        HeatMap(f"Load, corpus {n}", "share of the choices of this corpus", loads, row, "expert", 0.0)
        for n, loads in enumerate(data.get("corpus_load", ()))
    ]
    return (load, mass, *by_corpus, *together)


def _table(data: dict) -> Table:
    names = [name for name in (*OF_ALL, *OF_ROWS) if name in data]
    lines = [
        (str(data["mixtures"][n] if "mixtures" in data else n), *(round(float(data[name][n]), 4) for name in names))
        for n in range(len(data["busiest"]))
        if not np.isnan(data["busiest"][n])
    ]
    title, row = ("Mixtures", "mixture") if "mixtures" in data else ("Layers", "layer")
    return Table(title, "entropy in nats, information in bits", (row, *(n.replace("_", " ") for n in names)), lines)
