"""The model in NumPy float64, written from the papers' equations and not from our code: slow, plain, in loops.

`p` is a nested dict of arrays as `transformer.init` gives it, one layer's worth. Sequences stand one by one.
"""

import math

import numpy as np


def softmax(x):
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


# Norms. Ba et al. 2016, eq. 3-4; Zhang & Sennrich 2019, eq. 4; Brody et al. 2023, eq. 3 (projection onto what is
# orthogonal to ones, then length sqrt(d)); Zhu et al. 2025, eq. 1. An absent gain is 1, an absent bias 0.


def layer_norm(p, x, epsilon):
    return (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + epsilon)


def rms_norm(p, x, epsilon):
    return x / np.sqrt((x * x).sum(-1, keepdims=True) / x.shape[-1] + epsilon)


def project(p, x, epsilon):
    d = x.shape[-1]
    return x @ (np.eye(d) - np.ones((d, d)) / d)


KINDS = {
    "layer": layer_norm,
    "rms": rms_norm,
    "scale": rms_norm,
    "project": project,
    "dyt": lambda p, x, epsilon: np.tanh(p["alpha"] * x),
    "none": lambda p, x, epsilon: x,
}
NORMS = {
    kind: lambda p, x, epsilon, norm=norm: norm(p, x, epsilon) * p.get("gain", 1) + p.get("bias", 0)
    for kind, norm in KINDS.items()
}


# Positions. Vaswani et al. 2017, sec. 3.5; Su et al. 2021, eq. 34 as complex numbers, dimension i paired with i + K/2.


def sinusoidal(positions, width):
    table = np.zeros((len(positions), width))
    for row, position in enumerate(positions):
        for i in range(width):
            angle = position / 10_000 ** (2 * (i // 2) / width)
            table[row, i] = math.cos(angle) if i % 2 else math.sin(angle)
    return table


def rope(x_LK, positions, config):
    """The first `fraction` of the dimensions. Llama 3.1's stretching as in the model's published code, by wavelength."""
    size = round(x_LK.shape[-1] * config.fraction)
    half, frequencies = size // 2, []
    for i in range(size // 2):
        frequency = config.theta ** (-2.0 * i / size)
        wavelength = 2 * math.pi / frequency
        if config.scaling == "linear":
            frequency /= config.factor
        if config.scaling == "llama3" and wavelength > config.original_length / config.high_frequency:
            smooth = config.original_length / wavelength - config.low_frequency
            smooth = max(smooth / (config.high_frequency - config.low_frequency), 0)
            frequency = (1 - smooth) * frequency / config.factor + smooth * frequency
        frequencies.append(frequency)
    z = (x_LK[:, :half] + 1j * x_LK[:, half:size]) * np.exp(1j * np.outer(positions, frequencies))
    return np.concatenate([z.real, z.imag, x_LK[:, size:]], -1)


# What is added to logits, head h, t - s = d. Press et al. 2022, sec. 3; Raffel et al. 2020, sec. 2.1; the relative key of
# Sukhbaatar et al. 2019, one for all heads; the mask of an adaptive span (2019a, eq. 2) as its logarithm.


def alibi(h, heads):
    if heads & (heads - 1) == 0:
        return 2 ** (-8 * (h + 1) / heads)
    power = 2 ** int(math.log2(heads))
    return alibi(h, power) if h < power else alibi(2 * (h - power), 2 * power)


def t5_bucket(d, buckets, farthest):
    exact = buckets // 2
    if d < exact:
        return max(d, 0)
    return min(exact + int(math.log(d / exact) / math.log(farthest / exact) * (buckets - exact)), buckets - 1)


def logit_bias(p, shared, config, longest, q, h, t, s):
    d, bias = t - s, 0.0
    x = d - (not config.sees_itself)  # steps back from the nearest token seen
    if config.position == "alibi":
        bias -= alibi(h, config.heads) * d
    if config.position == "t5":
        bias += shared["relative_bias"][t5_bucket(d, config.t5_buckets, config.t5_distance), h]
    if config.position == "relative_key":
        bias += q @ shared["relative_key"][x] * scale(config, len(q))
    if config.span == "adaptive":
        m = min(max((p["span"]["fraction"][h] * longest - x) / config.span_ramp + 1, 0), 1)
        bias += math.log(m) if m > 0 else -np.inf
    return bias


# Attention. Vaswani et al. 2017, eq. 1; query head h reads key-value head h // (H / G) (Ainslie et al. 2023). An absent
# matrix is the identity, on a head's slice of x or on all of it; merged: logits x_t W_h x_s. Persistent memory as in the
# code of Sukhbaatar et al. 2019: slots sqrt(K) * key and sqrt(M) * value join the softmax, unrotated. Shaped attention:
# He & Hofmann 2023, eq. 5, aI + bA - cC.


def scale(config, size):
    return config.scale or 1 / math.sqrt(config.head_size if config.query == "merged" else size)


def head_of(part, kind, x_LD, head, size):
    if part is None:
        return x_LD if kind == "identity_whole" else x_LD[:, head * size : (head + 1) * size]
    head = head if part["kernel"].shape[1] > 1 else 0
    return x_LD @ part["kernel"][:, head] + (part["bias"][head] if "bias" in part else 0)


def attention(p, x_LD, config, positions, segments, shared, longest, epsilon):
    L, H, G, reach = len(x_LD), config.heads, config.kv_heads, config.window or 10**9
    nearest, o = int(not config.sees_itself), []
    allowed = np.array([[segments[s] == segments[t] and nearest <= t - s < nearest + reach for s in range(L)]
                        for t in range(L)])  # fmt: skip
    slots = p.get("memory")
    for h in range(H):
        g = h // (H // G)
        q = head_of(p.get("query"), config.query, x_LD, h, config.head_size)
        k = raw = head_of(p.get("key"), config.key, x_LD, g, config.head_size)
        v = raw if config.value == "key" else head_of(p.get("value"), config.value, x_LD, g, config.head_size)
        if config.qk_norm != "none":
            q, k = (NORMS[config.qk_norm](p.get(f"{n}_norm", {}), x, epsilon) for n, x in (("query", q), ("key", k)))
        if config.position == "rope":
            q, k = rope(q, positions, config.rope), rope(k, positions, config.rope)
        bias = np.array([[logit_bias(p, shared, config, longest, q[t], h, t, s) if allowed[t, s] else 0 for s in range(L)]
                         for t in range(L)])  # fmt: skip
        scores = np.where(allowed, q @ k.T * scale(config, q.shape[1]) + bias, -np.inf)
        if slots:
            key, value = (x[:, g if x.shape[1] > 1 else 0] for x in (slots["key"], slots["value"]))
            scores = np.concatenate([scores, q @ (math.sqrt(q.shape[1]) * key).T * scale(config, q.shape[1])], -1)
            v = np.concatenate([v, math.sqrt(len(value)) * value])
        w = np.array([softmax(row) if np.isfinite(row).any() else 0 * allowed[0] for row in scores])
        if config.shaping != "none":
            a, b, c = (p["shaping"].get(n, np.zeros(H))[h] for n in ("identity", "weights", "uniform"))
            w = a * np.eye(L) + b * w - c * allowed / np.maximum(allowed.sum(-1, keepdims=True), 1)
        o.append(w @ v)
    if "output" not in p:
        return np.concatenate(o, -1)
    return sum(o[h] @ p["output"]["kernel"][h] for h in range(H)) + p["output"].get("bias", 0)


# Lambda layer. Bello 2021, sec. 3.1-3.2 (eq. of the multi-query lambda layer, intra-depth in app. C), its context cut to
# the tokens up to n and its embeddings to the distances that there are; norms of queries and values token by token.


def lambda_layer(p, x_LD, block, positions, segments, shared, longest):
    def project(name, i):
        y = x_LD @ p[name]["kernel"][:, i]
        scaling = {"query": "query_scaling", "lambda_value": "value_scaling"}.get(name)
        return NORMS[block.attention.lambdas.norm](p.get(scaling, {}), y, block.norm_epsilon) if scaling else y

    parts = {
        "query": block.attention.heads,
        "lambda_key": len(p["distances"][0]),
        "lambda_value": len(p["distances"][0]),
    }
    return mix_by_lambdas(
        *([project(name, i) for i in range(n)] for name, n in parts.items()), p["distances"], segments
    )


def mix_by_lambdas(q, k, v, distances, segments):
    """y [L, H V] from lists of queries [L, K] by head, of keys [L, K] and values [L, V] by depth, and [R, U, K]."""
    L, depths, y = len(q[0]), range(len(k)), []
    for n in range(L):
        seen = [m for m in range(n + 1) if segments[m] == segments[n]]
        content = sum(softmax(k[u][seen].T) @ v[u][seen] for u in depths)
        near = [m for m in seen if n - m < len(distances)]
        position = sum(np.outer(distances[n - m, u], v[u][m]) for u in depths for m in near)
        y.append(np.concatenate([(content + position).T @ head[n] for head in q]))
    return np.array(y)


ATTENTIONS = {
    "softmax": lambda p, x, block, *places: attention(p, x, block.attention, *places, block.norm_epsilon),
    "lambda": lambda_layer,
}


# Feed-forward. Vaswani et al. 2017, eq. 2; Hendrycks & Gimpel 2016 (both forms of GELU); Shazeer 2020, eq. 6; So et al.
# 2021 (ReLU^2); Elhage et al. 2022 (SoLU, LayerNorm after it). GATED: which act on the gate and multiply.


def logistic(x):
    return 1 / (1 + np.exp(-x))


def gelu(x):
    return x * np.vectorize(lambda t: 0.5 * math.erfc(-t / math.sqrt(2)))(x)


def gelu_tanh(x):
    return 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


PLAIN = {
    "relu": lambda x: np.where(x > 0, x, 0),
    "relu2": lambda x: np.where(x > 0, x * x, 0),
    "gelu": gelu,
    "gelu_tanh": gelu_tanh,
    "swish": lambda x: x * logistic(x),
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
}
ACTIVATIONS = PLAIN | GATED


def feed_forward(up, gate, down, kind, x, biases=(0, 0, 0), norm=None):
    if kind in GATED:
        return (GATED[kind](x @ gate + biases[1]) * (x @ up + biases[0])) @ down + biases[2]
    h = PLAIN[kind](x @ up + biases[0])
    return (norm(h) if norm else h) @ down + biases[2]


def dense(p, x_LD, config, epsilon):
    kernels, biases = ([p.get(name, {}).get(what, 0) for name in ("up", "gate", "down")] for what in ("kernel", "bias"))
    norm = (lambda h: NORMS["layer"](p["hidden_norm"], h, epsilon)) if config.kind == "solu" else None
    return feed_forward(*kernels, config.kind, x_LD, biases, norm)


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


# Layouts: what each name stands for, with a attention, f the feed-forward, n[site] the norm at a site, b the trained gain
# and N the depth. Each gives x and what its sublayers have written.


def _pre_norm(x, a, f, n, b, N):
    y = a(n["attention_in"](x))
    z = f(n["feed_forward_in"](x + y))
    return x + y + z, y + z


def _post_norm(x, a, f, n, b, N, alpha=1.0):
    y = a(x)
    x = n["attention_post"](alpha * x + y)
    z = f(x)
    return n["feed_forward_post"](alpha * x + z), y + z


def _peri_norm(x, a, f, n, b, N):
    y = n["attention_out"](a(n["attention_in"](x)))
    z = n["feed_forward_out"](f(n["feed_forward_in"](x + y)))
    return x + y + z, y + z


def _no_norm_between(x, a, f, n, b, N):
    y = a(n["attention_in"](x))
    z = f(x + y)
    return x + y + z, y + z


def _parallel(x, a, f, n, b, N):
    h = n["attention_in"](x)
    return x + a(h) + f(h), a(h) + f(h)


def _parallel_two_norms(x, a, f, n, b, N):
    y = a(n["attention_in"](x)) + f(n["feed_forward_in"](x))
    return x + y, y


def _fused_output(x, a, f, n, b, N):
    y = f(a(n["attention_in"](x)))
    return x + y, y


def _skipless(x, a, f, n, b, N):
    y = a(n["attention_in"](x))
    z = b * f(n["feed_forward_in"](y))
    return y + z, y + z


def _skipless_parallel(x, a, f, n, b, N):
    h = n["attention_in"](x)
    return a(h) + b * f(h), a(h) + b * f(h)


def _all_attention(x, a, f, n, b, N):
    return n["attention_post"](x + a(x)), a(x)


LAYOUTS = {
    "pre_norm": _pre_norm,
    "post_norm": _post_norm,
    "peri_norm": _peri_norm,
    "sandwich_norm": _peri_norm,
    "parallel": _parallel,
    "parallel_two_norms": _parallel_two_norms,
    "no_norm_between": _no_norm_between,
    "fused_output": _fused_output,
    "skipless": _skipless,
    "skipless_parallel": _skipless_parallel,
    "all_attention": _all_attention,
    "deep_norm": lambda x, a, f, n, b, N: _post_norm(x, a, f, n, b, N, alpha=(2 * N) ** 0.25),
    "resi_dual": _post_norm,
}


def block(p, x_LD, config, positions, segments, model_config, shared):
    """x_LD after one block, what its sublayers have written, and its auxiliary losses."""
    losses, longest, real = {}, config.attention.window or model_config.max_length, np.asarray(segments) > 0

    def attend(x):
        if config.attention.span == "adaptive":
            mean = np.mean(p["attention"]["span"]["fraction"]) * longest
            losses["span_loss"] = config.attention.span_loss * mean * real.sum()
        attend = ATTENTIONS[config.attention.kind]
        return attend(p["attention"], x, config, positions, segments, shared, longest)

    def feed(x):
        if config.feed_forward.kind != "moe":
            return dense(p["feed_forward"], x, config.feed_forward, config.norm_epsilon)
        y, more = mixture(p["feed_forward"], x, config.feed_forward, segments, model_config.max_length)
        losses.update(more)
        return y

    def norm(site):
        name, place = site.rsplit("_", 1)
        kind = getattr(config.norms, site) or config.norm
        return lambda x: NORMS[kind](p.get(f"{name}_norm_{place}", {}), x, config.norm_epsilon)

    norms = {site: norm(site) for site in vars(config.norms)}
    gain = p.get("feed_forward_gain", 1.0)
    x_LD, written = LAYOUTS[config.layout](x_LD, attend, feed, norms, gain, model_config.depth)
    return x_LD, written, losses


def model(config, params, tokens, positions=None, segments=None):
    """Logits [L, V] of one sequence of token ids, and its auxiliary losses summed over layers."""
    positions = np.arange(len(tokens)) if positions is None else positions
    segments = np.ones(len(tokens)) if segments is None else segments
    epsilon, losses = config.blocks[config.pattern[0]].norm_epsilon, {}
    factor = {"none": 1, "sqrt_width": math.sqrt(config.width), "learned": params.get("embedding_scale")}
    x_LD = params["embed"]["table"][tokens] * factor[config.embedding_scale]
    if config.position == "learned":
        x_LD = x_LD + params["position"]["table"][positions]
    if config.position == "sinusoidal":
        x_LD = x_LD + sinusoidal(positions, config.width)
    total = x_LD = NORMS[config.embedding_norm](params.get("embedding_norm", {}), x_LD, epsilon)
    for layer in range(config.depth):
        repeat, place = divmod(layer, len(config.pattern))
        name = config.pattern[place]
        stack = name if config.pattern.count(name) == 1 else f"{name}_{place}"
        p = pick(params["blocks"][stack], repeat)
        x_LD, written, more = block(p, x_LD, config.blocks[name], positions, segments, config, params.get("shared", {}))
        total = total + written
        losses = {key: losses.get(key, 0) + more.get(key, 0) for key in losses | more}
    final = lambda x: NORMS[config.final_norm](params.get("final_norm", {}), x, epsilon)  # noqa: E731
    # ResiDual (Xie et al. 2023, eq. 3): the post-norm stream plus the norm of the sum of all that was written.
    dual = any(b.layout == "resi_dual" for b in config.blocks.values())
    x_LD = x_LD + final(total) if dual else final(x_LD)
    return x_LD @ params["embed" if config.tie_embeddings else "head"]["table"].T, losses


def pick(tree, index):
    """Layer `index` of a stack of layers."""
    return {k: pick(v, index) if isinstance(v, dict) else np.asarray(v[index], np.float64) for k, v in tree.items()}
