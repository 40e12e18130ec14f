"""Attention between two half steps. Gulati et al. 2020, eq. 1, without the convolution."""

from tests.variants.case import Drawing, LayoutCase


def macaron(x, f, a, g, n, b, N):
    half = lambda y: y / 2  # noqa: E731
    x = f.end(x + f(x, n["feed_forward_1_in"](x), half))
    x = a.end(x + a(x, n["attention_in"](x)))
    return g.end(x + g(x, n["feed_forward_2_in"](x), half), n["feed_forward_2_post"])


CASES = [
    LayoutCase(
        "macaron",
        macaron,
        Drawing(norms=4, sums=3, skips=3, factors=2),
        scaled=("feed_forward_1", "attention", "feed_forward_2"),
        needs={"final_norm": "none"},
    )
]
