"""Hyper-connections (Zhu et al. 2024, arXiv 2409.19606, sec. 2): n residual streams instead of one.

A sublayer T reads a mixture of the streams H [n, D], which are mixed among each other, and writes to all of them:

    h = A_m^T H        H' = A_r^T H + B T(h)        x = sum of the streams, which the head reads

Each of A_m [n], A_r [n, n] and B [n] is a trained constant plus s tanh(norm(H) W), with a trained scale s. Sublayer k starts
with A_m = e_(k mod n), A_r = I, B = 1, W = 0 and s = 0.01. `norm` is LayerNorm without parameters: the gain of the
authors' norm is one of W.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from xfresearch.kernels.dtypes import wide_dtype
from xfresearch.models.connections.connection import At, Connection, Initial
from xfresearch.models.costs import Costs
from xfresearch.models.norms import NORMS
from xfresearch.models.stream import Carried


@dataclass(frozen=True)
class Hyper(Connection):
    streams: int = 2

    adds_to = "mixture"
    mixes = "several residual streams"
    parameter_names = ("read", "mix", "write", "read_kernel", "mix_kernel", "write_kernel", "read_scale", "write_scale")

    def carried(self, at: At) -> dict[str, Carried]:
        return {"streams": Carried("BLXD", (self.streams, at.width), "embedding", tap=True)}

    def parameters(self, at, branch_gain, dtype):
        n, width = self.streams, at.width
        scale = Initial(jnp.full((), 0.01, dtype), "")
        return {
            "read": Initial(jax.nn.one_hot(at.number % n, n, dtype=dtype), "X"),
            "mix": Initial(jnp.eye(n, dtype=dtype), "XX"),
            "write": Initial(jnp.ones(n, dtype), "X"),
            "read_kernel": Initial(jnp.zeros(width, dtype), "D"),
            "mix_kernel": Initial(jnp.zeros((width, n), dtype), "DX", "D", "X"),
            "write_kernel": Initial(jnp.zeros(width, dtype), "D"),
            "read_scale": scale,  # of A_m and A_r
            "write_scale": scale,
        }

    def costs(self, at: At) -> Costs:
        n = self.streams
        count = n * n + 2 * n + (n + 2) * at.width + 2
        return Costs(count, count, (6 * n + 4 * n * n) * at.width)

    def read(self, at, parameters, stream):
        h_BLXD = stream.values["streams"]
        dynamic_BLX = jnp.einsum("blxd,d->blx", _normed(h_BLXD), parameters["read_kernel"])
        read_BLX = parameters["read"] + parameters["read_scale"] * jnp.tanh(dynamic_BLX)
        return jnp.einsum("blx,blxd->bld", read_BLX.astype(h_BLXD.dtype), h_BLXD)

    def write(self, at, parameters, stream, block_BLD, y_BLD):
        h_BLXD = stream.values["streams"]
        normed_BLXD = _normed(h_BLXD)
        dynamic_BLX = jnp.einsum("blxd,d->blx", normed_BLXD, parameters["write_kernel"])
        write_BLX = parameters["write"] + parameters["write_scale"] * jnp.tanh(dynamic_BLX)
        dynamic_BLXY = jnp.einsum("blxd,dy->blxy", normed_BLXD, parameters["mix_kernel"])
        mix_BLXY = parameters["mix"] + parameters["read_scale"] * jnp.tanh(dynamic_BLXY)
        mixed_BLXD = jnp.einsum("blyx,blyd->blxd", mix_BLXY.astype(h_BLXD.dtype), h_BLXD)
        new_BLXD = mixed_BLXD + write_BLX[..., None].astype(y_BLD.dtype) * y_BLD[:, :, None]
        return stream._replace(values={**stream.values, "streams": new_BLXD})  # `carry` makes x of them

    def carry(self, at, stream, values):
        return super().carry(at, stream, values)._replace(x_BLD=values["streams"].sum(2))

    def put(self, at, stream, x_BLD):
        """A change of x is shared equally by the streams."""
        if x_BLD is stream.x_BLD:
            return stream
        change_BLXD = ((x_BLD - stream.x_BLD) / self.streams)[:, :, None]
        values = {**stream.values, "streams": stream.values["streams"] + change_BLXD}
        return stream._replace(x_BLD=x_BLD, values=values)


def _normed(h_BLXD):
    return NORMS["layer"](h_BLXD.astype(wide_dtype(h_BLXD)), 1e-5)
