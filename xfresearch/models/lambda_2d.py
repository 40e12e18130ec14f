"""Lambda layer over a plane, bidirectional, as published (Bello 2021, LambdaNetworks, sec. 3 and fig. 3).

For positions n and m of a Y x X plane, h of the H heads, V = D / H, keys [U, K], values [U, V], U the intra-depth:

    lambda_n = sum_{m, u} softmax_m(k)_m v_m^T + sum_{m, u} e_{m-n} v_m^T [K, V]        y_n,h = lambda_n^T q_n,h

e [U, K] for each relative position m - n: global, a table of (2Y - 1)(2X - 1) rows for the one `size` of plane that the
layer is built for; or local, r x r rows around n, for planes of any size (the paper's lambda convolution).
Queries and values are normed, keys are not: `batch` is the paper's, over their H K and U V channels (running statistics
under nnx's .eval()); the others are those of models/norms.py, over the last axis of each position.

Parameters: D (H K + U K + U V) + rows U K, and gains and biases of the two norms.
FLOPs per position: 2 D (H K + U K + U V) + 2 U K V + 2 rows U K V + 2 H K V, with Y X rows for the global form.
"""

from dataclasses import dataclass
from typing import Literal

import jax
import jax.numpy as jnp
from flax import nnx

from xfresearch.config import BlockConfig, ModelConfig, option
from xfresearch.errors import require
from xfresearch.models import costs as c
from xfresearch.models.linear import Linear, draw, kernel_std
from xfresearch.models.norms import Norm
from xfresearch.models.variants import NORMS


@dataclass(frozen=True)
class Lambda2dConfig:
    width: int = option(256, "width D", low=1)
    heads: int = option(4, "query heads H", low=1)
    key_size: int = option(16, "size K of keys and queries", low=1)
    depth: int = option(1, "keys and values U of a position, summed over in the lambdas", low=1)
    window: int = option(23, "side r, odd, of the local square; 0 is the whole plane", low=0)
    size: tuple[int, int] = option((0, 0), "height and width of the plane, for window = 0")
    norm: Literal["batch", *NORMS] = option("batch", "norm of queries and values")
    dtype: Literal["float32", "bfloat16", "float64"] = option("float32", "dtype of the computation")
    param_dtype: Literal["float32", "float64"] = option("float32", "dtype in which parameters are kept")


class Lambda2d(nnx.Module):
    """x_BYXD -> y_BYXD. UserError for a config whose numbers do not fit each other."""

    def __init__(self, config: Lambda2dConfig, rngs: nnx.Rngs):
        _check(config)
        D, H, K, U = config.width, config.heads, config.key_size, config.depth
        V, model = D // H, ModelConfig(width=D, dtype=config.dtype, param_dtype=config.param_dtype)
        self.config = config
        self.query = Linear(model, (D,), (H, K), False, rngs)
        self.key = Linear(model, (D,), (U, K), False, rngs)
        self.value = Linear(model, (D,), (U, V), False, rngs)
        rows = _rows(config)
        std = kernel_std(model, rows[0] * rows[1] * U * K)
        self.distances = nnx.Param(draw(rngs.params(), (*rows, U, K), std, model))
        self.query_norm = ChannelNorm(model, config.norm, (H, K), rngs)
        self.value_norm = ChannelNorm(model, config.norm, (U, V), rngs)

    def __call__(self, x_BYXD):
        x_BYXD = x_BYXD.astype(self.config.dtype)
        wide = jnp.promote_types(x_BYXD.dtype, jnp.float32)
        q_BYXHK, k_BYXUK = self.query_norm(self.query(x_BYXD)), self.key(x_BYXD)
        v_BYXUV = self.value_norm(self.value(x_BYXD))
        weights_BYXUK = jax.nn.softmax(k_BYXUK.astype(wide), (1, 2)).astype(x_BYXD.dtype)
        content_BKV = jnp.einsum("byxuk,byxuv->bkv", weights_BYXUK, v_BYXUV)
        position = _local if self.config.window else _global
        lambda_BYXKV = position(self.distances[...].astype(x_BYXD.dtype), v_BYXUV) + content_BKV[:, None, None]
        return jnp.einsum("byxkv,byxhk->byxhv", lambda_BYXKV, q_BYXHK).reshape(x_BYXD.shape)

    @staticmethod
    def costs(config: Lambda2dConfig, size: tuple[int, int]) -> c.Costs:
        """Costs of one position in a plane of `size`; the convolution's padding counts."""
        D, H, K, U, (height, width) = config.width, config.heads, config.key_size, config.depth, _rows(config)
        V, met = D // H, config.window**2 or size[0] * size[1]
        total = c.linear((D,), (H, K), False) + c.linear((D,), (U, K), False) + c.linear((D,), (U, V), False)
        total += c.weights(height * width * U * K)
        total += ChannelNorm.costs(config.norm, (H, K)) + ChannelNorm.costs(config.norm, (U, V))
        return total + c.Costs(flops_per_token=2 * U * K * V * (1 + met) + 2 * H * K * V)


class ChannelNorm(nnx.Module):
    """A norm of x[..., groups, size]: `batch` over all channels' batch and positions, the others over the last axis."""

    def __init__(self, model: ModelConfig, kind: str, channels: tuple[int, int], rngs: nnx.Rngs):
        if kind == "batch":
            dtypes = {"dtype": jnp.dtype(model.dtype), "param_dtype": jnp.dtype(model.param_dtype)}
            self.norm = nnx.BatchNorm(channels[0] * channels[1], rngs=rngs, **dtypes)
        else:
            self.norm = Norm(model, kind, BlockConfig(), channels[1:])

    def __call__(self, x):
        if isinstance(self.norm, nnx.BatchNorm):
            return self.norm(x.reshape(*x.shape[:-2], -1)).reshape(x.shape)
        return self.norm(x)

    @staticmethod
    def costs(kind: str, channels: tuple[int, int]) -> c.Costs:
        return (
            c.weights(2 * channels[0] * channels[1])
            if kind == "batch"
            else Norm.costs(channels[1], kind, BlockConfig())
        )


def _check(config: Lambda2dConfig) -> None:
    D, H, r, size = config.width, config.heads, config.window, config.size
    require(D % H == 0, "heads", H, f"a divisor of width={D}")
    require(r == 0 or r % 2 == 1, "window", r, "an odd number, with as many positions on either side, or 0")
    require(r > 0 or min(size) > 0, "size", size, "at least (1, 1) where window=0")
    require(r == 0 or size == (0, 0), "size", size, f"left out where window={r}, which serves any size")


def _rows(config: Lambda2dConfig) -> tuple[int, int]:
    """Relative positions that there are, down and across."""
    return (config.window,) * 2 if config.window else (2 * config.size[0] - 1, 2 * config.size[1] - 1)


def _local(e_rrUK, v_BYXUV):
    """Position lambdas [B, Y, X, K, V]: a convolution from U to K channels, one for each of the V value channels alike."""
    B, Y, X, U, V = v_BYXUV.shape
    v_NYXU = v_BYXUV.transpose(0, 4, 1, 2, 3).reshape(B * V, Y, X, U)
    layout = ("NHWC", "HWIO", "NHWC")
    lambda_NYXK = jax.lax.conv_general_dilated(v_NYXU, e_rrUK, (1, 1), "SAME", dimension_numbers=layout)
    return lambda_NYXK.reshape(B, V, Y, X, -1).transpose(0, 2, 3, 4, 1)


def _global(e_YXUK, v_BYXUV):
    """Position lambdas [B, Y, X, K, V] from every pair of positions; e's middle row is distance 0."""
    B, Y, X, U, V = v_BYXUV.shape
    if e_YXUK.shape[:2] != (2 * Y - 1, 2 * X - 1):
        size = tuple((n + 1) // 2 for n in e_YXUK.shape[:2])
        require(False, "size", size, f"the plane's {(Y, X)} where window=0")
    down, across = (jnp.arange(n) - jnp.arange(n)[:, None] + n - 1 for n in (Y, X))
    e_YXyxUK = e_YXUK[down[:, None, :, None], across[None, :, None, :]]
    return jnp.einsum("nmyxuk,byxuv->bnmkv", e_YXyxUK, v_BYXUV)
