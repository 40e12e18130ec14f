"""Cross-attention: softmax attention whose keys and values are of a source, the encoding of another sequence.

    q_BLHK = x W_Q    k_BSGK = s W_K    v_BSGV = s W_V    o = softmax([scale q Mk^T, scale q k^T]) [Mv; v]    y = o W_O

x is the decoder's stream, of width D, and s the output of the encoder, of width W (Vaswani et al. 2017, sec. 3.2.3). A token
attends to all tokens of the source with its own segment id. Each of the four matrices is learned or omitted, as in attention
to the sequence itself, whose steps and options it shares. `merged` is one matrix W_h of size D x W for each head.

Parameters: D H K + W G K + W G V + H V D + M G (K + V), without omitted matrices, and their biases.
FLOPs: for each token of the decoder 2 per weight of W_Q and W_O + 2 H (K + V) (S + M); for each token of the source 2 per
weight of W_K and W_V. Cache: G (K + V) values for each token of the source, computed once; none for a new token.
"""

from dataclasses import dataclass
from typing import ClassVar

import jax
import jax.numpy as jnp

from xfresearch.kernels.masks import EVERYTHING
from xfresearch.models.context import Aux, Context
from xfresearch.models.costs import Costs, shared_by
from xfresearch.models.mixers import key_values
from xfresearch.models.mixers.softmax.attention import Attention, Projected, cache_shapes, parts_costs
from xfresearch.models.mixers.softmax.config import HEAD_OPTIONS, Attending, heads_in_words
from xfresearch.models.mixers.softmax.options import MemoryOptions, OutputOptions, ProjectOptions, WeightOptions
from xfresearch.models.place import Place, Rows
from xfresearch.models.sublayer import reads
from xfresearch.options.fields import changed
from xfresearch.runtime.errors import require


@dataclass(frozen=True)
class CrossConfig(Attending):
    # Tokens of two sequences have no distance, so nothing depends on it.
    position: ClassVar[str] = "none"
    span: ClassVar[str] = "full"
    shaping: ClassVar[str] = "none"
    window: ClassVar[int] = 0
    sees_itself: ClassVar[bool] = True

    @property
    def attends(self) -> bool:
        return False  # not to the tokens of its own sequence

    @property
    def of_source(self) -> tuple[str, ...]:
        return ("key", "value")

    @property
    def words(self) -> str:
        return ", ".join([heads_in_words(self, "heads on the source"), *changed(self, *HEAD_OPTIONS)])

    def resolved(self, place: Place, key: str) -> "CrossConfig":
        allowed = "in a model without an encoder: it reads the source, so set model.stacks.encoder or another layout"
        require(place.source_width > 0, key, "cross-attention", f"left out {allowed}")
        return self.projected(place, key)


class CrossAttention(Attention):
    @reads(ProjectOptions, WeightOptions, MemoryOptions, OutputOptions)
    def __call__(self, x_BLD, ctx: Context, cache=None):
        """y_BLD, the unchanged cache, and no losses. A cache has the keys and values of the source already."""
        k_BSGK, v_BSGV = self._of_source(ctx) if cache is None else self._cached(cache, len(x_BLD))
        p = self._tapped(Projected(self.queries(x_BLD, ctx), k_BSGK, v_BSGV), ctx)
        memory = self.slots(p.q_BLHK.dtype) if cache is None else cache.get("memory")
        q_segments_BL, k_segments_BS = _segments(ctx, x_BLD, k_BSGK)
        o_BLHV = self.weighed(
            p,
            p.k_BLGK,
            p.v_BLGV,
            memory,
            ctx,
            q_segments_BL=q_segments_BL,
            k_segments_BS=k_segments_BS,
            mask=EVERYTHING,
            implementation="plain",  # the only one for queries and keys of different lengths
        )
        return self.output_step(ctx.tap("heads", ctx.shard(o_BLHV, "BLHK")), x_BLD, ctx), cache, Aux()

    def _of_source(self, ctx: Context):
        assert ctx.source is not None
        return self.keys_and_values(ctx.source.x_BSW, ctx)

    def _cached(self, cache: dict, batch: int):
        """The keys and values of the source, k_BSGK and v_BSGV."""
        heads = (self.sizes.key_heads, self.sizes.qk), (self.sizes.value_heads, self.sizes.v)
        return key_values.read(cache, *(jax.ShapeDtypeStruct((batch, 1, *each), self.dtype) for each in heads))

    def init_cache(self, batch: int, length: int) -> dict:
        memory = self.slots(jnp.dtype(self.dtype))
        return {"memory": memory} if memory else {}

    def source_cache(self, ctx: Context) -> dict:
        k_BSGK, v_BSGV = self._of_source(ctx)
        batch, length = k_BSGK.shape[:2]
        empty = key_values.empty(cache_shapes(self.options, self.sizes), batch, length, self.dtype)
        return key_values.extended(empty, k_BSGK, v_BSGV, 0)

    @staticmethod
    def costs(place: Place, length: int) -> Costs:
        read_once = {"key", "value"}
        total = Costs()
        for name, each in parts_costs(place, place.source_length).items():
            flops = each.flops_per_token
            flops = shared_by(flops * place.source_length, length) if name in read_once else flops
            total += Costs(each.parameters, each.active_parameters, flops)
        return total

    @staticmethod
    def kernel(place: Place, length: int, rows: Rows, execution, mesh):
        return None


def _segments(ctx: Context, x_BLD, k_BSGK):
    """Segment ids of the queries [B, L] and of the keys [B, S]; None and None if neither has any."""
    assert ctx.source is not None
    queries, keys = ctx.segments_BL, ctx.source.segments_BS
    if queries is None and keys is None:
        return None, None
    given = (queries, x_BLD), (keys, k_BSGK)
    queries, keys = (jnp.ones(x.shape[:2], jnp.int32) if ids is None else ids for ids, x in given)
    return queries, keys
