"""Pictures of the panel: figures of every layer while a model trains (analysis/panel.py)."""

import numpy as np

from xfresearch.pages.figures import HeatMap

CAPTIONS = {
    "attention_entropy": "of the weights in nats, mean over heads",
    "first_token": "mean weight on the first token of the row: the attention sink",
    "previous_token": "mean weight on the token before, of the head with the most",
    "induction": "weight on the token after the last occurrence, on repeated random tokens, of the head with the most",
    "along_ones": "share of the squared norm of attention's input along the ones vector, before the norm",
    "positive_coefficients": "share of the feed-forward's coefficients that are above 0",
    "router_entropy": "of a token's distribution over the experts, in nats",
    "lens_agreement": "share of tokens whose stream after the layer, read as the last one, predicts like the model",
}
ENCODER, CROSS = "encoder", "cross"  # in front of the names of the encoder's figures, and of cross-attention's
OF_CROSS = {
    "attention_entropy": CAPTIONS["attention_entropy"],
    "first_token": "mean weight on the first token of the source",
    "next_token": "weight on tokens of the source that equal the predicted one, of the head with the most: it copies",
    "along_ones": "share of the squared norm of cross-attention's input along the ones vector, before the norm",
}
NAMES = CAPTIONS | {f"{ENCODER}/{name}": caption for name, caption in CAPTIONS.items()}
NAMES |= {f"{CROSS}/{name}": caption for name, caption in OF_CROSS.items()}
COLUMNS = 24  # the most steps of a picture


def panel_pictures(rows: list[dict]) -> list[HeatMap]:
    """A picture of every figure of the rows of metrics.jsonl: layers by steps."""
    rows = [row for row in rows if row["kind"] == "panel"]
    rows = [rows[at] for at in np.unique(np.linspace(0, len(rows) - 1, COLUMNS).round().astype(int))] if rows else []
    steps = tuple(str(row["step"]) for row in rows)
    pictures = []
    for name, caption in NAMES.items():
        values = np.array([row[name] for row in rows if name in row], np.float64).T  # null, of no number, becomes NaN
        if values.size and np.isfinite(values).any():
            title = name.replace("_", " ").replace("/", ": ").capitalize()
            pictures.append(HeatMap(title, caption, values, "layer", "step", 0.0, None, steps))
    return pictures
