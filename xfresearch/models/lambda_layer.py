"""Lambda layer (Bello 2021, LambdaNetworks, sec. 3) along a sequence, causal: the published one sees its whole context.

Keys K (R x U), queries Q (H x K) and values V (U x V) are linear in x. Each position sums its past up as a linear map from
queries to outputs, shared by all H heads (the paper's multi-query lambdas; U is its intra-depth), V = D / H:

    w_nm = exp(k_m) / sum_{m' <= n} exp(k_m')      for each u, k apart      e_j [U, K]: for each distance j < R
    lambda_n = sum_{m <= n, u} w_nm v_m^T + sum_{n-m < R, u} e_{n-m} v_m^T      content and position, [K, V]
    y_n,h = lambda_n^T q_n,h        y_n = [y_n,1 ... y_n,H], without an output matrix

The softmax over the context becomes a running one: its normaliser is that of each position. Queries and values are
normed, keys are not; over the last axis of each token, K and V, since the paper's batch norm would see later positions.
R is attention.lambdas.window, or model.max_length where that is 0 (global): values further back add to no position lambda.
A document of packed ones sees itself alone; its tokens stand together.

Parameters: D (H K + U K + U V) + R U K, and gains and biases of the two norms, K and V each.
FLOPs per token: 2 D (H K + U K + U V) and those of kernels/lambda_scan.py, with R no longer than the sequence: linear in
the length for a local window. Cache: constant for a local window; U V values per token, up to R of them, for the global one.
"""

import jax.numpy as jnp
from flax import nnx

from xfresearch.config import BlockConfig, ModelConfig
from xfresearch.kernels import lambda_scan as scan
from xfresearch.models import costs as c
from xfresearch.models.context import Aux, Context
from xfresearch.models.linear import Linear, draw, kernel_std
from xfresearch.models.norms import Norm


class LambdaLayer(nnx.Module):
    def __init__(self, model: ModelConfig, block: BlockConfig, rngs):
        a, D = block.attention, model.width
        H, V, K, U, R = a.heads, a.head_size, a.lambdas.key_size, a.lambdas.depth, _window(model, block)
        self.config, self.window, self.sizes, self.dtype = a.lambdas, R, (U, K, V), model.dtype
        self.query = Linear(model, (D,), (H, K), False, rngs)
        self.lambda_key = Linear(model, (D,), (U, K), False, rngs)
        self.lambda_value = Linear(model, (D,), (U, V), False, rngs)
        # A kernel of R U inputs for each value, contracted with a query of size K.
        self.distances = nnx.Param(draw(rngs.params(), (R, U, K), kernel_std(model, R * U * K), model))
        self.query_scaling = Norm(model, a.lambdas.norm, block, (K,))
        self.value_scaling = Norm(model, a.lambdas.norm, block, (V,))

    def __call__(self, x_BLD, ctx: Context, cache=None):
        """y_BLD, the state after the last token (None without a cache), and no auxiliary losses."""
        B, L, _ = x_BLD.shape
        q_BLHK = ctx.tap("query", self.query_scaling(self.query(x_BLD, ctx)))
        k_BLUK = ctx.tap("key", self.lambda_key(x_BLD, ctx))
        v_BLUV = ctx.tap("value", self.value_scaling(self.lambda_value(x_BLD, ctx)))
        segments_BL = (
            jnp.ones((B, L), jnp.int32) if ctx.segments_BL is None else jnp.asarray(ctx.segments_BL, jnp.int32)
        )
        state = self._empty(B, min(self.window, L)) if cache is None else cache
        e_RUK = self.distances[...][: state["values"].shape[1] + 1].astype(x_BLD.dtype)
        y_BLHV, state = scan.lambda_scan(q_BLHK, k_BLUK, v_BLUV, e_RUK, segments_BL, state, self.config.chunk)
        return ctx.tap("heads", y_BLHV).reshape(x_BLD.shape), None if cache is None else state, Aux()

    def init_cache(self, batch: int, length: int) -> dict:
        """The state before the first of at most `length` tokens."""
        return self._empty(batch, self.config.window or min(self.window, length))

    def _empty(self, batch: int, window: int) -> dict:
        return scan.empty_state(batch, window, *self.sizes, jnp.dtype(self.dtype))

    @staticmethod
    def costs(model: ModelConfig, block: BlockConfig, length: int) -> c.Costs:
        a, D, R = block.attention, model.width, _window(model, block)
        H, V, K, U, chunk = a.heads, a.head_size, a.lambdas.key_size, a.lambdas.depth, a.lambdas.chunk
        total = c.linear((D,), (H, K), False) + c.linear((D,), (U, K), False) + c.linear((D,), (U, V), False)
        total += c.weights(R * U * K) + Norm.costs(K, a.lambdas.norm, block) + Norm.costs(V, a.lambdas.norm, block)
        mixing = scan.flops_per_token(length, chunk, min(R, length), U, H, K, V)
        cached = 0 if a.lambdas.window else U * V * jnp.dtype(model.dtype).itemsize
        return total + c.Costs(flops_per_token=mixing, cache_bytes_per_token=cached)


def _window(model: ModelConfig, block: BlockConfig) -> int:
    return block.attention.lambdas.window or model.max_length
