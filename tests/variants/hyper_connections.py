"""Hyper-connections. Zhu et al. 2024, eqs. 1 to 3 and 10 to 13, with two streams."""

import numpy as np

from tests.variants.case import BOTH, Drawing, LayoutCase, Parameter


def hyper_connections(x, a, f, n, b, N):
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
        H_LXD = part.carries("streams", H_LXD)
        x = part.end(H_LXD.sum(1))
        b["carried"]["streams"] = H_LXD + ((x - H_LXD.sum(1)) / H_LXD.shape[1])[:, None]  # x may have been changed
    return x


# Sublayer k of the model reads stream k mod 2: attention the first one, and the feed-forward layer the second.
READ = {"attention": np.array([1.0, 0.0]), "feed_forward": np.array([0.0, 1.0])}
CASES = [
    LayoutCase(
        "hyper_connections",
        hyper_connections,
        Drawing(norms=2, sums=2, skips=2, factors=0),
        scaled=BOTH,
        parameters={
            f"block/{sublayer}_{name}": parameter
            for sublayer in BOTH
            for name, parameter in {
                "read": Parameter(READ[sublayer]),
                "mix": Parameter(np.eye(2)),
                "write": Parameter(1.0),
                "read_kernel": Parameter(0.0),
                "mix_kernel": Parameter(0.0, "bio"),
                "write_kernel": Parameter(0.0),
                "read_scale": Parameter(0.01),
                "write_scale": Parameter(0.01),
            }.items()
        },
    )
]
