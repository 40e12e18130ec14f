"""The figures of the analyses, as their papers define them, from the records of the reference's pass alone.

A memory is named as in 'blocks.0.feed_forward'; B rows of L tokens, N layers, K keys.
"""

from dataclasses import dataclass

import numpy as np

from tests.reference.model import layer_order, passed, pick, site, tree
from tests.reference.norms import frozen, norm_of, softcap
from tests.variants import LAYOUTS


@dataclass(frozen=True)
class Pass:
    """A pass of a model: its parameters, the logits, and the values of all taps."""

    config: object
    params: dict
    tokens_BL: np.ndarray
    logits_BLV: np.ndarray
    values: dict

    @classmethod
    def of(cls, config, params, tokens_BL, changes=None, source=None) -> "Pass":
        tokens_BL = np.asarray(tokens_BL)
        return cls(config, tree(params), tokens_BL, *passed(config, params, tokens_BL, changes=changes, source=source))

    def encoder(self, source_BS) -> "Pass":
        """The pass of the encoder over its source, which makes no logits."""
        values = {name.removeprefix("encoder."): x for name, x in self.values.items() if name.startswith("encoder.")}
        return Pass(self.config.encoder, self.params["encoder"], np.asarray(source_BS), None, values)

    def layers(self):
        """(number, options of the block, parameters) of each layer."""
        for number, (name, stack, repeat) in enumerate(layer_order(self.config)):
            yield number, self.config.blocks[name], pick(self.params["blocks"][stack], repeat)

    @property
    def first(self):
        """The block whose norm options those outside of the blocks have."""
        return self.config.blocks[layer_order(self.config)[0][0]]

    @property
    def ends(self) -> list[str]:
        """The last sublayer of each layer."""
        return [f"blocks.{number}.{list(block.sublayers)[-1]}" for number, block, _ in self.layers()]

    @property
    def head_VD(self):
        scale = {"none": 1.0, "inverse_sqrt_width": self.config.width**-0.5}[self.config.head_scale]
        return scale * self.params["embed" if self.config.tie_embeddings else "head"]["table"]

    def final_norm(self, x):
        return norm_of(self.config.final_norm, self.params.get("final_norm", {}), x, self.first)

    def logits(self, x, total=None):
        """What the head makes of a residual stream, and of ResiDual's second one."""
        hidden = self.final_norm(x) if total is None else x + self.final_norm(total)
        logits = hidden @ self.head_VD.T + self.params.get("head_bias", {}).get("bias", 0)
        return softcap(logits, self.config.logit_softcap)


def log_softmax(x):
    x = x - x.max(-1, keepdims=True)
    return x - np.log(np.exp(x).sum(-1, keepdims=True))


def stream_logits(p: Pass, end: str, translator=None) -> np.ndarray:
    """[B, L, V]: the logits of the stream after a sublayer, read as the last one, or of its translation x + x A + b."""
    x = p.values[f"{end}.residual"]
    x = x if translator is None else x + x @ translator[0] + translator[1]
    return p.logits(x, p.values.get(f"{end}.dual"))


def lens(p: Pass, translators=None) -> dict[str, np.ndarray]:
    """{loss, agreement, divergence: [B, N]} of the logit lens, or of the tuned lens with translators (matrix, bias)."""
    of_layers = {"loss": [], "agreement": [], "divergence": []}
    final = log_softmax(p.logits_BLV)
    for n, end in enumerate(p.ends):
        log_p = log_softmax(stream_logits(p, end, translators and (translators[0][n], translators[1][n])))
        own = np.take_along_axis(log_p[:, :-1], p.tokens_BL[:, 1:, None], -1)[..., 0]
        of_layers["loss"].append(-own.mean(1))
        of_layers["agreement"].append((log_p.argmax(-1) == final.argmax(-1)).mean(1))
        of_layers["divergence"].append((np.exp(final) * (final - log_p)).sum(-1).mean(1))
    return {name: np.stack(value, 1) for name, value in of_layers.items()}


def memory(p: Pass, name: str, gated: bool = False) -> tuple[np.ndarray, np.ndarray]:
    """The coefficients [B, L, K] of a memory, with the gates of its experts if asked for, and its values [K, D]: y is the
    sum of their products, without biases and, in attention, what comes from tokens."""
    number, sublayer, *shared = name.split(".")[1:]
    _, block, params = list(p.layers())[int(number)]
    m, v = p.values[f"{name}.coefficients"], params[sublayer]
    if sublayer == "attention":
        value, output = v["memory"]["value"], v.get("output", {}).get("kernel")
        if value.ndim == 2:
            return m, value
        H, M = len(output), len(value)
        heads = [np.sqrt(M) * value[:, h * value.shape[1] // H] @ output[h] for h in range(H)]
        return m[..., :M].transpose(0, 2, 1, 3).reshape(*p.tokens_BL.shape, -1), np.concatenate(heads)
    if shared or "experts" not in v:
        v = v["shared"] if shared else v
        return m, v["down"]["kernel"]
    chosen, gates = p.values[f"{name}.chosen"], p.values[f"{name}.gates"]
    down_EFD = v["experts"]["down"]
    dense = np.zeros((*p.tokens_BL.shape, *down_EFD.shape[:2]))
    for b, l, k in np.ndindex(chosen.shape):
        if not p.values[f"{name}.dropped"][b, l, k]:
            dense[b, l, chosen[b, l, k]] = m[b, l, k] * (gates[b, l, k] if gated else 1.0)
    return dense.reshape(*p.tokens_BL.shape, -1), down_EFD.reshape(-1, down_EFD.shape[-1])


def added(p: Pass, name: str, x, at=None):
    """What the block adds to the stream for an output x of the sublayer: after its norm, as the linear map at the value `at`
    (by default x), and its gain."""
    number, sublayer = name.split(".")[1:3]
    _, block, params = list(p.layers())[int(number)]
    if hasattr(block.norms, f"{sublayer}_out"):
        x = frozen(*site(block, params, f"{sublayer}_out"), x if at is None else at, x)
    half = 0.5 if block.layout == "macaron" and sublayer != "attention" else 1.0  # a step of half the size
    return half * params.get(f"{sublayer}_gain", 1.0) * x


def memories(p: Pass, name: str) -> dict[str, np.ndarray]:
    """The figures [B] of a memory (Geva et al. 2021): the stream before the layer is r, that after it o, and it adds y."""
    at = ".".join(name.split(".")[:3])
    r, y, o = (p.logits(p.values[f"{at}.{site}"]).argmax(-1) for site in ("before", "out", "residual"))
    m_BLK, v_KD = memory(p, name)
    value_K = p.logits(added(p, name, v_KD)).argmax(-1)
    figures = {"active": (m_BLK > 0).mean((1, 2)), "residual": (o == r) & (o != y), "written": (o != r) & (o == y)}
    figures |= {"both": (o == r) & (o == y), "third": (o != r) & (o != y), "changes": o != r}
    figures["composed"] = np.array([[y_ not in value_K[m > 0] for y_, m in zip(*row, strict=True)]
                                  for row in zip(y, m_BLK, strict=True)])  # fmt: skip
    return {each: value.mean(1) if value.ndim == 2 else value for each, value in figures.items()} | {"values": value_K}


class Terms(dict):
    """{part: its share} of a vector. It adds and scales like the vector."""

    def __add__(self, other):
        return Terms(self | {name: self.get(name, 0) + value for name, value in other.items()})

    def __mul__(self, factor):
        return Terms({name: factor * value for name, value in self.items()})

    __rmul__ = __mul__

    def normed(self, name: str, kind: str, params: dict, block, at):
        """The terms after a norm of their sum, `at`: through the linear map that it is there, and its constant."""
        constant = norm_of(kind, params, np.zeros_like(at), block)
        result = Terms({part: frozen(kind, params, block, at, x) for part, x in self.items()})
        return result + {name: constant} if constant.any() else result


def followed(p: Pass, start: dict, written) -> Terms:
    """Terms of the final hidden states: those of `start`, which are in the stream at first, and written(layer, sublayer).
    The equations of the layouts are those of the values."""

    class Part:
        def __init__(self, number: int, name: str, block, params):
            self.at, self.number, self.name, self.block, self.params = f"blocks.{number}.{name}", number, name, block, params

        def __call__(self, x, h, after=None):
            self.y = Terms(written(self.number, self.name))
            return self.y

        def end(self, x, norm=None):
            options = site(self.block, self.params, f"{self.name}_post") if norm else None
            return x.normed(f"{self.at}.norm", *options, p.values[f"{self.at}.sum"]) if norm else x

        def carries(self, name, value):
            return value

    x, carried = Terms(start), {}
    for number, block, params in p.layers():
        parts = [Part(number, name, block, params) for name in block.sublayers]
        norms = {name: lambda x: x for name in vars(block.norms)}
        x = LAYOUTS[block.layout].reference(x, *parts, norms, params | {"carried": carried}, p.config.depth)
    options = p.config.final_norm, p.params.get("final_norm", {}), p.first
    at = p.values.get(f"{p.ends[-1]}.dual", p.values[f"{p.ends[-1]}.residual"])
    final = lambda terms: terms.normed("final_norm", *options, at)  # noqa: E731
    return LAYOUTS[block.layout].end(x, {"carried": carried}, final)


def attribution(p: Pass) -> dict[str, np.ndarray]:
    """{part: [B]}: what each part adds to the next token's logit, minus the mean logit; as the mean over tokens."""
    layers = list(p.layers())

    def written(number: int, name: str) -> dict:
        at, block, params = f"blocks.{number}.{name}", layers[number][1], layers[number][2]
        out, heads = p.values[f"{at}.out"], p.values.get(f"{at}.heads")
        if block.layout == "fused_output" and name == "attention":
            return {}
        if heads is None or "output" not in params[name]:
            return {at: out}
        gate = p.values.get(f"{at}.gate", np.ones(1))
        heads = heads * (gate if gate.ndim in (1, 4) else gate[..., None])
        by_head = np.einsum("blhv,hvd->hbld", heads, params[name]["output"]["kernel"])
        by_name = {f"{at}.{h}": added(p, at, x, p.values[f"{at}.raw"]) for h, x in enumerate(by_head)}
        return by_name | {f"{at}.rest": out - sum(by_name.values())}

    terms = followed(p, {"embed": p.values["embed"]}, written)
    return {part: _relative_logit(p, x) for part, x in terms.items()}


def of_keys(p: Pass, name: str) -> np.ndarray:
    """[B, K]: the same of each key and value of a memory."""
    at, layer, sublayer = ".".join(name.split(".")[:3]), int(name.split(".")[1]), name.split(".")[2]
    m_BLK, v_KD = memory(p, name, gated=True)
    terms_KBLD = np.einsum("blk,kd->kbld", m_BLK, v_KD)
    own = {"keys": added(p, at, terms_KBLD, p.values[f"{at}.raw"])}
    terms = followed(p, {}, lambda number, name: own if (number, name) == (layer, sublayer) else {})
    return _relative_logit(p, terms.get("keys", np.zeros_like(terms_KBLD))).T


def _relative_logit(p: Pass, x) -> np.ndarray:
    towards_BLD = p.head_VD[p.tokens_BL[:, 1:]] - p.head_VD.mean(0)
    x = np.broadcast_to(x, (*x.shape[: x.ndim - 3], *p.values["embed"].shape))
    return (x[..., :-1, :] * towards_BLD).sum(-1).mean(-1)


def relative_logit(p: Pass) -> np.ndarray:
    """[B]: the next token's logit minus the mean logit, before a softcap; as the mean over tokens."""
    hidden = p.values["final"]
    bias_V = np.broadcast_to(p.params.get("head_bias", {}).get("bias", 0.0), len(p.head_VD))
    return _relative_logit(p, hidden) + (bias_V[p.tokens_BL[:, 1:]] - bias_V.mean()).mean(1)


def attention(values: dict, sink: bool) -> dict:
    """{figure: [B, H]} of one layer's weights, values and outputs (analysis/attention.py), query by query."""
    w = values["weights"]
    B, H, L, _ = w.shape
    m = values.get("sink_weight", values.get("coefficients", np.zeros((B, H, L, 0))))
    m = m if m.ndim == 4 else np.zeros((B, H, L, 0))
    share = H // values["value"].shape[2]
    of_heads: dict = {}
    for b, h in np.ndindex(B, H):
        rows = []
        for n in range(1, L):
            o, v = values["heads"][b, n, h], values["value"][b, n, h // share]
            row = {
                "first": w[b, h, n, 0],
                "previous": w[b, h, n, n - 1],
                "self": w[b, h, n, n],
                "distance": sum(w[b, h, n, s] * abs(n - s) for s in range(L)),
                "own_value": o @ v / np.linalg.norm(o) / np.linalg.norm(v),
            }
            rows.append(row | entropy_and_rest(w[b, h, n], m[b, h, n], sink))
        for name in rows[0]:
            of_heads.setdefault(name, np.zeros((B, H)))[b, h] = np.mean([row[name] for row in rows])
    return of_heads


def entropy_and_rest(w_S, m_M, sink: bool) -> dict:
    """The entropy of one query's weights, those of slots and the sink among them, and what slots and the sink take."""
    everything = np.concatenate([w_S, m_M])
    everything = everything[everything > 0]
    slots = len(m_M) - sink
    rest = {"slots": m_M[:slots].sum()} if slots > 0 else {}
    return {"entropy": -(everything * np.log(everything)).sum()} | rest | ({"sink": m_M[-1]} if sink else {})


def across(values: dict, tokens_BL, next_BL, source_BS, sink: bool) -> dict:
    """{figure: [B, H]} of one layer's cross-attention (analysis/alignment.py), query by query."""
    w = values["weights"]
    B, H, L, S = w.shape
    m = values.get("sink_weight", values.get("coefficients", np.zeros((B, H, L, 0))))
    m = m if m.ndim == 4 else np.zeros((B, H, L, 0))
    of_heads: dict = {}
    for b, h in np.ndindex(B, H):
        rows = []
        for n in range(L):
            row = {"first": w[b, h, n, 0], "last": w[b, h, n, -1]}
            for name, token in (("same", tokens_BL[b, n]), ("next", next_BL[b, n])):
                row[name] = sum(w[b, h, n, s] for s in range(S) if source_BS[b, s] == token)
            rows.append(row | entropy_and_rest(w[b, h, n], m[b, h, n], sink))
        for name in rows[0]:
            of_heads.setdefault(name, np.zeros((B, H)))[b, h] = np.mean([row[name] for row in rows])
    return of_heads


def geometry(values: dict, key_DGK) -> dict:
    """{figure: [B] or [B, H]} of a layer's inputs and queries (analysis/norms.py), vector by vector."""

    def each(function, x):
        return np.apply_along_axis(function, -1, x)

    def along(v):
        return v.sum() / np.sqrt(len(v))  # the product with the unit vector along the ones vector

    def angle(v):
        return np.degrees(np.arccos(abs(along(v)) / np.linalg.norm(v)))

    before = values["before"]
    sizes_BL = each(lambda v: np.linalg.norm(v - v.mean()), before)
    figures = {"angle_before": each(angle, before).mean(1), "angle_after": each(angle, values["in"]).mean(1)}
    figures |= {"projected": each(lambda v: along(v) ** 2 / (v @ v), before).mean(1)}
    figures |= {"spread": sizes_BL.std(1) / sizes_BL.mean(1)}
    if key_DGK is not None:
        q_BLHK = values.get("unrotated_query", values["query"])
        share = q_BLHK.shape[2] // key_DGK.shape[1]
        inputs = [q_BLHK[:, :, h] @ key_DGK[:, h // share].T for h in range(q_BLHK.shape[2])]
        figures["angle_query"] = np.stack([each(angle, x).mean(1) for x in inputs], 1)
    return figures


def routing(values: dict, bias_E) -> dict:
    """{figure: [E], [B] or a number} of a layer of experts that tokens choose (analysis/routing.py)."""
    s_BLE, chosen_BLk = values["router_probabilities"], values["chosen"]
    E, k = s_BLE.shape[-1], chosen_BLk.shape[-1]
    p_BLE = s_BLE / s_BLE.sum(-1, keepdims=True)
    load_E = np.array([(chosen_BLk == e).mean() for e in range(E)])
    ranked = np.sort(s_BLE + bias_E)[..., ::-1]
    both = np.array([[((chosen_BLk == a).any(-1) & (chosen_BLk == b).any(-1)).sum() for b in range(E)] for a in range(E)])
    figures = {"load": load_E, "busiest": E * load_E.max(), "mass": p_BLE.mean((0, 1))}
    figures |= {"entropy": -(p_BLE * np.log(p_BLE)).sum(-1).mean(1), "margin": (ranked[..., k - 1] - ranked[..., k]).mean(1)}
    return figures | {"together": both / np.maximum(np.diag(both)[:, None], 1)}


def panel(p: Pass, repeated: Pass) -> dict[str, list[float]]:
    """{figure: a number for each layer} of pages/panel.py. repeated: a pass over rows whose halves are equal."""
    half = repeated.tokens_BL.shape[1] // 2
    second = np.arange(half, 2 * half)
    collected: dict[str, list[float]] = {}
    for number, block, _ in p.layers():
        of_layer = {}
        for name in block.sublayers:
            at = f"blocks.{number}.{name}."
            of_layer[name] = {tap.removeprefix(at): value for tap, value in p.values.items() if tap.startswith(at)}
        feed_forwards = [values for name, values in of_layer.items() if name != "attention"]
        heads = attention(of_layer["attention"], block.attention.sink != "none")
        along = geometry(of_layer["attention"], None)["projected"]
        w_BHLS = repeated.values[f"blocks.{number}.attention.weights"]
        row = {"attention_entropy": heads["entropy"].mean(), "first_token": heads["first"].mean()}
        row |= {"previous_token": heads["previous"].mean(0).max(), "along_ones": along.mean()}
        row["induction"] = w_BHLS[:, :, second, second - half + 1].mean((0, 2)).max()
        if any("coefficients" in each for each in feed_forwards):
            row["positive_coefficients"] = np.mean([(each["coefficients"] > 0).mean() for each in feed_forwards])
        if any("chosen" in each for each in feed_forwards):
            row["router_entropy"] = np.mean([routing(each, 0.0)["entropy"].mean() for each in feed_forwards])
        row["lens_agreement"] = lens(p)["agreement"][:, number].mean()
        for name, value in row.items():
            collected.setdefault(name, []).append(float(value))
    return collected
