"""Lambda layer (Bello 2021, LambdaNetworks, sec. 3) along a sequence. It is causal; the published layer sees its whole
context.

Keys (U x K), queries (H x K) and values (U x V) are linear in x. Each position summarises its past as a linear map from
queries to outputs, which all H heads share (the paper's multi-query lambdas; U is its intra-depth), V = D / H:

    w_nm = exp(k_m) / sum_{m' <= n} exp(k_m')      for each u and k         e_j [U, K]: for each distance j < R
    lambda_n = sum_{m <= n, u} w_nm v_m^T + sum_{n-m < R, u} e_{n-m} v_m^T      content and position, [K, V]
    y_n,h = lambda_n^T q_n,h        y_n = [y_n,1 ... y_n,H], without an output matrix

The softmax over the context is a running one, normalised at each position. Queries and values have norms, keys have
none. The norms are over the last axis, K or V, because the paper's batch norm would see later positions. R is
lambdas.window, or model.max_length if that is 0 (global). Values at larger distances are in no position lambda. In a
packed sequence each document sees only itself; the tokens of a document are contiguous.

Parameters: D (H K + U K + U V) + R U K, and gains and biases of the two norms, K and V each.
FLOPs per token: 2 D (H K + U K + U V) and those of kernels/lambda_scan.py, with R at most the length of the sequence:
linear in the length for a local window.
Cache: constant for a local window; U V values per token, of at most R tokens, for the global one.
"""

from dataclasses import dataclass, replace

import jax.numpy as jnp

from xfresearch.kernels import lambda_scan as scan
from xfresearch.models.context import Aux, Context
from xfresearch.models.costs import Costs, weights
from xfresearch.models.linear import Linear, Shape
from xfresearch.models.norms import Norm, NormKind
from xfresearch.models.parameters import draw, kernel_std, parameter
from xfresearch.models.place import Place
from xfresearch.models.sublayer import SublayerConfig, SublayerModule
from xfresearch.options.fields import group, option
from xfresearch.runtime.errors import UserError, require


@dataclass(frozen=True)
class LambdaSizes:
    key_size: int = option(16, "size K of keys and queries", low=1)
    window: int = option(23, "number of tokens R of a position lambda, its own included; 0 for model.max_length", low=0)
    depth: int = option(1, "number of keys and values U of a token, over which its lambda sums", low=1)
    norm: NormKind = option("layer", "norm of queries and values")
    chunk: int = option(32, "tokens computed at a time; 16 to 32 are fastest on CPU", low=1, decides="execution")


@dataclass(frozen=True)
class LambdaConfig(SublayerConfig):
    kind: str = option("lambda", "kind of mixer")
    heads: int = option(4, "number of query heads H, a divisor of the width", low=1)
    lambdas: LambdaSizes = group(LambdaSizes(), "sizes of the lambdas")

    @property
    def words(self) -> str:
        s = self.lambdas
        reach = f"the last {s.window} tokens" if s.window else "all tokens before"
        return f"{self.heads} lambda heads with keys of {s.key_size}, positions of {reach}"

    @property
    def norm_kinds(self) -> tuple[str, ...]:
        return (self.lambdas.norm,)

    @property
    def without_prefix(self) -> str:
        return "kind='lambda' is causal"

    def resolved(self, place: Place, key: str) -> "LambdaConfig":
        allowed = f"a divisor of model.width={place.width}: each head has width / heads values"
        require(place.width % self.heads == 0, f"{key}.heads", self.heads, allowed)
        require(place.causal, "model.causal", False, f"True with {key}.kind='lambda', which is causal")
        allowed = f"at least 1 with {key}.lambdas.window=0, which covers that length"
        require(self.lambdas.window > 0 or place.max_length > 0, "model.max_length", place.max_length, allowed)
        return self


class LambdaLayer(SublayerModule):
    def __init__(self, place: Place, rngs):
        s = place.options.lambdas
        shapes = _matrices(place)
        U, K, V = s.depth, s.key_size, place.width // place.options.heads
        R = _window(place)
        self.sizes = s
        self.window = R
        self.dtype = place.dtype
        self.state_sizes = U, K, V
        self.query = Linear(place, shapes["query"], rngs)
        self.lambda_key = Linear(place, shapes["key"], rngs)
        self.lambda_value = Linear(place, shapes["value"], rngs)
        # A kernel with R U inputs for each value, which is contracted with a query of size K.
        distances = draw(rngs.params(), (R, U, K), kernel_std(place, R * U * K), place.param_dtype)
        self.distances = parameter(distances, "RUK")
        norm = replace(place.norm, kind=s.norm)
        self.query_scaling = Norm(norm, "K", (K,), place.param_dtype)
        # Without an output matrix the layer writes the values themselves.
        self.value_scaling = Norm(replace(norm, scale=place.output_scale), "K", (V,), place.param_dtype)

    def __call__(self, x_BLD, ctx: Context, cache=None):
        """y_BLD, the state after the last token (None without a cache), and no losses."""
        B, L, _ = x_BLD.shape
        q_BLHK = ctx.tap("query", self.query_scaling(self.query(x_BLD, ctx)))
        k_BLUK = ctx.tap("key", self.lambda_key(x_BLD, ctx))
        v_BLUV = ctx.tap("value", self.value_scaling(self.lambda_value(x_BLD, ctx)))
        segments_BL = jnp.ones((B, L), jnp.int32)
        if ctx.segments_BL is not None:
            segments_BL = jnp.asarray(ctx.segments_BL, jnp.int32)
        state = self._empty(B, min(self.window, L)) if cache is None else cache
        e_RUK = self.distances[...][: state["values"].shape[1] + 1].astype(x_BLD.dtype)
        rest = (e_RUK, segments_BL, state, self.sizes.chunk)
        y_BLHV, state = scan.lambda_scan(q_BLHK, k_BLUK, v_BLUV, *rest)
        if ctx.wants("state", "weights"):
            y_BLHV = self._tapped(y_BLHV, (q_BLHK, k_BLUK, v_BLUV, *rest), ctx, cache is not None)
        return ctx.tap("heads", y_BLHV).reshape(x_BLD.shape), None if cache is None else state, Aux()

    def _tapped(self, y_BLHV, inputs: tuple, ctx: Context, decoding: bool):
        """y_BLHV, computed from the maps or from the weights of the values if a patch changes one of them."""
        q_BLHK, k_BLUK, v_BLUV, *rest = inputs
        if ctx.wants("weights") and (decoding or ctx.changes("weights") and ctx.changes("state")):
            raise UserError("a lambda layer has no weights while it decodes, nor while its state is replaced")
        if ctx.wants("state"):
            lambda_BLKV = ctx.tap("state", scan.lambdas(k_BLUK, v_BLUV, *rest))
            y_BLHV = jnp.einsum("blhk,blkv->blhv", q_BLHK, lambda_BLKV) if ctx.changes("state") else y_BLHV
        if ctx.wants("weights"):
            weights_BHLSU = ctx.tap("weights", scan.weights(q_BLHK, k_BLUK, *rest))
            y_BLHV = jnp.einsum("bhlsu,bsuv->blhv", weights_BHLSU, v_BLUV) if ctx.changes("weights") else y_BLHV
        return y_BLHV

    def init_cache(self, batch: int, length: int) -> dict:
        """The initial state for at most `length` tokens."""
        return self._empty(batch, self.sizes.window or min(self.window, length))

    def _empty(self, batch: int, window: int) -> dict:
        return scan.empty_state(batch, window, *self.state_sizes, jnp.dtype(self.dtype))

    @staticmethod
    def costs(place: Place, length: int) -> Costs:
        s = place.options.lambdas
        H = place.options.heads
        U, K, V = s.depth, s.key_size, place.width // H
        R = _window(place)
        norm = replace(place.norm, kind=s.norm)
        total = sum((shape.costs() for shape in _matrices(place).values()), weights(R * U * K))
        total += norm.costs(K) + norm.costs(V)
        mixing = scan.flops_per_token(length, s.chunk, min(R, length), U, H, K, V)
        cached = 0 if s.window else U * V * jnp.dtype(place.dtype).itemsize
        return total + Costs(flops_per_token=mixing, cache_bytes_per_token=cached)


def _matrices(place: Place) -> dict[str, Shape]:
    """The shape of each learned matrix."""
    D, H = place.width, place.options.heads
    s = place.options.lambdas
    return {
        "query": Shape("D->HK", D, H, s.key_size),
        "key": Shape("D->UK", D, s.depth, s.key_size),
        "value": Shape("D->UK", D, s.depth, D // H),
    }


def _window(place: Place) -> int:
    return place.options.lambdas.window or place.max_length
