"""The kinds of sublayers. A new kind is a file and a line here."""

from typing import NamedTuple

from xfresearch.models.feed_forwards.activations import ACTIVATIONS
from xfresearch.models.feed_forwards.dense import DenseConfig, FeedForward, GatedConfig
from xfresearch.models.feed_forwards.moe import MixtureOfExperts, MoeFeedForwardConfig
from xfresearch.models.mixers.lambda_layer import LambdaConfig, LambdaLayer
from xfresearch.models.mixers.slots import SlotAttention, SlotsConfig
from xfresearch.models.mixers.softmax.attention import Attention
from xfresearch.models.mixers.softmax.config import SoftmaxConfig
from xfresearch.models.sublayer import SublayerConfig, SublayerModule


class Kind(NamedTuple):
    options: type[SublayerConfig]
    module: type[SublayerModule]


MIXERS = {
    "softmax": Kind(SoftmaxConfig, Attention),
    "slots": Kind(SlotsConfig, SlotAttention),
    "lambda": Kind(LambdaConfig, LambdaLayer),
}

FEED_FORWARDS = {
    **{name: Kind(GatedConfig if f.gated else DenseConfig, FeedForward) for name, f in ACTIVATIONS.items()},
    "moe": Kind(MoeFeedForwardConfig, MixtureOfExperts),
}

# What a sublayer of a layout may hold: its kinds, the default one, and a line of documentation.
HOLDS = {
    "mixer": (MIXERS, "softmax", "the sublayer that mixes positions"),
    "feed_forward": (FEED_FORWARDS, "gelu", "the sublayer that acts on each position"),
}


def kind_of(options: SublayerConfig) -> Kind:
    """The kind that a sublayer's options are of. A mixer and a feed-forward layer may have kinds of one name."""
    found = (kinds.get(options.kind) for kinds, _, _ in HOLDS.values())
    return next(kind for kind in found if kind is not None and type(options) is kind.options)
