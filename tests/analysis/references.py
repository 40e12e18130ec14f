"""The statistics of the analyses in NumPy, in float64, from their definitions: loops over layers, rows and tokens.

`values` of a model are {tap: array} of `recorded`. Attention's own reference is in test_attention.py, that of memories in
test_memories.py.
"""

import numpy as np

EPSILON = 1e-5  # of the final norm


def recorded(lm, tokens_NL, sites=("",)) -> dict[str, np.ndarray]:
    """The values of a forward pass whose names end in one of `sites`, in float64."""
    names = [name for name in lm.tap_names() if name.endswith(tuple(sites))]
    return {name: np.asarray(value, np.float64) for name, value in lm.capture(tokens_NL, names).items()}


def parameter(lm, path: str) -> np.ndarray | None:
    """lm.params['a']['b'] of 'a/b' in float64; None if it does not exist."""
    found = lm.params
    for name in path.split("/"):
        found = found.get(name) if isinstance(found, dict) else None
    return None if found is None else np.asarray(found, np.float64)


def head(lm) -> np.ndarray:
    """[V, D] of the output head."""
    own = parameter(lm, "head/table")
    return parameter(lm, "embed/table") if own is None else own


def final_norm(lm, x, at=None) -> np.ndarray:
    """The final norm of x. With `at`: x is a part of the stream `at`, divided by what the norm divides `at` by; no bias."""
    stream = x if at is None else at
    if lm.config.final_norm == "layer":
        x, stream = (value - value.mean(-1, keepdims=True) for value in (x, stream))
    y = x / np.sqrt((stream**2).mean(-1, keepdims=True) + EPSILON) * parameter(lm, "final_norm/gain")
    bias = parameter(lm, "final_norm/bias")
    return y if bias is None or at is not None else y + bias


def log_softmax(x) -> np.ndarray:
    x = x - x.max(-1, keepdims=True)
    return x - np.log(np.exp(x).sum(-1, keepdims=True))


def lens(lm, stream_BLD, final_BLV, tokens_BL) -> dict[str, np.ndarray]:
    """{figure: [B]} of a stream that is read as the last one. final_BLV: the model's logits."""
    log_p, final = log_softmax(final_norm(lm, stream_BLD) @ head(lm).T), log_softmax(final_BLV)
    found = {"loss": [], "agreement": [], "divergence": []}
    for b, row in enumerate(tokens_BL):
        found["loss"].append(np.mean([-log_p[b, n, row[n + 1]] for n in range(len(row) - 1)]))
        found["agreement"].append(np.mean(log_p[b].argmax(-1) == final[b].argmax(-1)))
        found["divergence"].append(np.mean((np.exp(final[b]) * (final[b] - log_p[b])).sum(-1)))
    return {name: np.array(value) for name, value in found.items()}


def attribution(lm, values: dict, tokens_BL) -> dict[str, np.ndarray]:
    """{part: [B]}: the logit of the next token that a part adds, minus the mean logit that it adds, in a pre-norm model."""
    last = values[f"blocks.{lm.config.depth - 1}.feed_forward.residual"]
    raw = {"embed": values["embed"]}
    for layer in range(lm.config.depth):
        at = f"blocks.{layer}.attention"
        output_HVD = parameter(lm, "blocks/main/attention/output/kernel")[layer]
        for h, output_VD in enumerate(output_HVD):
            raw[f"{at}.{h}"] = values[f"{at}.heads"][:, :, h] @ output_VD
        raw[f"{at}.rest"] = values[f"{at}.out"] - sum(raw[f"{at}.{h}"] for h in range(len(output_HVD)))
        raw[f"blocks.{layer}.feed_forward"] = values[f"blocks.{layer}.feed_forward.out"]
    parts = {name: final_norm(lm, part, last) for name, part in raw.items()}
    bias = parameter(lm, "final_norm/bias")
    parts |= {} if bias is None else {"final_norm": np.broadcast_to(bias, last.shape)}
    return {name: _next(part @ head(lm).T, tokens_BL) for name, part in parts.items()}


def key_attribution(lm, values: dict, tokens_BL, layer: int, values_FD) -> np.ndarray:
    """[F]: the same of each key and value of a feed-forward layer, as the mean over rows and tokens."""
    last = values[f"blocks.{lm.config.depth - 1}.feed_forward.residual"]
    m = values[f"blocks.{layer}.feed_forward.coefficients"]
    parts = [final_norm(lm, m[..., f, None] * v_D, last) @ head(lm).T for f, v_D in enumerate(values_FD)]
    return np.array([_next(part, tokens_BL).mean() for part in parts])


def _next(logits_BLV, tokens_BL) -> np.ndarray:
    """[B]: the mean logit of the next token, relative to the mean logit."""
    own = np.take_along_axis(logits_BLV[:, :-1], tokens_BL[:, 1:, None], -1)[..., 0]
    return (own - logits_BLV[:, :-1].mean(-1)).mean(1)


def information(a, b) -> float:
    """Mutual information of paired values in bits: H(a) + H(b) - H(a, b)."""
    return entropy(list(a)) + entropy(list(b)) - entropy(list(zip(a, b, strict=True)))


def entropy(values: list) -> float:
    shares = np.array([values.count(value) for value in set(values)]) / len(values)
    return float(-(shares * np.log2(shares)).sum())
