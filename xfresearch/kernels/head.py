"""The head, which makes logits of the final hidden states x: softcap(x table^T + bias)."""

from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp

from xfresearch.kernels.softcap import softcap_slope, softcapped


@partial(jax.tree_util.register_dataclass, data_fields=["table_VD", "bias_V"], meta_fields=["softcap"])
@dataclass(frozen=True)
class Head:
    """Arrays of a head, or what stands in their places: gradients, ways to lie on a mesh."""

    table_VD: jax.Array  # in the dtype of the computation
    bias_V: jax.Array | None = None
    softcap: float = 0.0  # 0 is none

    def logits(self, x):
        """Logits [..., V] of x [..., D], float32 or wider."""
        wide = jnp.promote_types(x.dtype, jnp.float32)
        logits = jnp.einsum("...D,VD->...V", x, self.table_VD, preferred_element_type=wide)
        logits = logits if self.bias_V is None else logits + self.bias_V.astype(wide)
        return softcapped(logits, self.softcap)

    def gradients(self, x_TD, logits_TV, dlogits_TV):
        """(dx_TD, the head's own) of a loss, float32 or wider, from its gradient by the logits that x has."""
        wide = dlogits_TV.dtype
        dlogits_TV = dlogits_TV * softcap_slope(logits_TV, self.softcap)
        dbias_V = None if self.bias_V is None else dlogits_TV.sum(0)
        dlogits_TV = dlogits_TV.astype(x_TD.dtype)
        dx_TD = jnp.einsum("TV,VD->TD", dlogits_TV, self.table_VD, preferred_element_type=wide)
        dtable_VD = jnp.einsum("TV,TD->VD", dlogits_TV, x_TD, preferred_element_type=wide)
        return dx_TD, Head(dtable_VD, dbias_V, self.softcap)
