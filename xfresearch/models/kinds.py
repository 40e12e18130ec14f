"""The kinds of sublayers. A new kind needs a file and a line here (docs/adding.md)."""

from dataclasses import dataclass

from xfresearch.models.feed_forwards.activations import ACTIVATIONS
from xfresearch.models.feed_forwards.dense import DenseConfig, FeedForward, GatedConfig
from xfresearch.models.feed_forwards.moe import MixtureOfExperts, MoeFeedForwardConfig
from xfresearch.models.mixers.differential import DifferentialAttention, DifferentialConfig
from xfresearch.models.mixers.lambda_layer import LambdaConfig, LambdaLayer
from xfresearch.models.mixers.slots import SlotAttention, SlotsConfig
from xfresearch.models.mixers.softmax.attention import Attention
from xfresearch.models.mixers.softmax.config import SoftmaxConfig
from xfresearch.models.mixers.softmax.cross import CrossAttention, CrossConfig
from xfresearch.models.mixers.value_residual import ValueResidualAttention, ValueResidualConfig
from xfresearch.models.sublayer import SublayerConfig, SublayerModule, unread


@dataclass(frozen=True)
class Kind:
    """The options and the module of a kind. Raises TypeError if the options include some that the module does not read:
    a user could set them, and nothing would happen."""

    options: type[SublayerConfig]
    module: type[SublayerModule]

    def __post_init__(self) -> None:
        if unused := unread(self.options, self.module):
            raise TypeError(
                f"{self.options.__name__} inherits options that no step of {self.module.__name__} reads: "
                f"{', '.join(unused)} (leave their classes out of {self.options.__name__}, or mark the step that reads "
                "them with @reads)"
            )


MIXERS = {
    "softmax": Kind(SoftmaxConfig, Attention),
    "slots": Kind(SlotsConfig, SlotAttention),
    "lambda": Kind(LambdaConfig, LambdaLayer),
    "differential": Kind(DifferentialConfig, DifferentialAttention),
    "value_residual": Kind(ValueResidualConfig, ValueResidualAttention),
}

FEED_FORWARDS = {
    **{name: Kind(GatedConfig if f.gated else DenseConfig, FeedForward) for name, f in ACTIVATIONS.items()},
    "moe": Kind(MoeFeedForwardConfig, MixtureOfExperts),
}

CROSS = {"softmax": Kind(CrossConfig, CrossAttention)}

# For each role of a sublayer: the kinds, the default kind, and a line of documentation.
ROLES = {
    "mixer": (MIXERS, "softmax", "sublayer that mixes positions"),
    "cross": (CROSS, "softmax", "sublayer that reads the encoder's output"),
    "feed_forward": (FEED_FORWARDS, "gelu", "sublayer that acts on each position alone"),
}


def kind_of(options: SublayerConfig) -> Kind:
    """The kind of a sublayer, given its options."""
    # Mixers and feed-forward layers may have kinds of the same name, so the class decides too.
    candidates = (kinds.get(options.kind) for kinds, _, _ in ROLES.values())
    return next(kind for kind in candidates if kind is not None and type(options) is kind.options)
