"""Mixture of experts. y = sum_i g_i expert_i(x) + shared(x) over the k experts with the highest s + b. Softmax gates,
renormalised: Jiang et al. 2024, sec. 2.1; sigmoid and b: DeepSeek-V3 2024, eq. 12-16. An expert without free slots takes no
more tokens. Balance loss: Fedus et al. 2021, eq. 4-6, E sum_e f_e P_e, where f_e is the share of choices of expert e. Router
z-loss: Zoph et al. 2022, eq. 5, mean logsumexp(z)^2. Both losses are means over a sequence's tokens without padding (segment
0), times the number of these tokens."""

import math

import numpy as np

from tests.reference.feed_forward import dense, feed_forward
from tests.reference.norms import softmax
from tests.reference.records import at, record
from tests.variants.case import FeedForwardCase, Parameter
from tests.variants.parameters import DOWN, UP, biases, down, inputs, up


def expert(p, e, kind, x, kept):
    """What expert e makes of x. kept: {name: value} gets its hidden units."""
    record_ = lambda name, value: kept.setdefault(name, value)  # noqa: E731
    kernels = (p[name][e] if name in p else None for name in ("up", "gate", "down"))
    biases = [p[f"{name}_bias"][e] if f"{name}_bias" in p else 0 for name in ("up", "gate", "down")]
    return feed_forward(*kernels, kind, x, biases, record=record_)


def scores(moe, z_LE):
    return softmax(z_LE) if moe.scores == "softmax" else 1 / (1 + np.exp(-z_LE))


def mixture(p, x_LD, options, block, segments, model):
    moe = options.moe
    real = np.asarray(segments) > 0
    z_LE = record("router_logits", x_LD @ p["router"]["kernel"] + p["router"].get("bias", 0))
    s_LE = record("router_probabilities", scores(moe, z_LE))
    free_E = np.full(moe.experts, math.ceil(moe.capacity * moe.top_k * model.max_length / moe.experts) or len(x_LD))
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


MOE = "block/feed_forward/"
EXPERTS = {"up": up, "gate": up, "down": down}
CASES = [
    FeedForwardCase(
        "moe",
        mixture,
        parameters={
            **{f"{MOE}experts/{name}": Parameter(initial, "bbio") for name, initial in EXPERTS.items()},
            **{f"{MOE}experts/{name}_bias": Parameter(0.0) for name in EXPERTS},
            **{f"{MOE}shared/{name}/kernel": DOWN if name == "down" else UP for name in EXPERTS},
            **biases(f"{MOE}shared/up", f"{MOE}shared/down", f"{MOE}router"),
            f"{MOE}router/kernel": Parameter(inputs, "bio"),
            f"{MOE}router_bias": Parameter(0.0),
        },
        values={
            "feed_forward.moe.experts": "size",
            "feed_forward.moe.top_k": [1],
            "feed_forward.moe.capacity": [0.125],  # 2 of 64 tokens for each expert: most of a contract's 8 are dropped
            "feed_forward.moe.shared": [2],
            "feed_forward.moe.expert": ["relu", "geglu"],
            "feed_forward.moe.bias": [("router", "experts"), ("experts",)],
            "feed_forward.moe.routing": "covered",
        },
        needs_of={
            "feed_forward.moe.bias=('experts',)": {
                "feed_forward.moe.capacity": 0.5,
                "feed_forward.moe.shared": 1,
                "feed_forward.moe.expert": "relu",
            },
            "feed_forward.moe.top_k=1": {"feed_forward.moe.renormalise": False},
            "feed_forward.moe.balance=bias": {"feed_forward.moe.scores": "sigmoid"},  # DeepSeek-V3
        },
    )
]
