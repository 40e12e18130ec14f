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

from xfresearch.analysis.passes import about, by_layer, by_stack, measure, several, wide
from xfresearch.analysis.registry import analysis
from xfresearch.analysis.result import Part, Result, joined, over_rows
from xfresearch.analysis.sequences import ROWS, Sequences, concatenated, sequences
from xfresearch.models.model_config import ModelConfig
from xfresearch.models.sublayers import Sublayer
from xfresearch.pages.figures import HeatMap, Table, table_of
from xfresearch.runtime.summaries import mean_of_known

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
def routing(
    lm, data=None, count: int = ROWS, sequence_length: int = 0, seed: int = 0, corpora=(), against=None, source=None
) -> Result:
    """The figures above of every layer with experts (N rows; if a layer has several mixtures, a row for each of them, which
    `mixtures` names), on `count` rows of `sequence_length` tokens of `data` (sequences.py). Padding does not count.

    corpora: more corpora, of each `count` rows, for `by_corpus`; the other figures are of all rows. against: the model at
    another step of the same run, for `kept`. .data: load, mass [N, E]; together [N, E, E]; corpus_load [corpora, N, E]; and
    entropy, margin, dropped, busiest, by_token, by_position, by_corpus, kept [N]; NaN for layers without experts. Those of
    an encoder are encoder/name. The intervals of .summary are over rows. Raises UserError for data that cannot be read."""
    first = sequences(lm, data, count, sequence_length, source=source)
    length = 0 if first.source is not None else first.tokens_NL.shape[1]  # given rows may have another length
    parts = [first, *(sequences(lm, each, count, length) for each in corpora)]
    rows = concatenated(parts)
    corpus_N = np.repeat(np.arange(len(parts)), list(map(len, parts))) if corpora else None
    stacks = by_stack(chosen_by_tokens(lm.config))
    part = joined({name: _of_stack(lm, rows, of, seed, corpus_N, against) for name, of in stacks.items()})
    line = about(lm, rows, data) + "".join(f", {each if isinstance(each, str) else 'other tokens'}" for each in corpora)
    return Result("routing", line, lm.step, *part)


def _of_stack(lm, rows: Sequences, mixtures: list[Sublayer], seed: int, corpus_N, against) -> Part:
    """The figures of the mixtures of one stack."""
    values = measure(lm, rows, mixtures, SITES, choices, title="routing")
    read = rows.inputs.of(mixtures[0].prefix)
    bias = biases(lm)
    figures: dict[str, dict[str, np.ndarray]] = {}
    for path in values["chosen"]:
        of_mixture = {name: value[path] for name, value in values.items() if path in value}
        for name, value in of_rows(of_mixture, bias[path], read, seed, corpus_N).items():
            figures.setdefault(name, {})[path] = value
    if against is not None:
        other = measure(against, rows, mixtures, SITES, choices, title=f"routing of step {against.step}")["chosen"]
        real_BL = np.array(read.real_NL)
        figures["kept"] = {path: kept(chosen, other[path], real_BL) for path, chosen in values["chosen"].items()}
    of_layers = by_layer(lm.config, figures, mixtures)
    found, summary, *_ = over_rows({name: of_layers.pop(name).T for name in OF_ROWS if name in figures})
    data = of_layers | found
    if several(mixtures):
        data["mixtures"] = np.array([each.path for each in mixtures])
    if corpus_N is not None:
        data["corpus_load"] = data["corpus_load"].swapaxes(0, 1)
    summary |= {name.replace("_", " "): (float(mean_of_known(data[name])), np.nan) for name in OF_ALL if name in data}
    return Part(data, summary, _pictures(data), (_table(data),))


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
        of_stack = lm.params["encoder"] if each.prefix else lm.params
        bias_RE = of_stack["blocks"][each.layer.stack][each.name].get("router_bias")
        by_path[each.path] = np.zeros((), np.float32) if bias_RE is None else np.asarray(bias_RE[each.layer.index])
    return by_path


def of_rows(values: dict, bias_E, rows: Sequences, seed: int, corpus_B=None) -> dict[str, np.ndarray]:
    """The figures of one layer from its values of every token: those of OF_ROWS for each row, the others of all tokens.
    bias_E: see `biases`. corpus_B: the number of each row's corpus."""
    real_BL, chosen_BLk, scores_BLE = np.array(rows.real_NL), values["chosen"], values["scores"]
    E, k = scores_BLE.shape[-1], chosen_BLk.shape[-1]
    chosen_TE = (chosen_BLk[real_BL][..., None] == np.arange(E)).any(1)
    load_E = chosen_TE.sum(0) / (len(chosen_TE) * k)
    both_EE = chosen_TE.T.astype(np.float64) @ chosen_TE
    first_T = chosen_BLk[..., 0][real_BL]
    ranked_BLE = np.sort(scores_BLE + bias_E, -1)
    parts_BL = np.arange(real_BL.shape[1]) * PARTS // real_BL.sum(1)[:, None]
    figures = {
        "load": load_E,
        "mass": (scores_BLE / scores_BLE.sum(-1, keepdims=True))[real_BL].mean(0),
        "busiest": load_E.max() * E,
        "together": both_EE / np.maximum(np.diag(both_EE)[:, None], 1),
        "by_token": information(first_T, np.asarray(rows.tokens_NL)[real_BL], seed),
        "by_position": information(first_T, parts_BL[real_BL], seed),
        "entropy": of_real(values["entropy"], real_BL),
        "margin": of_real(ranked_BLE[..., -k] - ranked_BLE[..., -min(k + 1, E)], real_BL),
    }
    if corpus_B is not None:
        corpus_T = np.broadcast_to(corpus_B[:, None], real_BL.shape)[real_BL]
        figures["by_corpus"] = information(first_T, corpus_T, seed)
        figures["corpus_load"] = np.stack([chosen_TE[corpus_T == corpus].mean(0) / k for corpus in np.unique(corpus_B)])
    return figures | ({"dropped": of_real(values["dropped"].mean(2), real_BL)} if "dropped" in values else {})


def of_real(x_BL, real_BL) -> np.ndarray:
    """[B]: the mean over the tokens of each row that are no padding."""
    return (x_BL * real_BL).sum(1) / real_BL.sum(1)


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


def kept(chosen_BLk, before_BLk, real_BL) -> np.ndarray:
    """[B]: the share of a row's choices that are among those of the same token in `before_BLk`."""
    return of_real((chosen_BLk[..., None] == before_BLk[..., None, :]).any(-1).mean(2), real_BL)


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
    known = ~np.isnan(data["busiest"])
    columns = {name.replace("_", " "): data[name][known] for name in (*OF_ALL, *OF_ROWS) if name in data}
    title, row = ("Mixtures", "mixture") if "mixtures" in data else ("Layers", "layer")
    labels = data.get("mixtures", np.arange(len(known)))[known]
    return table_of(title, "entropy in nats, information in bits", row, labels, columns)
