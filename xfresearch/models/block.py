"""A block: the layout formula, in one place.

    y = skip * x + dropout(out_norm(fn(in_norm(x))))      then      y = post_norm(y)

for each sublayer of the block's layout (layouts.py) in turn, or all from the same x and summed under a parallel layout.
"""

from flax import nnx

from xfresearch.config import BlockConfig, ModelConfig
from xfresearch.models.context import Aux, Context
from xfresearch.models.costs import Costs
from xfresearch.models.layouts import LAYOUTS, norm_kind
from xfresearch.models.norms import Norm
from xfresearch.models.variants import ATTENTIONS, FEED_FORWARDS, load


def sublayer_class(name: str, block: BlockConfig):
    """The module that computes a sublayer: called as fn(x_BLD, ctx, cache) -> (y_BLD, cache, Aux)."""
    return load(ATTENTIONS[block.attention.kind] if name == "attention" else FEED_FORWARDS[block.feed_forward.kind])


class Block(nnx.Module):
    def __init__(self, model: ModelConfig, block: BlockConfig, rngs):
        self.layout, self.dropout = LAYOUTS[block.layout], block.dropout
        for sublayer in self.layout.sublayers:
            setattr(self, sublayer.name, sublayer_class(sublayer.name, block)(model, block, rngs))
            for place in sublayer.norms:
                kind = norm_kind(block, sublayer.name, place)
                setattr(self, f"{sublayer.name}_norm_{place}", Norm(model, kind, block))

    def __call__(self, x_BLD, ctx: Context, cache: dict | None = None):
        """x after the block, the caches of its sublayers by name, and their auxiliary losses and statistics."""
        start_BLD, caches, aux = x_BLD, {}, Aux()
        for sublayer in self.layout.sublayers:
            name, place = sublayer.name, ctx.at(sublayer.name)
            inputs_BLD = start_BLD if self.layout.parallel else x_BLD
            inputs_BLD = place.tap("in", self._norm(name, "in", inputs_BLD))
            y_BLD, caches[name], more = getattr(self, name)(inputs_BLD, place, cache and cache[name])
            y_BLD = place.tap("out", place.dropout(self._norm(name, "out", y_BLD), self.dropout, name))
            x_BLD = sublayer.skip * x_BLD + y_BLD if sublayer.skip else y_BLD
            x_BLD = place.tap("residual", self._norm(name, "post", x_BLD))
            aux |= more
        return x_BLD, caches, aux

    def _norm(self, sublayer: str, place: str, x_BLD):
        norm = getattr(self, f"{sublayer}_norm_{place}", None)
        return x_BLD if norm is None else norm(x_BLD)

    def init_cache(self, batch: int, length: int) -> dict:
        return {s.name: getattr(self, s.name).init_cache(batch, length) for s in self.layout.sublayers}

    @staticmethod
    def costs(model: ModelConfig, block: BlockConfig, length: int) -> Costs:
        total = Costs()
        for sublayer in LAYOUTS[block.layout].sublayers:
            total += sublayer_class(sublayer.name, block).costs(model, block, length)
            for place in sublayer.norms:
                total += Norm.costs(model.width, norm_kind(block, sublayer.name, place), block)
        return total
