"""What mixers have in common, in the NumPy reference: positions, projections, slots, gates and the output of heads.

Float64, written from the papers' equations and not from our code. `p` holds the parameters of one layer. Each function
takes one sequence. The mixers themselves are in tests/variants/.
"""

import math

import numpy as np

from tests import variants
from tests.reference.norms import logistic, norm_of, softcap
from tests.reference.records import record

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


def logit_bias(p, sequence, config, q, h, t, s):
    d = t - s
    bias = 0.0
    x = d - (not config.sees_itself)  # steps back from the nearest visible token
    if config.position == "alibi":
        bias -= alibi(h, config.heads) * abs(d)
    if config.position == "t5":
        bucket = t5_bucket if sequence.causal else t5_bucket_of_both_sides
        bias += sequence.shared["relative_bias"][bucket(d, config.t5_buckets, config.t5_distance), h]
    if config.position == "relative_key":
        bias += q @ sequence.shared["relative_key"][x] * scale(config, len(q))
    if config.span == "adaptive":
        m = min(max((p["span"]["fraction"][h] * sequence.longest - x) / config.span_ramp + 1, 0), 1)
        bias += math.log(m) if m > 0 else -np.inf
    return bias


# Projections and slots. An absent matrix is the identity, on a head's slice of x or on all of x. merged: logits x_t W_h
# x_s. Memory slots follow the code of Sukhbaatar et al. 2019: keys sqrt(K) * key and values sqrt(M) * value join the
# softmax; they have no position and use the query before RoPE. Slots of the model's width are their eq. 4 (and Geva et
# al. 2021, eq. 2), added to the heads' output. identity_plus: He & Hofmann 2023, eq. 6, W_V = a I + b W.


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
    return record("coefficients", variants.ACTIVATIONS[config.memory_activation].reference(z_LM)) @ p["value"]
