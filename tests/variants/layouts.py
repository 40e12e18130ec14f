"""The layouts that differ in where norms and skips are. Each function returns the stream after the block."""

from tests.variants.case import BOTH, Drawing, LayoutCase


def pre_norm(x, a, f, n, b, N):
    x = a.end(x + a(x, n["attention_in"](x)))
    return f.end(x + f(x, n["feed_forward_in"](x)))


def post_norm(x, a, f, n, b, N, alpha=1.0):
    x = a.end(alpha * x + a(x, x), n["attention_post"])
    return f.end(alpha * x + f(x, x), n["feed_forward_post"])


def peri_norm(x, a, f, n, b, N):
    x = a.end(x + a(x, n["attention_in"](x), n["attention_out"]))
    return f.end(x + f(x, n["feed_forward_in"](x), n["feed_forward_out"]))


def output_norm(x, a, f, n, b, N):
    x = a.end(x + a(x, x, n["attention_out"]))
    return f.end(x + f(x, x, n["feed_forward_out"]))


def no_norm_between(x, a, f, n, b, N):
    x = a.end(x + a(x, n["attention_in"](x)))
    return f.end(x + f(x, x))


def parallel(x, a, f, n, b, N):
    h = n["attention_in"](x)
    x = a.end(x + a(x, h))
    return f.end(x + f(x, h))


def parallel_two_norms(x, a, f, n, b, N):
    h, g = n["attention_in"](x), n["feed_forward_in"](x)
    x = a.end(x + a(x, h))
    return f.end(x + f(x, g))


def fused_output(x, a, f, n, b, N):
    y = a.end(a(x, n["attention_in"](x)))
    return f.end(x + f(y, y))


def no_skip(x, a, f, n, b, N):
    x = a.end(a(x, n["attention_in"](x)))
    return f.end(f(x, n["feed_forward_in"](x)))


def attention_only(x, a, n, b, N):
    return a.end(x + a(x, n["attention_in"](x)))


def all_attention(x, a, n, b, N):
    return a.end(x + a(x, x), n["attention_post"])


CASES = [
    LayoutCase("pre_norm", pre_norm, Drawing(norms=2, sums=2, skips=2, factors=0), scaled=BOTH),
    LayoutCase("post_norm", post_norm, Drawing(norms=2, sums=2, skips=2, factors=0), needs={"final_norm": "none"}),
    LayoutCase("peri_norm", peri_norm, Drawing(norms=4, sums=2, skips=2, factors=0)),
    LayoutCase("sandwich_norm", peri_norm, Drawing(norms=4, sums=2, skips=2, factors=0)),
    LayoutCase("output_norm", output_norm, Drawing(norms=2, sums=2, skips=2, factors=0)),
    LayoutCase("parallel", parallel, Drawing(norms=1, sums=1, skips=1, factors=0), scaled=BOTH),
    LayoutCase("parallel_two_norms", parallel_two_norms, Drawing(norms=2, sums=1, skips=1, factors=0), scaled=BOTH),
    LayoutCase("no_norm_between", no_norm_between, Drawing(norms=1, sums=2, skips=2, factors=0), scaled=BOTH),
    # There is no W_O, or it does not write to the stream.
    LayoutCase("fused_output", fused_output, Drawing(norms=1, sums=1, skips=1, factors=0), scaled=("feed_forward",)),
    LayoutCase(
        "no_residual_between", fused_output, Drawing(norms=1, sums=1, skips=1, factors=0), scaled=("feed_forward",)
    ),
    LayoutCase("no_skip", no_skip, Drawing(norms=2, sums=0, skips=0, factors=0)),
    LayoutCase("attention_only", attention_only, Drawing(norms=1, sums=1, skips=1, factors=0), scaled=("attention",)),
    LayoutCase(
        "all_attention",
        all_attention,
        Drawing(norms=1, sums=1, skips=1, factors=0),
        needs={"attention.memory_slots": 32, "final_norm": "none"},
    ),
]
