"""Layouts with cross-attention. Vaswani et al. 2017, sec. 3.1: in the decoder, c reads the encoder's output between a and f.
T5 is the same in pre-norm."""

from tests.variants.case import Drawing, LayoutCase


def cross_pre_norm(x, a, c, f, n, b, N):
    x = a.end(x + a(x, n["attention_in"](x)))
    x = c.end(x + c(x, n["cross_attention_in"](x)))
    return f.end(x + f(x, n["feed_forward_in"](x)))


def cross_post_norm(x, a, c, *f, n, b, N):
    x = a.end(x + a(x, x), n["attention_post"])
    x = c.end(x + c(x, x), n["cross_attention_post"])
    return f[0].end(x + f[0](x, x), n["feed_forward_post"]) if f else x


CASES = [
    LayoutCase("cross_pre_norm", cross_pre_norm, Drawing(norms=3, sums=3, skips=3, factors=0)),
    LayoutCase(
        "cross_post_norm",
        lambda x, a, c, f, n, b, N: cross_post_norm(x, a, c, f, n=n, b=b, N=N),
        Drawing(norms=3, sums=3, skips=3, factors=0),
    ),
    LayoutCase(
        "cross_all_attention",
        lambda x, a, c, n, b, N: cross_post_norm(x, a, c, n=n, b=b, N=N),
        Drawing(norms=2, sums=2, skips=2, factors=0),
    ),
]
