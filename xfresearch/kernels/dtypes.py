"""The dtype that sums are computed in."""

from typing import Any

import jax.numpy as jnp
import numpy as np


def wide_dtype(x: Any) -> np.dtype:
    """float32, or the dtype of the array x if that is wider."""
    return jnp.promote_types(x.dtype, jnp.float32)
