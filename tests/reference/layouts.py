"""The layouts of the NumPy reference, each from its paper: where a block's norms, skips and factors are.

x: the residual stream. a: attention, f, g: feed-forward layers, as `Part`s in the order of the block. n[site]: norm,
b[name]: trained gain, N: depth. Each function returns the stream after the block.
"""

from collections.abc import Callable
from functools import partial

import numpy as np

from tests.reference.records import at, record


class Part:
    """A sublayer in a block. `y` is what it adds to the stream."""

    def __init__(self, name: str, function: Callable):
        self.name, self.function, self.y = name, function, 0.0

    def __call__(self, x, h, after: Callable = lambda y: y):
        """after(function(h)), with the stream x at this point: what it reads, a norm of it, or something else."""
        with at(self.name):
            record("before", x)
            self.y = record("out", after(record("raw", self.function(record("in", h)))))
        return self.y

    def end(self, x, norm: Callable | None = None):
        """The stream after the sublayer, with a norm of the sum x."""
        with at(self.name):
            return record("residual", x if norm is None else norm(record("sum", x)))


def _pre_norm(x, a, f, n, b, N):
    x = a.end(x + a(x, n["attention_in"](x)))
    return f.end(x + f(x, n["feed_forward_in"](x)))


def _post_norm(x, a, f, n, b, N, alpha=1.0):
    x = a.end(alpha * x + a(x, x), n["attention_post"])
    return f.end(alpha * x + f(x, x), n["feed_forward_post"])


def _peri_norm(x, a, f, n, b, N):
    x = a.end(x + a(x, n["attention_in"](x), n["attention_out"]))
    return f.end(x + f(x, n["feed_forward_in"](x), n["feed_forward_out"]))


def _output_norm(x, a, f, n, b, N):
    x = a.end(x + a(x, x, n["attention_out"]))
    return f.end(x + f(x, x, n["feed_forward_out"]))


def _no_norm_between(x, a, f, n, b, N):
    x = a.end(x + a(x, n["attention_in"](x)))
    return f.end(x + f(x, x))


def _parallel(x, a, f, n, b, N):
    h = n["attention_in"](x)
    x = a.end(x + a(x, h))
    return f.end(x + f(x, h))


def _parallel_two_norms(x, a, f, n, b, N):
    h, g = n["attention_in"](x), n["feed_forward_in"](x)
    x = a.end(x + a(x, h))
    return f.end(x + f(x, g))


def _fused_output(x, a, f, n, b, N):
    y = a.end(a(x, n["attention_in"](x)))
    return f.end(x + f(y, y))


def _no_skip(x, a, f, n, b, N):
    x = a.end(a(x, n["attention_in"](x)))
    return f.end(f(x, n["feed_forward_in"](x)))


def _attention_only(x, a, n, b, N):
    return a.end(x + a(x, n["attention_in"](x)))


# He & Hofmann 2023, eq. 1 with alpha_SA = 0: x = beta_SA a(norm(x)), then alpha_FF x + beta_FF f(norm(x)). In SAS-P
# (their fig. 10) both sublayers read norm(x), and alpha_FF = 0 as well.


def _skipless(x, a, f, n, b, N):
    x = a.end(a(x, n["attention_in"](x), lambda y: b["attention_gain"] * y))
    z = f(x, n["feed_forward_in"](x), lambda z: b["feed_forward_gain"] * z)
    return f.end(b["feed_forward_skip_gain"] * x + z)


def _skipless_parallel(x, a, f, n, b, N):
    h = n["attention_in"](x)
    x = a.end(a(x, h, lambda y: b["attention_gain"] * y))
    return f.end(x + f(x, h, lambda z: b["feed_forward_gain"] * z))


def _all_attention(x, a, n, b, N):
    return a.end(x + a(x, x), n["attention_post"])


# Vaswani et al. 2017, sec. 3.1: in the decoder, c reads the encoder's output between a and f. T5 is the same in pre-norm.


def _cross_pre_norm(x, a, c, f, n, b, N):
    x = a.end(x + a(x, n["attention_in"](x)))
    x = c.end(x + c(x, n["cross_attention_in"](x)))
    return f.end(x + f(x, n["feed_forward_in"](x)))


def _cross_post_norm(x, a, c, *f, n, b, N):
    x = a.end(x + a(x, x), n["attention_post"])
    x = c.end(x + c(x, x), n["cross_attention_post"])
    return f[0].end(x + f[0](x, x), n["feed_forward_post"]) if f else x


# Gulati et al. 2020, eq. 1, without the convolution.


def _macaron(x, f, a, g, n, b, N):
    half = lambda y: y / 2  # noqa: E731
    x = f.end(x + f(x, n["feed_forward_1_in"](x), half))
    x = a.end(x + a(x, n["attention_in"](x)))
    return g.end(x + g(x, n["feed_forward_2_in"](x), half), n["feed_forward_2_post"])


# Zhu et al. 2024, eq. 1 to 3 and 10 to 13, with two streams.


def _hyper_connections(x, a, f, n, b, N):
    for part in (a, f):
        p = {name.removeprefix(f"{part.name}_"): value for name, value in b.items()}
        H_LXD = b["carried"].setdefault("streams", np.stack([x, x], 1))
        centred = H_LXD - H_LXD.mean(-1, keepdims=True)
        normed = centred / np.sqrt((centred**2).mean(-1, keepdims=True) + 1e-5)
        A_m = p["read"] + p["read_scale"] * np.tanh(normed @ p["read_kernel"])
        A_r = p["mix"] + p["read_scale"] * np.tanh(normed @ p["mix_kernel"])
        B = p["write"] + p["write_scale"] * np.tanh(normed @ p["write_kernel"])
        h = np.einsum("lx,lxd->ld", A_m, H_LXD)
        y = part(x, n[f"{part.name}_in"](h))
        H_LXD = np.einsum("lyx,lyd->lxd", A_r, H_LXD) + B[..., None] * y[:, None]
        with at(part.name):
            H_LXD = record("streams", H_LXD)
        x = part.end(H_LXD.sum(1))
        b["carried"]["streams"] = H_LXD + ((x - H_LXD.sum(1)) / H_LXD.shape[1])[:, None]  # x may have been changed
    return x


# Kimi Team 2026 (arXiv 2603.15031), eqs. 2 to 6: each sublayer attends to the embedding and the sums of S outputs before it.


def depth_attention(v, query, gain):
    """The mixture [L, D] of the sources v, which are [L, D] each."""
    logits = [(gain * source / np.sqrt((source**2).mean(-1, keepdims=True) + 1e-6)) @ query for source in v]
    weights = np.exp(np.stack(logits) - np.max(logits, 0))
    return np.einsum("xl,xld->ld", weights / weights.sum(0), np.stack(v))


def _attention_residuals(x, a, f, n, b, N, S=1):
    v = b["carried"].setdefault("sources", [x])  # the embedding, and the sums
    outputs = b["carried"].setdefault("outputs", [])
    for part in (a, f):
        h = depth_attention(v, b[f"{part.name}_mix_query"], b[f"{part.name}_mix_gain"])
        v += [np.zeros_like(x)] if len(outputs) % S == 0 else []
        outputs.append(part(x, n[f"{part.name}_in"](h)))
        v[-1] = v[-1] + outputs[-1]
        with at(part.name):
            unwritten = [np.zeros_like(x)] * (1 + -(-2 * N // S) - len(v))
            v[:] = np.moveaxis(record("sources", np.stack([*v, *unwritten], 1)), 1, 0)[: len(v)]
        x = part.end(sum(v))
        v[-1] = v[-1] + x - sum(v)  # x may have been changed
    return x


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
    "no_residual_between": _fused_output,
    "no_skip": _no_skip,
    "attention_only": _attention_only,
    "skipless": _skipless,
    "skipless_parallel": _skipless_parallel,
    "all_attention": _all_attention,
    "macaron": _macaron,
    "hyper_connections": _hyper_connections,
    "attention_residuals": _attention_residuals,
    "attention_residuals_blocks": partial(_attention_residuals, S=3),
    "deep_norm": lambda x, a, f, n, b, N: _post_norm(x, a, f, n, b, N, alpha=(2 * N) ** 0.25),
    "resi_dual": _post_norm,
    "cross_pre_norm": _cross_pre_norm,
    "cross_post_norm": lambda x, a, c, f, n, b, N: _cross_post_norm(x, a, c, f, n=n, b=b, N=N),
    "cross_all_attention": lambda x, a, c, n, b, N: _cross_post_norm(x, a, c, n=n, b=b, N=N),
}
