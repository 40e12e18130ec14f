"""The reference model in NumPy float64: slow loops, written from the papers' equations and not from our code.

`p` holds the parameters of one layer: a nested dict of arrays, as `transformer.init` returns it. Each function takes
one sequence.
"""

import math
from dataclasses import replace

import numpy as np

from tests.models.reference_attention import ATTENTIONS
from tests.models.reference_norms import ELEMENTWISE, NORMS, gelu, gelu_tanh, logistic, norm_of, softcap, softmax

# Positions added to the embedding. Vaswani et al. 2017, sec. 3.5.


def sinusoidal(positions, width):
    table = np.zeros((len(positions), width))
    for row, position in enumerate(positions):
        for i in range(width):
            angle = position / 10_000 ** (2 * (i // 2) / width)
            table[row, i] = math.cos(angle) if i % 2 else math.sin(angle)
    return table


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
}
ACTIVATIONS = PLAIN | GATED


def feed_forward(up, gate, down, kind, x, biases=(0, 0, 0), norm=None):
    if kind in GATED:
        return (GATED[kind](x @ gate + biases[1]) * (x @ up + biases[0])) @ down + biases[2]
    z = x @ up + biases[0]
    if norm:  # SoLU without its denominator: a factor per token, which the norm cancels
        return norm(z * np.exp(z - z.max(-1, keepdims=True))) @ down + biases[2]
    return PLAIN[kind](z) @ down + biases[2]


def dense(p, x_LD, config, epsilon):
    kernels, biases = ([p.get(name, {}).get(part, 0) for name in ("up", "gate", "down")] for part in ("kernel", "bias"))
    norm = (lambda h: NORMS["layer"](p["hidden_norm"], h, epsilon)) if config.kind == "solu" else None
    return feed_forward(*kernels, config.kind, x_LD, biases, norm)


# Mixture of experts. y = sum_i g_i expert_i(x) + shared(x) over the k experts with the highest s + b. Softmax gates,
# renormalised: Jiang et al. 2024, sec. 2.1; sigmoid and b: DeepSeek-V3 2024, eq. 12-16. An expert without free slots
# takes no more tokens. Balance loss: Fedus et al. 2021, eq. 4-6, E sum_e f_e P_e, where f_e is the share of choices of
# expert e. Router z-loss: Zoph et al. 2022, eq. 5, mean logsumexp(z)^2. Both losses are means over a sequence's tokens
# without padding (segment 0), times the number of these tokens.


def expert(p, e, kind, x):
    return feed_forward(p["up"][e], p["gate"][e] if "gate" in p else None, p["down"][e], kind, x)


def scores(moe, z_LE):
    return softmax(z_LE) if moe.scores == "softmax" else 1 / (1 + np.exp(-z_LE))


def mixture(p, x_LD, config, segments, max_length):
    moe = config.moe
    real = np.asarray(segments) > 0
    z_LE = x_LD @ p["router"]["kernel"]
    s_LE = scores(moe, z_LE)
    free_E = np.full(moe.experts, math.ceil(moe.capacity * moe.top_k * max_length / moe.experts) or len(x_LD))
    y_LD, chosen_LE = np.zeros_like(x_LD), np.zeros_like(z_LE)
    for t, s_E in enumerate(s_LE):
        top = np.argsort(-(s_E + p.get("router_bias", 0)))[: moe.top_k]
        for e in top:
            if free_E[e] > 0:
                gate = s_E[e] / s_E[top].sum() if moe.renormalise else s_E[e]
                y_LD[t] += gate * expert(p["experts"], e, moe.expert, x_LD[t])
            free_E[e] -= real[t]
            chosen_LE[t, e] = 1 / moe.top_k
    if moe.shared:
        y_LD += feed_forward(*(p["shared"].get(n, {}).get("kernel") for n in ("up", "gate", "down")), moe.expert, x_LD)
    f_E = chosen_LE[real].mean(0)
    P_E = (s_LE / s_LE.sum(-1, keepdims=True))[real].mean(0)
    losses = {"router_z_loss": moe.z_loss * (np.log(np.exp(z_LE[real]).sum(-1)) ** 2).sum()}
    if moe.balance == "loss":
        losses["balance_loss"] = real.sum() * moe.balance_loss * moe.experts * (f_E * P_E).sum()
    return y_LD, losses


# Expert choice. Zhou et al. 2022, sec. 3.2: S = softmax(X W_g); each expert takes the C tokens with its highest S.


def expert_choice(p, x_LD, config):
    moe = config.moe
    s_LE = scores(config.moe, x_LD @ p["router"]["kernel"])
    y_LD = np.zeros_like(x_LD)
    C = math.ceil(moe.capacity * moe.top_k * len(x_LD) / moe.experts)
    for e in range(moe.experts):
        for t in np.argsort(-s_LE[:, e])[:C]:
            y_LD[t] += s_LE[t, e] * expert(p["experts"], e, moe.expert, x_LD[t])
    return y_LD


# {kind: a function of (parameters, x, options of the block, segment ids, options of the model) that returns y and the
# auxiliary losses}
FEED_FORWARDS = {
    **{kind: lambda p, x, block, *_: (dense(p, x, block.feed_forward, block.norm_epsilon), {}) for kind in ACTIVATIONS},
    "moe": lambda p, x, block, segments, model: mixture(p, x, block.feed_forward, segments, model.max_length),
}


# Layouts. a: attention, f: feed-forward layer, n[site]: norm, b[name]: trained gain, N: depth. Each function returns x
# and the sum of its sublayers' outputs.


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


def _output_norm(x, a, f, n, b, N):
    y = n["attention_out"](a(x))
    z = n["feed_forward_out"](f(x + y))
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


def _no_residual_between(x, a, f, n, b, N):
    return _fused_output(x, a, f, n, b, N)


def _no_skip(x, a, f, n, b, N):
    y = a(n["attention_in"](x))
    z = f(n["feed_forward_in"](y))
    return z, y + z


def _attention_only(x, a, f, n, b, N):
    y = a(n["attention_in"](x))
    return x + y, y


# He & Hofmann 2023, eq. 1 with alpha_SA = 0: x = beta_SA a(norm(x)), then alpha_FF x + beta_FF f(norm(x)). In SAS-P
# (their fig. 10) both sublayers read norm(x), and alpha_FF = 0 as well.


def _skipless(x, a, f, n, b, N):
    y = b["attention_gain"] * a(n["attention_in"](x))
    z = b["feed_forward_gain"] * f(n["feed_forward_in"](y))
    return b["feed_forward_skip_gain"] * y + z, y + z


def _skipless_parallel(x, a, f, n, b, N):
    h = n["attention_in"](x)
    y = b["attention_gain"] * a(h) + b["feed_forward_gain"] * f(h)
    return y, y


def _all_attention(x, a, f, n, b, N):
    return n["attention_post"](x + a(x)), a(x)


LAYOUTS = {
    "pre_norm": _pre_norm,
    "post_norm": _post_norm,
    "peri_norm": _peri_norm,
    "sandwich_norm": _peri_norm,
    "output_norm": _output_norm,
    "parallel": _parallel,
    "parallel_two_norms": _parallel_two_norms,
    "no_norm_between": _no_norm_between,
    "fused_output": _fused_output,
    "no_residual_between": _no_residual_between,
    "no_skip": _no_skip,
    "attention_only": _attention_only,
    "skipless": _skipless,
    "skipless_parallel": _skipless_parallel,
    "all_attention": _all_attention,
    "deep_norm": lambda x, a, f, n, b, N: _post_norm(x, a, f, n, b, N, alpha=(2 * N) ** 0.25),
    "resi_dual": _post_norm,
}


def block(p, x_LD, config, positions, segments, model_config, shared, layer):
    """x_LD after one block, the sum of its sublayers' outputs, and its auxiliary losses."""
    losses = {}
    real = np.asarray(segments) > 0
    longest = getattr(config.attention, "window", 0) or model_config.max_length

    def attend(x):
        if getattr(config.attention, "span", "full") == "adaptive":
            mean = np.mean(p["attention"]["span"]["fraction"]) * longest
            losses["span_loss"] = config.attention.span_loss * mean * real.sum()
        attend = ATTENTIONS[config.attention.kind]
        return attend(p["attention"], x, config, positions, segments, shared, longest, model_config.causal, layer)

    def feed(x):
        reference = FEED_FORWARDS[config.feed_forward.kind]
        y, more = reference(p["feed_forward"], x, config, segments, model_config)
        losses.update(more)
        return y

    def norm(site):
        name, place = site.rsplit("_", 1)
        own = getattr(config.norms, site)
        epsilon = config.norm_epsilon if own.epsilon is None else own.epsilon
        at = replace(config, norm_epsilon=epsilon)
        return lambda x: norm_of(own.kind or config.norm, p.get(f"{name}_norm_{place}", {}), x, at)

    norms = {site: norm(site) for site in vars(config.norms)}
    x_LD, outputs = LAYOUTS[config.layout](x_LD, attend, feed, norms, p, model_config.depth)
    return x_LD, outputs, losses


def layer_order(config):
    """(block, name of the stack in the parameters, index in the stack) of each layer. Repeated names get a number."""
    segments = config.segments or ((config.pattern, config.depth // len(config.pattern)),)
    names = [name for pattern, _ in segments for name in pattern]
    found = []
    start = 0
    for pattern, repeats in segments:
        for repeat in range(repeats):
            for i, name in enumerate(pattern):
                found.append((name, name if names.count(name) == 1 else f"{name}_{start + i}", repeat))
        start += len(pattern)
    return found


def model(config, params, tokens, positions=None, segments=None):
    """Logits [L, V] of one sequence of token ids, and its auxiliary losses, summed over layers."""
    positions = np.arange(len(tokens)) if positions is None else positions
    segments = np.ones(len(tokens)) if segments is None else segments
    order = layer_order(config)
    first = config.blocks[order[0][0]]
    losses = {}
    factor = {"none": 1, "sqrt_width": math.sqrt(config.width), "learned": params.get("embedding_scale")}
    x_LD = params["embed"]["table"][tokens] * factor[config.embedding_scale]
    if config.position == "learned":
        x_LD = x_LD + params["position"]["table"][positions + config.position_offset]
    if config.position == "sinusoidal":
        x_LD = x_LD + sinusoidal(positions, config.width)
    shared = params.get("shared", {})
    total = x_LD = norm_of(config.embedding_norm, params.get("embedding_norm", {}), x_LD, first)
    for layer, (name, stack, repeat) in enumerate(order):
        p = pick(params["blocks"][stack], repeat)
        x_LD, outputs, more = block(p, x_LD, config.blocks[name], positions, segments, config, shared, layer)
        total = total + outputs
        losses = {key: losses.get(key, 0) + more.get(key, 0) for key in losses | more}
    final = lambda x: norm_of(config.final_norm, params.get("final_norm", {}), x, first)  # noqa: E731
    # ResiDual (Xie et al. 2023, eq. 3): the post-norm stream plus the norm of the sum of all sublayers' outputs.
    dual = any(b.layout == "resi_dual" for b in config.blocks.values())
    x_LD = x_LD + final(total) if dual else final(x_LD)
    logits_LV = x_LD @ params["embed" if config.tie_embeddings else "head"]["table"].T
    logits_LV += params.get("head_bias", {}).get("bias", 0)
    return softcap(logits_LV, config.logit_softcap), losses


def pick(tree, index):
    """Layer `index` of a stack of layers."""
    return {k: pick(v, index) if isinstance(v, dict) else np.asarray(v[index], np.float64) for k, v in tree.items()}
