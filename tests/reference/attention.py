"""The mixers of the NumPy reference: attention and lambda layers, with their positions.

Float64, written from the papers' equations and not from our code. `p` holds the parameters of one layer. Each function
takes one sequence.
"""

import math
from dataclasses import replace

import numpy as np

from tests.reference.norms import ELEMENTWISE, logistic, norm_of, softcap, softmax
from tests.reference.records import record
from xfresearch.models.mixers.softmax.config import SoftmaxConfig

# RoPE. Su et al. 2021, eq. 34 in complex numbers; dimension i is paired with i + K/2.


def rope(x_LK, positions, config):
    """Rotates the first `fraction` of the dimensions. Llama 3.1's frequency scaling follows the published code of the
    model, by wavelength. YaRN's follows its authors' code; queries and keys share its factor of the logits (Peng et al.
    2023, sec. 3.4)."""
    size = round(x_LK.shape[-1] * config.fraction)
    half = size // 2
    frequencies = []
    for i in range(size // 2):
        frequency = config.theta ** (-2.0 * i / size)
        wavelength = 2 * math.pi / frequency
        if config.scaling == "linear":
            frequency /= config.factor
        if config.scaling == "llama3" and wavelength > config.original_length / config.high_frequency:
            smooth = config.original_length / wavelength - config.low_frequency
            smooth = max(smooth / (config.high_frequency - config.low_frequency), 0)
            frequency = (1 - smooth) * frequency / config.factor + smooth * frequency
        if config.scaling == "yarn":
            slow = yarn_ramp(i, size, config)
            frequency = slow * frequency / config.factor + (1 - slow) * frequency
        frequencies.append(frequency)
    z = (x_LK[:, :half] + 1j * x_LK[:, half:size]) * np.exp(1j * np.outer(positions, frequencies))
    if config.scaling == "yarn":
        z = z * (config.attention_factor or 0.1 * math.log(config.factor) + 1)
    return np.concatenate([z.real, z.imag, x_LK[:, size:]], -1)


def yarn_ramp(i, size, config):
    """0 up to the dimension with high_frequency turns in the original length, 1 from the one with low_frequency on; with
    `truncate`, from and to whole dimensions."""
    ends = [size / 2 * math.log(config.original_length / (turns * 2 * math.pi), config.theta)
            for turns in (config.high_frequency, config.low_frequency)]  # fmt: skip
    if config.truncate:
        ends = math.floor(ends[0]), math.ceil(ends[1])
    low, high = max(ends[0], 0), min(ends[1], size - 1)
    return min(max((i - low) / (high - low if high != low else 0.001), 0), 1)


# Biases of the logits, for head h and d = t - s. Press et al. 2022, sec. 3; Raffel et al. 2020, sec. 2.1; the relative
# key of Sukhbaatar et al. 2019, shared by all heads; the logarithm of an adaptive span's mask (2019a, eq. 2).


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


def t5_bucket_of_both_sides(d, buckets, farthest):
    """The encoder's: half of the buckets for keys up to the query, the other half for those after it (their code)."""
    after = buckets // 2 if d < 0 else 0
    return after + t5_bucket(abs(d), buckets // 2, farthest)


def logit_bias(p, shared, config, longest, q, h, t, s, causal=True):
    d = t - s
    bias = 0.0
    x = d - (not config.sees_itself)  # steps back from the nearest visible token
    if config.position == "alibi":
        bias -= alibi(h, config.heads) * abs(d)
    if config.position == "t5":
        bucket = t5_bucket if causal else t5_bucket_of_both_sides
        bias += shared["relative_bias"][bucket(d, config.t5_buckets, config.t5_distance), h]
    if config.position == "relative_key":
        bias += q @ shared["relative_key"][x] * scale(config, len(q))
    if config.span == "adaptive":
        m = min(max((p["span"]["fraction"][h] * longest - x) / config.span_ramp + 1, 0), 1)
        bias += math.log(m) if m > 0 else -np.inf
    return bias


# Attention. Vaswani et al. 2017, eq. 1; query head h reads key-value head h // (H / G) (Ainslie et al. 2023). An absent
# matrix is the identity, on a head's slice of x or on all of x. merged: logits x_t W_h x_s. Memory slots follow the
# code of Sukhbaatar et al. 2019: keys sqrt(K) * key and values sqrt(M) * value join the softmax; they have no position
# and use the query before RoPE. Slots of the model's width are their eq. 4 (and Geva et al. 2021, eq. 2), added to the
# heads' output. Shaped attention: He & Hofmann 2023, eq. 5, aI + bA - cC. identity_plus: their eq. 6, W_V = a I + b W.


def scale(config, size):
    return config.scale or 1 / math.sqrt(config.head_size if config.query == "merged" else size)


def head_of(part, kind, x_LD, head, size):
    if part is None:
        return x_LD if kind == "identity_whole" else x_LD[:, head * size : (head + 1) * size]
    W = part["kernel"]
    if kind == "identity_plus":
        W = part["identity_gain"] * np.eye(len(W)).reshape(W.shape) + part["weight_gain"] * W
    head = head if W.shape[1] > 1 else 0
    return x_LD @ W[:, head] + (part["bias"][head] if "bias" in part else 0)


def queries_keys_values(p, x_LD, block):
    """Lists of [L, K], without positions: a query for each head, a key and a value for each key-value head."""
    a = block.attention
    projected = {}
    for name, kind, count in (("query", a.query, a.heads), ("key", a.key, a.kv_heads), ("value", a.value, a.kv_heads)):
        projected[name] = [head_of(p.get(name), kind, x_LD, head, a.head_size) for head in range(count)]
    values = projected["key"] if a.value == "key" else projected["value"]
    queries, keys = (norm_heads(p.get(f"{name}_norm", {}), projected[name], block) for name in ("query", "key"))
    bound = a.clip or np.inf  # after the norms, as in OLMoE's code
    return ([np.clip(x, -bound, bound) for x in heads] for heads in (queries, keys, values))


def norm_heads(p, heads, block):
    """Norms each head alone (Henry et al. 2020), or all heads of a token as one vector (OLMo et al. 2024)."""
    kind = block.attention.qk_norm
    if block.attention.qk_norm_over == "head":
        return [norm_of(kind, p, x, block) for x in heads]
    flat = {name: np.ravel(value) for name, value in p.items()}
    return np.split(norm_of(kind, flat, np.concatenate(heads, -1), block), len(heads), -1)


def attention(p, x_LD, block, positions, segments, shared, longest, causal, layer, projected=None):
    config = block.attention
    L = len(x_LD)
    H = config.heads
    G = config.kv_heads
    reach = config.window or 10**9
    nearest = int(not config.sees_itself)
    prefix = shared.get("prefix", np.zeros(L))  # Raffel et al. 2020, fig. 3
    allowed = np.array([[segments[s] == segments[t] and (not causal or prefix[s] or nearest <= t - s < nearest + reach)
                         for s in range(L)] for t in range(L)])  # fmt: skip
    slots = p["memory"] if config.memory_slots and config.memory_activation == "softmax" else None
    projected = projected or queries_keys_values(p, x_LD, block)
    bare, queries, keys, values = positioned(*projected, positions, config)
    w, beside, slot_values = [], [], []
    for h in range(H):
        g = h // (H // G)
        q, k = queries[:, h], keys[:, g if keys.shape[1] > 1 else 0]
        bias = np.array([[logit_bias(p, shared, config, longest, q[t], h, t, s, causal) if allowed[t, s] else 0
                          for s in range(L)] for t in range(L)])  # fmt: skip
        scores = np.where(allowed, softcap(q @ k.T * scale(config, q.shape[1]), config.softcap) + bias, -np.inf)
        if slots:
            to_slots, of_head = slots_of(slots, config, bare[:, h], g)  # without RoPE
            scores = np.concatenate([scores, to_slots], -1)
            slot_values.append(of_head)
        if config.sink != "none":  # gpt-oss 2025: e^s / (e^b + sum e^s); Miller 2023: b = 0
            sink = np.full((L, 1), p["sink"][h] if config.sink == "learned" else 0.0)
            scores = np.concatenate([scores, sink], -1)
        each = np.array([softmax(row) if np.isfinite(row).any() else 0 * row.clip(0) for row in scores])
        if config.shaping != "none":
            a, b, c = (p["shaping"].get(n, np.zeros(H))[h] for n in ("identity", "weights", "uniform"))
            each = a * np.eye(L) + b * each - c * allowed / np.maximum(allowed.sum(-1, keepdims=True), 1)
        w.append(each[:, :L])
        beside.append(each[:, L:])
    w_HLS = record("weights", np.stack(w))
    o = [w_HLS[h] @ values[:, h // (H // G) if values.shape[1] > 1 else 0] for h in range(H)]
    if slots or config.sink != "none":
        name = "coefficients" if slots or not config.memory_slots else "sink_weight"
        m_HLM = record(name, np.stack(beside))
        o = [each + m[:, : len(v)] @ v for each, m, v in zip(o, m_HLM, slot_values, strict=True)] if slots else o
    o = list(record("heads", np.stack(o, 1)).swapaxes(0, 1))
    o = gated(p, o, x_LD) if config.output_gate != "none" else o
    y_LD = output(p, o)
    return y_LD + wide_memory(p["memory"], config, x_LD) if config.memory_slots and not slots else y_LD


def positioned(queries, keys, values, positions, config):
    """Queries before RoPE, and queries, keys and values [L, heads, K]. A key or a value that is all of x is one head."""
    q_LHK, k_LGK, v_LGV = (np.stack(heads, 1) for heads in (queries, keys, values))
    k_LGK = k_LGK[:, :1] if getattr(config, "key", "") == "identity_whole" else k_LGK
    v_LGV = v_LGV[:, :1] if getattr(config, "value", "") == "identity_whole" else v_LGV
    bare_LHK = q_LHK
    if config.position == "rope":
        bare_LHK, k_LGK = record("unrotated_query", q_LHK), record("unrotated_key", k_LGK)
        q_LHK, k_LGK = (np.stack([rope(x, positions, config.rope) for x in heads.swapaxes(0, 1)], 1)
                        for heads in (bare_LHK, k_LGK))  # fmt: skip
    q_LHK, k_LGK = record("query", q_LHK), record("key", k_LGK)
    return bare_LHK if config.position == "rope" else q_LHK, q_LHK, k_LGK, record("value", v_LGV)


def gated(p, heads, x_LD):
    """Qiu et al. 2025, eq. 5: Y' = Y * sigmoid(X W), for each number of a head or each head."""
    W = p["gate"]["kernel"]
    gates = [logistic(x_LD @ (W[:, h] if W.ndim == 3 else W[:, h : h + 1])) for h in range(len(heads))]
    gate = record("gate", np.stack(gates, 1) if W.ndim == 3 else np.concatenate(gates, 1)).reshape(len(x_LD), len(heads), -1)
    return [o * gate[:, h] for h, o in enumerate(heads)]


def output(p, heads):
    """The output of heads [L, V]: through W_O, or concatenated."""
    if "output" not in p:
        return np.concatenate(heads, -1)
    return sum(o @ kernel for o, kernel in zip(heads, p["output"]["kernel"], strict=True)) + p["output"].get("bias", 0)


def slots_of(p, config, q, g):
    """Logits [L, M] for the slots of key-value head g, and the slots' values."""
    key, value = (x[:, g if x.shape[1] > 1 else 0] for x in (p["key"], p["value"]))
    logits = q @ (math.sqrt(q.shape[1]) * key).T * scale(config, q.shape[1])
    return softcap(logits, config.softcap), math.sqrt(len(value)) * value


def wide_memory(p, config, x_LD):
    z_LM = record("pre_activation", x_LD @ p["key"].T + p["bias"])
    return record("coefficients", ELEMENTWISE[config.memory_activation](z_LM)) @ p["value"]


def slot_attention(p, x_LD, block, positions, segments, shared, longest, causal, layer):
    """Attention to slots only."""
    config = block.attention
    if config.memory_activation != "softmax":
        return wide_memory(p["memory"], config, x_LD) + p.get("output", {}).get("bias", 0)
    queries = [head_of(p.get("query"), config.query, x_LD, h, config.head_size) for h in range(config.heads)]
    q_LHK = record("query", np.stack(queries, 1))
    share = config.heads // config.kv_heads
    of_head = [slots_of(p["memory"], config, q_LHK[:, h], h // share) for h in range(config.heads)]
    m_HLM = record("coefficients", np.stack([softmax(logits) for logits, _ in of_head]))
    o = [m_LM @ values for m_LM, (_, values) in zip(m_HLM, of_head, strict=True)]
    return output(p, list(record("heads", np.stack(o, 1)).swapaxes(0, 1)))


# Lambda layer. Bello 2021, sec. 3.1-3.2 (multi-query lambda layer; intra-depth in app. C). The context is limited to
# the tokens up to n, the embeddings to the given distances. Queries and values are normed token by token.


def lambda_layer(p, x_LD, block, positions, segments, shared, longest, causal, layer):
    def project(name, i):
        y = x_LD @ p[name]["kernel"][:, i]
        scaling = {"query": "query_scaling", "lambda_value": "value_scaling"}.get(name)
        return norm_of(block.attention.lambdas.norm, p.get(scaling, {}), y, block) if scaling else y

    parts = {
        "query": block.attention.heads,
        "lambda_key": len(p["distances"][0]),
        "lambda_value": len(p["distances"][0]),
    }
    q, k, v = ([project(name, i) for i in range(n)] for name, n in parts.items())
    for name, heads in (("query", q), ("key", k), ("value", v)):
        record(name, np.stack(heads, 1))
    return mix_by_lambdas(q, k, v, p["distances"], segments)


def mix_by_lambdas(q, k, v, distances, segments):
    """y [L, H V]. Lists of q [L, K] per head, of k [L, K] and v [L, V] per depth; distances [R, U, K]."""
    L, depths = len(q[0]), range(len(k))
    factors = np.zeros((L, L, len(k), q[0].shape[1]))  # of the values, for each number of a query
    for n in range(L):
        seen = [m for m in range(n + 1) if segments[m] == segments[n]]
        for u in depths:
            factors[n, seen, u] = softmax(k[u][seen].T).T
            for m in (m for m in seen if n - m < len(distances)):
                factors[n, m, u] += distances[n - m, u]
    state_LKV = record("state", np.einsum("lsuk,usv->lkv", factors, np.stack(v)))
    record("weights", np.einsum("hlk,lsuk->hlsu", np.stack(q), factors))
    y_LHV = record("heads", np.einsum("hlk,lkv->lhv", np.stack(q), state_LKV))
    return y_LHV.reshape(L, -1)


# Differential attention. Ye et al. 2024, eq. 1-3. In their code, all heads share the RMSNorm of a head.


def differential(p, x_LD, block, positions, segments, shared, longest, causal, layer):
    a = block.attention
    L = len(x_LD)
    H = a.heads
    G = a.kv_heads
    K = a.head_size
    prefix = shared.get("prefix", np.zeros(L))
    allowed = np.array([[segments[s] == segments[t] and (not causal or prefix[s] or 0 <= t - s < (a.window or 10**9))
                         for s in range(L)] for t in range(L)])  # fmt: skip
    first = 0.8 - 0.6 * math.exp(-0.3 * layer)  # layers count from 1 in the paper
    terms = [math.exp(p[f"lambda_query_{i}"] @ p[f"lambda_key_{i}"]) for i in (1, 2)]
    weight = terms[0] - terms[1] + first
    # The 2 H queries are ordered by (key-value head, map, head of its group), the 2 G keys by (head, map).
    parts = [[x_LD @ kernel for kernel in p[name]["kernel"].swapaxes(0, 1)] for name in ("query", "key", "value")]
    _, q, k, v = positioned(*parts, positions, a)
    scores = [np.where(allowed, q[:, n] @ k[:, n // (H // G)].T / math.sqrt(K), -np.inf) for n in range(2 * H)]
    w = record("weights", np.stack([[softmax(row) for row in each] for each in scores]))
    heads = []
    for h in range(H):
        g, r = divmod(h, H // G)
        maps = [w[(2 * g + i) * (H // G) + r] for i in (0, 1)]
        o = (maps[0] - weight * maps[1]) @ v[:, g]
        o = o / np.sqrt((o * o).mean(-1, keepdims=True) + block.norm_epsilon) * p["head_norm"]["gain"]
        heads.append((1 - first) * o)
    return output(p, list(record("heads", np.stack(heads, 1)).swapaxes(0, 1)))


def value_residual(p, x_LD, block, positions, segments, shared, longest, causal, layer):
    """Zhou et al. 2024, eq. 5: v = a v_n + b v_1."""
    softmax = SoftmaxConfig(**{name: getattr(block.attention, name) for name in
                               ("heads", "kv_heads", "head_size", "position", "rope")})  # fmt: skip
    block = replace(block, attention=replace(softmax, output="identity") if "output" not in p else softmax)
    queries, keys, values = queries_keys_values(p, x_LD, block)
    values = list(values)
    first = shared.setdefault("first_values", values)
    values = [p["own"] * v + p["first"] * v_1 for v, v_1 in zip(values, first, strict=True)]
    projected = queries, keys, values
    return attention(p, x_LD, block, positions, segments, shared, longest, causal, layer, projected)


ATTENTIONS = {
    "softmax": attention,
    "slots": slot_attention,
    "lambda": lambda_layer,
    "differential": differential,
    "value_residual": value_residual,
}
