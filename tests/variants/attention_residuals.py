"""Attention residuals. Kimi Team 2026 (arXiv 2603.15031), eqs. 2 to 6: each sublayer attends to the embedding and the sums
of S outputs before it."""

from functools import partial

import numpy as np

from tests.variants.case import BOTH, Drawing, LayoutCase, Parameter


def depth_attention(v, query, gain):
    """The mixture [L, D] of the sources v, which are [L, D] each."""
    logits = [(gain * source / np.sqrt((source**2).mean(-1, keepdims=True) + 1e-6)) @ query for source in v]
    weights = np.exp(np.stack(logits) - np.max(logits, 0))
    return np.einsum("xl,xld->ld", weights / weights.sum(0), np.stack(v))


def attention_residuals(x, a, f, n, b, N, S=1):
    v = b["carried"].setdefault("sources", [x])  # the embedding, and the sums
    outputs = b["carried"].setdefault("outputs", [])
    for part in (a, f):
        h = depth_attention(v, b[f"{part.name}_mix_query"], b[f"{part.name}_mix_gain"])
        v += [np.zeros_like(x)] if len(outputs) % S == 0 else []
        outputs.append(part(x, n[f"{part.name}_in"](h)))
        v[-1] = v[-1] + outputs[-1]
        unwritten = [np.zeros_like(x)] * (1 + -(-2 * N // S) - len(v))
        v[:] = np.moveaxis(part.carries("sources", np.stack([*v, *unwritten], 1)), 1, 0)[: len(v)]
        x = part.end(sum(v))
        v[-1] = v[-1] + x - sum(v)  # x may have been changed
    return x


def end(x, b, norm):
    return norm(depth_attention(b["carried"]["sources"], b["end_mix_query"], b["end_mix_gain"]))


PLACES = ("block/attention", "block/feed_forward", "end")
PARAMETERS = {f"{place}_mix_query": Parameter(0.0) for place in PLACES}
PARAMETERS |= {f"{place}_mix_gain": Parameter(1.0) for place in PLACES}
CASES = [
    LayoutCase(
        name,
        partial(attention_residuals, S=S),
        Drawing(norms=2, sums=2, skips=2, factors=0),
        scaled=BOTH,
        end=end,
        parameters=PARAMETERS,
    )
    for name, S in {"attention_residuals": 1, "attention_residuals_blocks": 3}.items()
]
