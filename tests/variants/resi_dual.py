"""ResiDual: post-norm, and a second stream with the sum of all outputs. Xie et al. 2023, eq. 3."""

from tests.variants.case import Drawing, LayoutCase


def resi_dual(x, a, f, n, b, N):
    b["carried"].setdefault("dual", x)  # the embedding
    for part in (a, f):
        x = part.end(x + part(x, x), n[f"{part.name}_post"])
        b["carried"]["dual"] = part.carries("dual", b["carried"]["dual"] + part.y)
    return x


CASES = [
    LayoutCase(
        "resi_dual",
        resi_dual,
        Drawing(norms=2, sums=2, skips=2, factors=0, second=2),
        end=lambda x, b, norm: x + norm(b["carried"]["dual"]),
    )
]
