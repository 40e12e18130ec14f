"""DeepNorm: norm(alpha x + f(x)). Wang et al. 2022; alpha and the scale of the initial values of W_V, W_O and the
feed-forward layer (beta) are those of a decoder in their table 2."""

from tests.variants.case import Drawing, LayoutCase
from tests.variants.layouts import post_norm

CASES = [
    LayoutCase(
        "deep_norm",
        lambda x, a, f, n, b, N: post_norm(x, a, f, n, b, N, alpha=(2 * N) ** 0.25),
        Drawing(norms=2, sums=2, skips=2, factors=0),
        kernel_scale=lambda depth: (8 * depth) ** -0.25,
        needs={"final_norm": "none"},
    )
]
