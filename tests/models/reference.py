"""The model in NumPy float64, written from the papers' equations and not from our code: slow, plain, in loops.

`p` is a nested dict of arrays as `transformer.init` gives it, one layer's worth. Sequences stand one by one.
"""

import math

import numpy as np


def softmax(x):
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


# Norms. Ba et al. 2016, eq. 3-4; Zhang & Sennrich 2019, eq. 4. An absent gain is 1, an absent bias 0.


def layer_norm(p, x, epsilon):
    y = (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + epsilon)
    return y * p.get("gain", 1) + p.get("bias", 0)


def rms_norm(p, x, epsilon):
    return x / np.sqrt((x * x).sum(-1, keepdims=True) / x.shape[-1] + epsilon) * p.get("gain", 1)


NORMS = {"layer": layer_norm, "rms": rms_norm, "none": lambda p, x, epsilon: x}


# Positions. Vaswani et al. 2017, sec. 3.5; Su et al. 2021, eq. 34 as complex numbers, dimension i paired with i + K/2.


def sinusoidal(positions, width):
    table = np.zeros((len(positions), width))
    for row, position in enumerate(positions):
        for i in range(width):
            angle = position / 10_000 ** (2 * (i // 2) / width)
            table[row, i] = math.cos(angle) if i % 2 else math.sin(angle)
    return table


def rope(x_LK, positions, theta):
    half = x_LK.shape[-1] // 2
    turns = np.exp(1j * np.outer(positions, theta ** (-2.0 * np.arange(half) / (2 * half))))
    z = (x_LK[:, :half] + 1j * x_LK[:, half:]) * turns
    return np.concatenate([z.real, z.imag], -1)


# Attention. Vaswani et al. 2017, eq. 1; query head h reads key-value head h // (H / G) (Ainslie et al. 2023). Persistent
# memory as in the code of Sukhbaatar et al. 2019: slots sqrt(K) * key and sqrt(M) * value join the softmax, unrotated.


def attention(p, x_LD, config, positions, segments):
    query, key, value, output = (p[name] for name in ("query", "key", "value", "output"))
    L, (_, H, K), G = len(x_LD), query["kernel"].shape, key["kernel"].shape[1]
    allowed = np.array([[s <= t and segments[s] == segments[t] for s in range(L)] for t in range(L)])

    def project(part, head):
        y = x_LD @ part["kernel"][:, head]
        return y + part["bias"][head] if "bias" in part else y

    y_LD = np.zeros((L, output["kernel"].shape[-1]))
    for h in range(H):
        g = h // (H // G)
        q, k, v = project(query, h), project(key, g), project(value, g)
        if config.position == "rope":
            q, k = rope(q, positions, config.rope_theta), rope(k, positions, config.rope_theta)
        scores = np.where(allowed, q @ k.T, -np.inf)
        if "memory" in p:
            M = len(p["memory"]["key"])
            scores = np.concatenate([scores, q @ (math.sqrt(K) * p["memory"]["key"][:, g]).T], -1)
            v = np.concatenate([v, math.sqrt(M) * p["memory"]["value"][:, g]])
        y_LD += softmax(scores / math.sqrt(K)) @ v @ output["kernel"][h]
    return y_LD + output["bias"] if "bias" in output else y_LD


# Feed-forward. Vaswani et al. 2017, eq. 2; Hendrycks & Gimpel 2016 (both forms of GELU); Shazeer 2020, eq. 6.

ACTIVATIONS = {
    "relu": lambda x: np.where(x > 0, x, 0),
    "gelu": lambda x: x * np.vectorize(lambda t: 0.5 * math.erfc(-t / math.sqrt(2)))(x),
    "gelu_tanh": lambda x: 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))),
    "swiglu": lambda x: x / (1 + np.exp(-x)),
}


def feed_forward(up, gate, down, kind, x, biases=(0, 0, 0)):
    if kind == "swiglu":
        return (ACTIVATIONS[kind](x @ gate + biases[1]) * (x @ up + biases[0])) @ down + biases[2]
    return ACTIVATIONS[kind](x @ up + biases[0]) @ down + biases[2]


def dense(p, x_LD, config):
    kernels, biases = ([p.get(name, {}).get(what, 0) for name in ("up", "gate", "down")] for what in ("kernel", "bias"))
    return feed_forward(*kernels, config.kind, x_LD, biases)


# Mixture of experts. y = sum_i g_i expert_i(x) + shared(x) over the k experts with the highest s + b. Softmax gates over
# their sum: Jiang et al. 2024, sec. 2.1; sigmoid and b: DeepSeek-V3 2024, eq. 12-16; an expert that has taken `room`
# tokens takes no more. Fedus et al. 2021, eq. 4-6: E sum_e f_e P_e, f_e the share of choices that fall on e. Zoph et al.
# 2022, eq. 5: mean logsumexp(z)^2. Both are means over a sequence's tokens (padding, segment 0, left out), times the
# number of those tokens.


def expert(p, e, kind, x):
    return feed_forward(p["up"][e], p["gate"][e] if "gate" in p else None, p["down"][e], kind, x)


def scores(moe, z_LE):
    return softmax(z_LE) if moe.scores == "softmax" else 1 / (1 + np.exp(-z_LE))


def mixture(p, x_LD, config, segments, max_length):
    moe, real = config.moe, np.asarray(segments) > 0
    z_LE = x_LD @ p["router"]["kernel"]
    s_LE = scores(moe, z_LE)
    room_E = np.full(moe.experts, math.ceil(moe.capacity * moe.top_k * max_length / moe.experts) or len(x_LD))
    y_LD, chosen_LE = np.zeros_like(x_LD), np.zeros_like(z_LE)
    for t, s_E in enumerate(s_LE):
        top = np.argsort(-(s_E + p.get("router_bias", 0)))[: moe.top_k]
        for e in top:
            if room_E[e] > 0:
                gate = s_E[e] / s_E[top].sum() if moe.renormalise else s_E[e]
                y_LD[t] += gate * expert(p["experts"], e, moe.expert, x_LD[t])
            room_E[e] -= real[t]
            chosen_LE[t, e] = 1 / moe.top_k
    if moe.shared:
        y_LD += feed_forward(*(p["shared"].get(n, {}).get("kernel") for n in ("up", "gate", "down")), moe.expert, x_LD)
    f_E, P_E = chosen_LE[real].mean(0), (s_LE / s_LE.sum(-1, keepdims=True))[real].mean(0)
    losses = {"router_z_loss": moe.z_loss * (np.log(np.exp(z_LE[real]).sum(-1)) ** 2).sum()}
    if moe.balance == "loss":
        losses["balance_loss"] = real.sum() * moe.balance_loss * moe.experts * (f_E * P_E).sum()
    return y_LD, losses


# Expert choice. Zhou et al. 2022, sec. 3.2: S = softmax(X W_g), each expert takes the C tokens with its highest S.


def expert_choice(p, x_LD, config):
    moe, s_LE = config.moe, scores(config.moe, x_LD @ p["router"]["kernel"])
    y_LD, C = np.zeros_like(x_LD), math.ceil(moe.capacity * moe.top_k * len(x_LD) / moe.experts)
    for e in range(moe.experts):
        for t in np.argsort(-s_LE[:, e])[:C]:
            y_LD[t] += s_LE[t, e] * expert(p["experts"], e, moe.expert, x_LD[t])
    return y_LD


# Layouts: what each name stands for, with a attention, f the feed-forward and n[site] the norm at a site.


def _pre_norm(x, a, f, n):
    x = x + a(n["attention_in"](x))
    return x + f(n["feed_forward_in"](x))


def _post_norm(x, a, f, n):
    x = n["attention_post"](x + a(x))
    return n["feed_forward_post"](x + f(x))


def _peri_norm(x, a, f, n):
    x = x + n["attention_out"](a(n["attention_in"](x)))
    return x + n["feed_forward_out"](f(n["feed_forward_in"](x)))


def _no_norm_between(x, a, f, n):
    x = x + a(n["attention_in"](x))
    return x + f(x)


LAYOUTS = {
    "pre_norm": _pre_norm,
    "post_norm": _post_norm,
    "peri_norm": _peri_norm,
    "parallel": lambda x, a, f, n: x + a(n["attention_in"](x)) + f(n["feed_forward_in"](x)),
    "no_norm_between": _no_norm_between,
    "all_attention": lambda x, a, f, n: n["attention_post"](x + a(x)),
}


def block(p, x_LD, config, positions, segments, max_length):
    """x_LD after one block, and its auxiliary losses."""
    losses = {}

    def attend(x):
        return attention(p["attention"], x, config.attention, positions, segments)

    def feed(x):
        if config.feed_forward.kind != "moe":
            return dense(p["feed_forward"], x, config.feed_forward)
        y, more = mixture(p["feed_forward"], x, config.feed_forward, segments, max_length)
        losses.update(more)
        return y

    def norm(site):
        name, place = site.rsplit("_", 1)
        kind = getattr(config.norms, site) or config.norm
        return lambda x: NORMS[kind](p.get(f"{name}_norm_{place}", {}), x, config.norm_epsilon)

    return LAYOUTS[config.layout](x_LD, attend, feed, {site: norm(site) for site in vars(config.norms)}), losses


def model(config, params, tokens, positions=None, segments=None):
    """Logits [L, V] of one sequence of token ids, and its auxiliary losses summed over layers."""
    positions = np.arange(len(tokens)) if positions is None else positions
    segments = np.ones(len(tokens)) if segments is None else segments
    epsilon, losses = config.blocks[config.pattern[0]].norm_epsilon, {}
    x_LD = params["embed"]["table"][tokens]
    if config.position == "learned":
        x_LD = x_LD + params["position"]["table"][positions]
    if config.position == "sinusoidal":
        x_LD = x_LD + sinusoidal(positions, config.width)
    x_LD = NORMS[config.embedding_norm](params.get("embedding_norm", {}), x_LD, epsilon)
    for layer in range(config.depth):
        repeat, place = divmod(layer, len(config.pattern))
        name = config.pattern[place]
        stack = name if config.pattern.count(name) == 1 else f"{name}_{place}"
        p = pick(params["blocks"][stack], repeat)
        x_LD, more = block(p, x_LD, config.blocks[name], positions, segments, config.max_length)
        losses = {key: losses.get(key, 0) + more.get(key, 0) for key in losses | more}
    x_LD = NORMS[config.final_norm](params.get("final_norm", {}), x_LD, epsilon)
    return x_LD @ params["embed" if config.tie_embeddings else "head"]["table"].T, losses


def pick(tree, index):
    """Layer `index` of a stack of layers."""
    return {k: pick(v, index) if isinstance(v, dict) else np.asarray(v[index], np.float64) for k, v in tree.items()}
