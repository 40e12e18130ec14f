"""The kinds of sublayers. A new kind needs a file and a line here (docs/adding.md)."""

from dataclasses import dataclass, field

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
    """The options and the module of a kind; two are equal whatever their words. Raises TypeError if the options include some
    that the module does not read: a user could set them, and nothing would happen."""

    options: type[SublayerConfig]
    module: type[SublayerModule]
    formula: str = field(compare=False)
    paper: str = field(default="", compare=False)

    def __post_init__(self) -> None:
        if unused := unread(self.options, self.module):
            raise TypeError(
                f"{self.options.__name__} inherits options that no step of {self.module.__name__} reads: "
                f"{', '.join(unused)} (leave their classes out of {self.options.__name__}, or mark the step that reads "
                "them with @reads)"
            )


MIXERS = {
    "softmax": Kind(SoftmaxConfig, Attention, "softmax(q k^T / sqrt(K)) v for each head, then W_O", "Vaswani et al. 2017"),
    "slots": Kind(
        SlotsConfig, SlotAttention, "attention to trained memory slots alone: no mixing of tokens", "Sukhbaatar et al. 2019"
    ),
    "lambda": Kind(
        LambdaConfig,
        LambdaLayer,
        "lambda^T q, lambda a linear map made of the tokens before and at q: linear in the length; here in a causal form",
        "Bello 2021",
    ),
    "differential": Kind(
        DifferentialConfig,
        DifferentialAttention,
        "(A_1 - lambda A_2) v, two softmax maps A and v of size 2 K: half as many heads have the same parameters",
        "Ye et al. 2024",
    ),
    "value_residual": Kind(
        ValueResidualConfig,
        ValueResidualAttention,
        "softmax attention with the values a x W_V + b v_1, v_1 those of the first layer; a, b trained, 1/2 at first",
        "Zhou et al. 2024",
    ),
}

FEED_FORWARDS = {
    name: Kind(GatedConfig if f.gated else DenseConfig, FeedForward, f.formula, f.paper) for name, f in ACTIVATIONS.items()
} | {
    "moe": Kind(
        MoeFeedForwardConfig,
        MixtureOfExperts,
        "the sum of the outputs of the top_k of E experts with the highest scores of a router, times their scores",
        "Shazeer et al. 2017",
    ),
}

CROSS = {
    "softmax": Kind(
        CrossConfig, CrossAttention, "softmax attention with the keys and values of the source", "Vaswani et al. 2017"
    )
}

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
