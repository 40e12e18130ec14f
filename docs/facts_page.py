"""The tables and the picture of docs/data/facts.json: where_is_a_fact.md and data/tables/edits.md."""

from pathlib import Path

import numpy as np

from xfresearch.analysis.trace import CLASSES

METHODS = ("rome", "rome, published keys", "memit", "memit, mean keys", "finetune", "constrained finetune")
SCORES = {"S": "S", "efficacy": "efficacy, score", "paraphrase": "paraphrase, score"}
SCORES |= {"neighbourhood": "neighbourhood, score", "said": "efficacy, generated", "ripple": "ripple, score"}
FEWER = tuple(SCORES)[:4]


def models(of_models: dict) -> str:
    rows = []
    for name, of in of_models.items():
        summary = of["recall"]["summary"]
        recalled, held_out = (_with_half(summary[key]) for key in ("recalled", "recalled held out"))
        rows.append((name, f"{of['parameters'] / 1e6:.1f} M", of["updates"], f"{of['minutes']:.0f}", recalled, held_out))
    return _table(("model", "parameters", "updates", "minutes", "facts recalled", "by held-out paraphrases"), rows)


def sites(of_models: dict) -> str:
    """The best layer of the last token of the subject and of the last token of the prompt."""
    rows = []
    for name, of in of_models.items():
        for value, x_NC in of.get("trace", {}).get("values", {}).items():
            x_NC = np.array(x_NC, float)
            cells = []
            for token in ("last subject", "last"):
                x_N = x_NC[:, CLASSES.index(token)]
                cells += [int(np.nanargmax(x_N)), f"{np.nanmax(x_N):.3f}"]
            rows.append((name, value.replace("_", "-"), *cells, f"{of['trace']['p'][value]:.1g}"))
    titles = ("model", "value", "layer, last token of the subject", "effect", "layer, last token", "effect", "p")
    return _table(titles, rows)


def alone(of_models: dict) -> str:
    """Metrics after one edit, with their intervals."""
    rows = [
        (name, item["method"], *_scores(item, SCORES), _rise(item), item["failures"])
        for name, of in of_models.items()
        for item in _edits(of, alone=True)
    ]
    return _table(("model", "method", *SCORES, "bits per byte", "failures"), rows)


def together(of_models: dict) -> str:
    """S, the other facts and the held-out text, by the number of edits."""
    rows = []
    for name, of in of_models.items():
        for item in _edits(of, alone=False):
            others = f"{item['before']['others']:.3f} to {item['after']['others']:.3f}"
            rows.append((name, item["method"], item["edits"], *_scores(item, FEWER), others, _rise(item)))
    return _table(("model", "method", "edits", *FEWER, "other facts recalled", "bits per byte"), rows)


def _edits(of_model: dict, alone: bool) -> list[dict]:
    """The measured edits, by method and from many to few."""
    items = [item for item in of_model.values() if isinstance(item, dict) and item.get("alone") is alone]
    return sorted(items, key=lambda item: (METHODS.index(item["method"]), -item["edits"]))


def draw(of_models: dict, folder: Path) -> None:
    """where_is_a_fact_trace.png: the effects of every model, as in figure 2 of Meng et al. 2022."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    traced = {name: of["trace"]["values"] for name, of in of_models.items() if "trace" in of}
    if not traced:
        return
    columns = max(map(len, traced.values()))
    size = 3.1 * columns, 2.9 * len(traced)
    figure, axes = plt.subplots(len(traced), columns, figsize=size, squeeze=False, layout="constrained")
    for row, (name, of) in zip(axes, traced.items(), strict=True):
        top = max(np.nanmax(np.array(x_NC, float)) for x_NC in of.values())
        for axis, value in zip(row, of, strict=True):
            drawn = axis.imshow(np.array(of[value], float), origin="lower", cmap="Purples", vmin=0, vmax=top, aspect="auto")
            axis.set_title(f"{name}: {value.replace('_', '-')}", fontsize=9)
            axis.set_xticks(range(len(CLASSES)), CLASSES, rotation=40, ha="right", fontsize=7)
            axis.set_ylabel("layer", fontsize=8)
        figure.colorbar(drawn, ax=list(row), shrink=0.8, label="indirect effect")
    figure.savefig(folder / "where_is_a_fact_trace.png", dpi=100)
    plt.close(figure)


def _scores(item: dict, names) -> list[str]:
    return [_with_ends(item["metrics"].get(SCORES[name])) for name in names]


def _rise(item: dict) -> str:
    """Of the bits per byte of held-out text."""
    return f"{100 * (item['after']['bits_per_byte'] / item['before']['bits_per_byte'] - 1):+.1f} %"


def _with_half(pair) -> str:
    value, half = pair
    return f"{value:.3f} +- {half:.3f}"


def _with_ends(metric: dict | None) -> str:
    """The value after an edit and the ends of its interval, in hundredths."""
    if metric is None:
        return "-"
    return f"{100 * metric['after']:.0f} ({100 * metric['low']:.0f} to {100 * metric['high']:.0f})"


def _table(titles, rows) -> str:
    if not rows:
        return ""
    lines = [titles, ["---"] * len(titles), *rows]
    return "".join("| " + " | ".join(map(str, line)) + " |\n" for line in lines)
