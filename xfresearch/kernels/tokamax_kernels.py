"""Kernels of the package tokamax for NVIDIA GPUs: attention and the grouped matrix product.

They are selected by name only: `auto` does not choose them until a test on a GPU has compared them with float32
(kernels/defaults.py has what was measured). The package is optional (pip install "xfresearch[gpu]") and slow to import.
"""

import importlib.util

import jax.numpy as jnp

from xfresearch.kernels.masks import Mask, visible
from xfresearch.kernels.on_mesh import on_mesh
from xfresearch.runtime.errors import UserError
from xfresearch.sharding.partition import activation_spec

ATTENTION = ("mosaic", "triton")  # in the order in which they are tried
PRODUCT = ("mosaic",)


def refuse_tokamax(platform: str, dtype: str, capability: tuple[int, ...] = (8, 0)) -> str:
    """Why no kernel of tokamax can run here, or ''."""
    if platform != "gpu":
        return f"it needs a GPU, and the platform is {platform}"
    if capability < (8, 0):
        return "it needs an NVIDIA GPU of compute capability 8.0 or higher (A100)"
    if dtype not in ("bfloat16", "float16", "float32"):
        return f"it does not support {dtype}"
    installed = importlib.util.find_spec("tokamax") is not None
    return "" if installed else 'it needs the package tokamax: pip install "xfresearch[gpu]", with Python 3.12 or later'


def tokamax_attention(q_BLHK, k, v, memory, segments, mask: Mask, mesh=None, bias=None):
    """o_BLHV for queries and keys at the same positions, from 0, without slots. q is already scaled.

    segments: (of queries, of keys) or None. bias: added to the logits, [1 or B, H, L, S]; -inf hides a key.
    """
    import tokamax

    assert memory is None and not mask.nearest

    def local(bias, q, k, v, memory, segments):
        distance_LS = jnp.arange(q.shape[1])[:, None] - jnp.arange(k.shape[1])
        hidden = None if segments is None else visible(distance_LS, mask, segments)[:, None]
        window = (mask.window - 1, 0) if mask.window else None
        if bias is not None:
            bias = jnp.maximum(bias, -(2.0**41)).astype(q.dtype)
        named: dict = {"scale": 1.0, "is_causal": mask.causal, "local_window_size": window}
        named |= {"implementation": ATTENTION}
        return _supported("attention_kernel", lambda: tokamax.dot_product_attention(q, k, v, bias, hidden, **named))

    spec = None
    if mesh is not None and bias is not None:
        spec = activation_spec(mesh, "NHLS" if bias.shape[0] == 1 else "BHLS", bias.shape)
    return on_mesh(local, mesh, q_BLHK, k, v, None, segments, keys="S", extra=bias, extra_spec=spec)


def tokamax_ragged_dot(x_TD, w_EDF, sizes_E):
    """y_TF in x's dtype. Rows of x are sorted by group; rows after the last group are undefined."""
    import tokamax

    sizes_E = sizes_E.astype(jnp.int32)
    named = {"preferred_element_type": x_TD.dtype, "implementation": PRODUCT, "bypass_device_check": False}
    return _supported("expert_kernel", lambda: tokamax.ragged_dot(x_TD, w_EDF, sizes_E, **named))


def _supported(option: str, call):
    """call(). Raises UserError if no kernel of tokamax supports it on this GPU."""
    try:
        return call()
    except* NotImplementedError as errors:
        reasons = "; ".join(str(error) for error in errors.exceptions)
        raise UserError(f"config.training.{option}='tokamax' is not allowed here: {reasons}") from errors
