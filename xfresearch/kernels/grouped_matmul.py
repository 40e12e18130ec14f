"""Rows times the matrix of the group (expert) that they belong to: y_t = x_t w_{e(t)}, rows sorted by group.

`ragged` is jax.lax.ragged_dot, the plain form. It multiplies every row by every group's matrix, and throws the rest away:
on CPU, on GPU (always for a weight's gradient), on TPU with some versions of libtpu.

`megablox` (megablox.py) is JAX's Pallas kernel for TPU: tiles of rows, those that two groups share once for each.
`blocked` (blocked_matmul.py) is for every platform.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp

from xfresearch.kernels.blocked_matmul import blocked
from xfresearch.kernels.choice import Choice, choose
from xfresearch.kernels.megablox import megablox

BLOCKS = {"cpu": 128, "gpu": 512, "tpu": 512}  # rows of a block: few are computed twice; on a GPU they have to fill it


class Call(NamedTuple):
    """What a choice depends on."""

    platform: str  # cpu, gpu or tpu
    dtype: str = "float32"


def _refuse_megablox(call: Call) -> str:
    if call.platform != "tpu":
        return f"it is for TPU, this is {call.platform}"
    return f"it has no {call.dtype}" if call.dtype not in ("float32", "bfloat16") else ""


# name: why it cannot serve a call, '' where it can
REFUSALS = {"ragged": lambda call: "", "blocked": lambda call: "", "megablox": _refuse_megablox}
# platform: what 'auto' tries in turn, and what speaks for it
PREFERENCES = {
    "cpu": {"blocked": "computes chosen experts alone, in blocks; ragged_dot computes all of them"},
    "gpu": {
        "blocked": "computes chosen experts alone, in blocks, on any GPU; ragged_dot computes all of them for gradients"
    },
    "tpu": {
        "megablox": "computes chosen experts alone; ragged_dot computes all of them with some versions of libtpu",
        "ragged": "nothing else serves",
    },
}


def choose_grouped_matmul(call: Call, implementation="auto") -> Choice:
    """Which implementation serves `call`, and why. UserError for one asked for by name that cannot serve it."""
    preferred = PREFERENCES[call.platform]
    return choose("training.expert_kernel", implementation, call, REFUSALS, preferred, "ragged")


def grouped_matmul(x_TD, w_EDF, sizes_E, *, implementation="auto", platform=None, kind="", whole=True):
    """y_TF in x's dtype. Rows of x are sorted by group, sizes_E of them for each. `platform` is JAX's own unless given,
    `kind` the device's.

    The sizes sum to T, or, not `whole`, to fewer: the rows of y beyond are zeros, those of x's gradient mean nothing.
    """
    platform = platform or jax.default_backend()
    name = choose_grouped_matmul(Call(platform, str(x_TD.dtype)), implementation).name
    products = {
        "ragged": lambda x_TD, w_EDF, sizes_E: jax.lax.ragged_dot(x_TD, w_EDF, sizes_E.astype(jnp.int32)),
        "megablox": partial(megablox, kind=kind),
        "blocked": lambda *inputs: blocked(*inputs, BLOCKS[platform]),
    }
    y_TF = products[name](x_TD, w_EDF, sizes_E)
    return y_TF if whole else jnp.where(jnp.arange(len(y_TF))[:, None] < sizes_E.sum(), y_TF, 0)
