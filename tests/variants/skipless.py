"""Layouts without skips. He & Hofmann 2023, eq. 1 with alpha_SA = 0: x = beta_SA a(norm(x)), then alpha_FF x + beta_FF
f(norm(x)). In SAS-P (their fig. 10) both sublayers read norm(x), and alpha_FF = 0 as well."""

from tests.variants.case import Drawing, LayoutCase, Parameter


def skipless(x, a, f, n, b, N):
    x = a.end(a(x, n["attention_in"](x), lambda y: b["attention_gain"] * y))
    z = f(x, n["feed_forward_in"](x), lambda z: b["feed_forward_gain"] * z)
    return f.end(b["feed_forward_skip_gain"] * x + z)


def skipless_parallel(x, a, f, n, b, N):
    h = n["attention_in"](x)
    x = a.end(a(x, h, lambda y: b["attention_gain"] * y))
    return f.end(x + f(x, h, lambda z: b["feed_forward_gain"] * z))


def small_gain(shape, model, block) -> float:
    return block.branch_gain or 0.1 * (18 / model.depth) ** 0.5  # 0.1 at 18 layers, in the authors' code


GAINS = {"block/attention_gain": Parameter(1.0), "block/feed_forward_gain": Parameter(small_gain)}
CASES = [
    LayoutCase(
        "skipless",
        skipless,
        Drawing(norms=2, sums=1, skips=1, factors=2),
        parameters=GAINS | {"block/feed_forward_skip_gain": Parameter(1.0)},
    ),
    LayoutCase("skipless_parallel", skipless_parallel, Drawing(norms=1, sums=1, skips=0, factors=2), parameters=GAINS),
]
