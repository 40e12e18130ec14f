"""The output head: logits = softcap(scale x table^T + bias), for the final hidden states x."""

from dataclasses import dataclass, replace
from functools import partial

import jax
import jax.numpy as jnp

from xfresearch.kernels.dtypes import wide_dtype
from xfresearch.kernels.softcap import softcap_slope, softcapped


@partial(jax.tree_util.register_dataclass, data_fields=["table_VD", "bias_V"], meta_fields=["softcap", "scale", "ids"])
@dataclass(frozen=True)
class Head:
    """The arrays of an output head, or a value for each of them: a gradient, a sharding."""

    table_VD: jax.Array  # in the computation's dtype
    bias_V: jax.Array | None = None
    softcap: float = 0.0  # 0 is none
    scale: float = 1.0  # of the hidden states
    ids: int = 0  # number of ids, if rows of zeros follow them in the table; 0 if not

    def padded(self, multiple: int) -> "Head":
        """This head with rows of zeros in its table, up to a multiple. Its logits and the gradients of x and the bias have
        the same shapes as before: only the matrix products are larger."""
        V = self.table_VD.shape[0]
        if V % multiple == 0:
            return self
        return replace(self, table_VD=_with_rows(self.table_VD, V + -V % multiple, axis=0), ids=V)

    def unpadded(self) -> "Head":
        """This head, or its gradient, without those rows."""
        return replace(self, table_VD=self.table_VD[: self.ids], ids=0) if self.ids else self

    def logits(self, x):
        """Logits [..., V] for x [..., D], float32 or wider."""
        wide = wide_dtype(x)
        logits = jnp.einsum("...D,VD->...V", self._scaled(x), self.table_VD, preferred_element_type=wide)
        logits = logits[..., : self.ids] if self.ids else logits
        logits = logits if self.bias_V is None else logits + self.bias_V.astype(wide)
        return softcapped(logits, self.softcap)

    def gradients(self, x_TD, logits_TV, dlogits_TV, table="VD"):
        """A loss's gradients (dx_TD, dtable, dbias_V or None), float32 or wider, from x, its logits and their gradient.
        table: the axes of dtable, VD or DV."""
        wide = dlogits_TV.dtype
        dlogits_TV = dlogits_TV * softcap_slope(logits_TV, self.softcap)
        dbias_V = None if self.bias_V is None else dlogits_TV.sum(0)
        dlogits_TV = _with_rows(dlogits_TV.astype(x_TD.dtype), self.table_VD.shape[0], axis=1)
        dx_TD = jnp.einsum("TV,VD->TD", dlogits_TV, self.table_VD, preferred_element_type=wide)
        dtable = jnp.einsum(f"TV,TD->{table}", dlogits_TV, self._scaled(x_TD), preferred_element_type=wide)
        return self._scaled(dx_TD), dtable, dbias_V

    def _scaled(self, x):
        return x if self.scale == 1.0 else x * jnp.asarray(self.scale, x.dtype)


def _with_rows(x, count: int, axis: int):
    """x with zeros at the end of an axis, up to `count` numbers."""
    widths = [(0, count - x.shape[axis] if i == axis else 0) for i in range(x.ndim)]
    return jnp.pad(x, widths) if x.shape[axis] < count else x
