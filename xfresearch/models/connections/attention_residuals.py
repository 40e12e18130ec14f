"""Attention residuals (Kimi Team 2026, arXiv 2603.15031, eqs. 2 to 6): a sublayer attends to the outputs before it.

Sublayer i reads a mixture of the sources v_j: the embedding, and the sums of `per_source` outputs each, of which the last
one may not be complete:

    h_i = sum_j softmax_j(q_i . RMSNorm_i(v_j)) v_j        x = sum of the sources

q_i [D] starts at 0, so that a mixture starts as a mean. The final norm reads one more mixture. All sources have a place
from the first layer on, so that layers can be scanned; the softmax is over those that have been written.
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
class AttentionResiduals(Connection):
    per_source: int = 1  # sublayers whose outputs are summed: 1, or S of the paper's block form

    adds_to = "mixture"
    mixes = "a list of outputs"
    reads_mean = "the mixture of outputs depends on their mean, which RMSNorm keeps"
    ends_with = ("sources",)
    end_formula = "norm(a mixture of all outputs)"
    parameter_names = end_names = ("mix_query", "mix_gain")

    def carried(self, at: At) -> dict[str, Carried]:
        return {"sources": Carried("BLXD", (1 + self._written(at.sublayers), at.width), "embedding_first", tap=True)}

    def _written(self, sublayers):
        """The number of sums after so many sublayers, and the place of the last one, where 0 is the embedding's."""
        return -(-sublayers // self.per_source)

    def parameters(self, at, branch_gain, dtype):
        return {
            "mix_query": Initial(jnp.zeros(at.width, dtype), "D"),
            "mix_gain": Initial(jnp.ones(at.width, dtype), "D"),
        }

    def costs(self, at: At) -> Costs:
        return Costs(2 * at.width, 2 * at.width, 4 * at.width * (1 + self._written(at.sublayers)))

    def read(self, at, parameters, stream):
        v_BLXD = stream.values["sources"].astype(wide_dtype(stream.x_BLD))
        k_BLXD = NORMS["rms"](v_BLXD, 1e-6) * parameters["mix_gain"]
        logits_BLX = jnp.einsum("blxd,d->blx", k_BLXD, parameters["mix_query"].astype(v_BLXD.dtype))
        known_X = jnp.arange(v_BLXD.shape[2]) <= self._written(at.number)
        p_BLX = jax.nn.softmax(jnp.where(known_X, logits_BLX, -jnp.inf))
        return jnp.einsum("blx,blxd->bld", p_BLX, v_BLXD).astype(stream.x_BLD.dtype)

    def write(self, at, parameters, stream, block_BLD, y_BLD):
        v_BLXD = stream.values["sources"].at[:, :, self._written(at.after.number)].add(y_BLD)
        return stream._replace(values={**stream.values, "sources": v_BLXD})  # `carry` makes x of them

    def carry(self, at, stream, values):
        return super().carry(at, stream, values)._replace(x_BLD=values["sources"].sum(2))

    def put(self, at, stream, x_BLD):
        """A change of x is one of the last source."""
        if x_BLD is stream.x_BLD:
            return stream
        v_BLXD = stream.values["sources"].at[:, :, self._written(at.number)].add(x_BLD - stream.x_BLD)
        return stream._replace(x_BLD=x_BLD, values={**stream.values, "sources": v_BLXD})

    def end_parameters(self, at, dtype):
        return self.parameters(at, 0.0, dtype)

    def end_costs(self, at: At) -> Costs:
        return self.costs(at)

    def end(self, at, parameters, final_norm, stream):
        return final_norm(self.read(at, parameters, stream))
