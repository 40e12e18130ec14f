"""The feed-forward layers of the NumPy reference, and mixtures of experts.

Float64, written from the papers' equations and not from our code. `p` holds the parameters of one layer. Each function
takes one sequence.
"""

import math

import numpy as np

from tests.reference.norms import ELEMENTWISE, NORMS, gelu, gelu_tanh, logistic, softmax
from tests.reference.records import at, record

# Feed-forward layers. Vaswani et al. 2017, eq. 2; Hendrycks & Gimpel 2016 (both forms of GELU); Shazeer 2020, eq. 6; So
# et al. 2021 (ReLU^2); Elhage et al. 2022 (SoLU, followed by a LayerNorm). Activations in GATED act on the gate.


PLAIN = {
    **ELEMENTWISE,
    "softmax": softmax,
    "solu": lambda x: x * softmax(x),
}
GATED = {
    "glu": logistic,
    "bilinear": lambda x: x,
    "reglu": PLAIN["relu"],
    "geglu": gelu,
    "geglu_tanh": gelu_tanh,
    "swiglu": PLAIN["swish"],
    "swiglu_clamped": lambda x: np.minimum(x, 7) * logistic(1.702 * np.minimum(x, 7)),  # gpt-oss, OpenAI 2025, its code
}
MULTIPLIERS = {"swiglu_clamped": lambda x: np.clip(x, -7, 7) + 1}  # others are x
ACTIVATIONS = PLAIN | GATED


def feed_forward(up, gate, down, kind, x, biases=(0, 0, 0), norm=None, record=record):
    if kind in GATED:
        z = record("pre_activation", x @ gate + biases[1])
        multiplier = MULTIPLIERS.get(kind, lambda x: x)
        h = record("hidden", GATED[kind](z) * multiplier(record("multiplier", x @ up + biases[0])))
        return record("coefficients", h) @ down + biases[2]
    z = record("pre_activation", x @ up + biases[0])
    h = record("hidden", PLAIN[kind](z))
    if norm:  # SoLU without its denominator: a factor per token, which the norm cancels
        h = norm(z * np.exp(z - z.max(-1, keepdims=True)))
    return record("coefficients", h) @ down + biases[2]


def dense(p, x_LD, kind, epsilon=0.0):
    kernels, biases = ([p.get(name, {}).get(part, 0) for name in ("up", "gate", "down")] for part in ("kernel", "bias"))
    norm = (lambda h: NORMS["layer"](p["hidden_norm"], h, epsilon)) if kind == "solu" else None
    return feed_forward(*kernels, kind, x_LD, biases, norm)


# Mixture of experts. y = sum_i g_i expert_i(x) + shared(x) over the k experts with the highest s + b. Softmax gates,
# renormalised: Jiang et al. 2024, sec. 2.1; sigmoid and b: DeepSeek-V3 2024, eq. 12-16. An expert without free slots
# takes no more tokens. Balance loss: Fedus et al. 2021, eq. 4-6, E sum_e f_e P_e, where f_e is the share of choices of
# expert e. Router z-loss: Zoph et al. 2022, eq. 5, mean logsumexp(z)^2. Both losses are means over a sequence's tokens
# without padding (segment 0), times the number of these tokens.


def expert(p, e, kind, x, kept):
    """What expert e makes of x. kept: {name: value} gets its hidden units."""
    record_ = lambda name, value: kept.setdefault(name, value)  # noqa: E731
    kernels = (p[name][e] if name in p else None for name in ("up", "gate", "down"))
    biases = [p[f"{name}_bias"][e] if f"{name}_bias" in p else 0 for name in ("up", "gate", "down")]
    return feed_forward(*kernels, kind, x, biases, record=record_)


def scores(moe, z_LE):
    return softmax(z_LE) if moe.scores == "softmax" else 1 / (1 + np.exp(-z_LE))


def mixture(p, x_LD, config, segments, max_length):
    moe = config.moe
    real = np.asarray(segments) > 0
    z_LE = record("router_logits", x_LD @ p["router"]["kernel"] + p["router"].get("bias", 0))
    s_LE = record("router_probabilities", scores(moe, z_LE))
    free_E = np.full(moe.experts, math.ceil(moe.capacity * moe.top_k * max_length / moe.experts) or len(x_LD))
    top_Lk = record("chosen", np.argsort(-(s_LE + p.get("router_bias", 0)), -1)[:, : moe.top_k])
    gates_Lk = np.take_along_axis(s_LE, top_Lk, -1)
    gates_Lk = gates_Lk / gates_Lk.sum(-1, keepdims=True) if moe.renormalise else gates_Lk
    y_LD, chosen_LE = np.zeros_like(x_LD), np.zeros_like(z_LE)
    dropped_Lk, hidden = np.zeros(top_Lk.shape, bool), []
    for t in range(len(x_LD)):
        for k, e in enumerate(top_Lk[t]):
            hidden.append({})
            y_D = expert(p["experts"], e, moe.expert, x_LD[t], hidden[-1])
            dropped_Lk[t, k] = real[t] and free_E[e] <= 0
            gates_Lk[t, k] *= not dropped_Lk[t, k] and (real[t] or not moe.capacity)  # padding takes no room
            y_LD[t] += gates_Lk[t, k] * y_D
            free_E[e] -= real[t]
            chosen_LE[t, e] = 1 / moe.top_k
    record("dropped", dropped_Lk)
    record("gates", gates_Lk)
    for name in hidden[0]:
        record(name, np.stack([each[name] for each in hidden]).reshape(*top_Lk.shape, -1))
    if moe.shared:
        with at("shared"):
            y_LD += dense(p["shared"], x_LD, moe.expert)
    f_E = chosen_LE[real].mean(0)
    P_E = (s_LE / s_LE.sum(-1, keepdims=True))[real].mean(0)
    losses = {"router_z_loss": moe.z_loss * (np.log(np.exp(z_LE[real]).sum(-1)) ** 2).sum()}
    if moe.balance == "loss":
        losses["balance_loss"] = real.sum() * moe.balance_loss * moe.experts * (f_E * P_E).sum()
    return y_LD, losses


# Expert choice. Zhou et al. 2022, sec. 3.2: S = softmax(X W_g); each expert takes the C tokens with its highest S.


def expert_choice(p, x_LD, config):
    moe = config.moe
    s_LE = scores(config.moe, x_LD @ p["router"]["kernel"] + p["router"].get("bias", 0))
    y_LD = np.zeros_like(x_LD)
    C = math.ceil(moe.capacity * moe.top_k * len(x_LD) / moe.experts)
    for e in range(moe.experts):
        for t in np.argsort(-s_LE[:, e])[:C]:
            y_LD[t] += s_LE[t, e] * expert(p["experts"], e, moe.expert, x_LD[t], {})
    return y_LD


# {kind: a function of (parameters, x, options, those of the block, segment ids, options of the model) that returns y and the
# auxiliary losses}
FEED_FORWARDS = {
    **{kind: lambda p, x, options, block, *_: (dense(p, x, options.kind, block.norm_epsilon), {}) for kind in ACTIVATIONS},
    "moe": lambda p, x, options, _, segments, model: mixture(p, x, options, segments, model.max_length),
}
