"""Grouped matrix product: each row times the matrix of its group (expert), y_t = x_t w_{e(t)}.

Rows are sorted by group.

`ragged` is jax.lax.ragged_dot, the plain form. On CPU, on GPU (always for a weight's gradient) and on TPU with some
versions of libtpu, it multiplies every row by every group's matrix and discards the other results.

`megablox` (megablox.py) is JAX's Pallas kernel for TPU. It works in tiles of rows; a tile shared by two groups is
computed once for each. `tokamax` (tokamax_kernels.py) is a package's kernel for GPUs. `blocked` (blocked_rows.py) supports
every platform, and computes a whole expert in one pass over the rows.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from xfresearch.kernels.blocked_rows import BIAS, by_block, with_bias
from xfresearch.kernels.choice import KernelChoice, choose
from xfresearch.kernels.defaults import EXPERTS, preferred
from xfresearch.kernels.megablox import megablox
from xfresearch.kernels.tokamax_kernels import refuse_tokamax, tokamax_ragged_dot

# The most rows in a block. Small blocks add few rows; on a GPU a block must fill the device.
BLOCKS = {"cpu": 256, "gpu": 512, "tpu": 512}


class Call(NamedTuple):
    """What the choice of a kernel depends on."""

    platform: str  # cpu, gpu or tpu
    dtype: str = "float32"


def _refuse_megablox(call: Call) -> str:
    if call.platform != "tpu":
        return f"it needs a TPU, and the platform is {call.platform}"
    return f"it does not support {call.dtype}" if call.dtype not in ("float32", "bfloat16") else ""


# name: function of a call that returns why the kernel does not support it, or ''
REFUSALS = {
    "ragged": lambda call: "",
    "blocked": lambda call: "",
    "megablox": _refuse_megablox,
    "tokamax": lambda call: refuse_tokamax(call.platform, call.dtype),
}


def choose_grouped_matmul(call: Call, implementation="auto") -> KernelChoice[str]:
    """The kernel for `call`, and the reason. Raises UserError if a kernel selected by name does not support it."""
    return choose("training.expert_kernel", implementation, call, REFUSALS, preferred(EXPERTS, call), "ragged")


def rows_per_block(platform: str, rows: int, groups: int) -> int:
    """At most half of an average group, so that `blocked` computes on average at most a quarter more rows. But not too
    few, because small products are slow."""
    most = BLOCKS[platform]
    half = 1 << max(rows // (2 * groups), 1).bit_length() - 1
    return min(max(half, most // 8), most)


def grouped(function: Callable, rows: tuple, weights: dict, sizes_E, *, saved=(), whole=True, **choice):
    """function(products, *rows): products(x, names, gates) returns for each name the product of each row of x with the
    matrix weights[name][e] of the row's group e, with its bias. `blocked` calls the function for blocks of rows (by_block
    has the arguments), and the others for all rows, with one grouped product for all names if there are many rows.

    choice: implementation, platform and kind, as in `grouped_matmul`.
    """
    platform = choice.get("platform") or jax.default_backend()
    call = Call(platform, str(rows[0].dtype))
    if choose_grouped_matmul(call, choice.get("implementation", "auto")).name == "blocked":
        block = rows_per_block(platform, len(rows[0]), len(sizes_E))
        return by_block(function, rows, weights, sizes_E, block, saved)

    def biased(y, bias_EO, gates):
        return with_bias(y, None if bias_EO is None else of_group(bias_EO, group_of_row(sizes_E, len(y))), gates)

    def products(x, names: tuple[str, ...], gates=None):
        product = partial(grouped_matmul, sizes_E=sizes_E, whole=whole, **choice)
        outputs = joined(product, x, [weights[name] for name in names])
        return [biased(y, weights.get(name + BIAS), gates) for name, y in zip(names, outputs, strict=True)]

    return function(products, *rows)


def joined(product: Callable, x_TD, matrices: list) -> list:
    """product(x, w_EDF) for each matrix, as one product with all of them side by side [E, D, N] if there are enough
    rows. The backward pass joins the matrices again instead of keeping them.

    With two matrices, the rows are read once instead of twice, in each pass, and the backward pass writes one gradient of
    them instead of two and their sum: 6 T D numbers are not moved. Joining reads and writes E D N numbers in both passes. So
    it pays from 2/3 E N rows on; here there must be E N. In decoding, with few rows, the copy would take twice as long as
    the products, which read the matrices once.
    """
    widths = [each.shape[-1] for each in matrices]
    if len(matrices) == 1 or len(x_TD) < len(matrices[0]) * sum(widths):
        return [product(x_TD, each) for each in matrices]
    side_by_side = jax.checkpoint(lambda x_TD, *each: product(x_TD, jnp.concatenate(each, -1)), prevent_cse=False)
    return jnp.split(side_by_side(x_TD, *matrices), np.cumsum(widths)[:-1], -1)


def group_of_row(sizes_E, rows: int):
    """The group [T] of each row; E for rows after the last group."""
    return jnp.searchsorted(jnp.cumsum(sizes_E), jnp.arange(rows), side="right")


@jax.custom_vjp
def of_group(x_EO, group_T):
    """x[group] of each row, zeros for group E. The gradient is a product, instead of a scatter-add row by row."""
    return jnp.take(x_EO, group_T, axis=0, mode="fill", fill_value=0)


def _of_group_forward(x_EO, group_T):
    return of_group(x_EO, group_T), (x_EO, group_T)


def _of_group_backward(residuals, dy_TO):
    x_EO, group_T = residuals
    rows_TE = jax.nn.one_hot(group_T, len(x_EO), dtype=dy_TO.dtype)
    return jnp.einsum("TE,TO->EO", rows_TE, dy_TO, precision="highest"), None


of_group.defvjp(_of_group_forward, _of_group_backward)


def grouped_matmul(x_TD, w_EDF, sizes_E, *, implementation="auto", platform=None, kind="", whole=True):
    """y_TF in x's dtype. Rows of x are sorted by group; sizes_E is the number of rows of each group.

    platform: JAX's default platform, unless given. kind: JAX's device_kind.
    whole: the sizes sum to T. Otherwise they may sum to less; then the rows of y after the last group are zeros, and
    those rows of x's gradient are undefined.
    """
    platform = platform or jax.default_backend()
    name = choose_grouped_matmul(Call(platform, str(x_TD.dtype)), implementation).name
    products: dict[str, Callable] = {
        "ragged": lambda x_TD, w_EDF, sizes_E: jax.lax.ragged_dot(x_TD, w_EDF, sizes_E.astype(jnp.int32)),
        "megablox": partial(megablox, kind=kind),
        "tokamax": tokamax_ragged_dot,
        "blocked": partial(_blocked, block=rows_per_block(platform, len(x_TD), len(sizes_E))),
    }
    y_TF = products[name](x_TD, w_EDF, sizes_E)
    return y_TF if whole else jnp.where(jnp.arange(len(y_TF))[:, None] < sizes_E.sum(), y_TF, 0)


def _blocked(x_TD, w_EDF, sizes_E, block: int):
    return by_block(_one_product, (x_TD,), {"w": w_EDF}, sizes_E, block)


def _one_product(products, x_ND):
    return products(x_ND, ("w",))[0]
