"""Options of softmax attention, grouped by the step that reads them: project, position, attend, output.

`SoftmaxConfig` inherits from all of these classes, so the keys are one flat list. A mixer with other steps composes its
config from the classes of the steps that it shares.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from xfresearch.models.feed_forwards.activations import ACTIVATIONS
from xfresearch.models.norms import NormKind
from xfresearch.models.positions import AttentionPosition
from xfresearch.options.fields import Needs, group, option, unless, where

PROJECTIONS = ("query", "key", "value", "output")
NOT_MERGED = unless(query="merged")
SLOTS = Needs("memory_slots above 0", lambda a: a.memory_slots > 0)
SLOTS_IN_SOFTMAX = Needs(
    "memory_slots above 0 and memory_activation='softmax'",
    lambda a: a.memory_slots > 0 and a.memory_activation == "softmax",
)
SINK = Needs(
    "shaping='none', and 'learned' only without memory_slots, whose logits it would not shift",
    lambda a: a.shaping == "none" and (a.sink != "learned" or not a.memory_slots),
)
if TYPE_CHECKING:  # a checker cannot read the values of a table
    MemoryActivation = str
else:
    MemoryActivation = Literal["softmax", *[name for name, a in ACTIVATIONS.items() if a.elementwise and not a.gated]]


@dataclass(frozen=True)
class ProjectOptions:
    """Options of queries, keys and values."""

    heads: int = option(4, "number of query heads H", low=1)
    kv_heads: int = option(0, "number of key-value heads G, a divisor of H; 0 for H, 1 is multi-query", low=0)
    head_size: int = option(0, "size K of a head; 0 for width / heads", low=0)
    query: Literal["learned", "identity", "identity_whole", "merged"] = option(
        "learned",
        "queries: a matrix, the input split among the heads (identity), the whole input for every head, or one matrix "
        "per head that replaces those of query and key (merged)",
    )
    rank: int = option(0, "rank with query = 'merged'; 0 for full rank", low=0, needs=where(query="merged"))
    key: Literal["learned", "identity", "identity_whole"] = option("learned", "keys, as for queries")
    value: Literal["learned", "identity", "identity_whole", "identity_plus", "key"] = option(
        "learned",
        "values, as for queries; identity_plus: a trained matrix a I + b W, initially a = b = 1 and W = 0; key: the "
        "keys before their norm and rotation",
    )
    qk_norm: NormKind = option("none", "norm of queries and keys", needs=NOT_MERGED)
    qk_norm_over: Literal["head", "heads"] = option(
        "head", "norm over each head, or over all heads of a token together", needs=unless(qk_norm="none")
    )
    clip: float = option(
        0.0,
        "clip queries, keys and values to [-clip, clip], after norms and before RoPE (OLMo); 0 for no clipping",
        low=0.0,
        needs=NOT_MERGED,
    )
    bias: tuple[str, ...] = option((), "projections with a bias: names among 'query', 'key', 'value', 'output'")


@dataclass(frozen=True)
class RopeConfig:
    theta: float = option(10_000.0, "base of the frequencies", low=1.0)
    fraction: float = option(1.0, "share of each head's dimensions to rotate, from the first on", low=0.0, high=1.0)
    scaling: Literal["none", "linear", "llama3", "yarn"] = option(
        "none", "how frequencies are scaled for a longer context"
    )
    factor: float = option(8.0, "number that scaled frequencies are divided by", low=1.0, needs=unless(scaling="none"))
    low_frequency: float = option(
        1.0,
        "frequencies with fewer rotations in original_length are scaled",
        low=0.0,
        needs=where(scaling=("llama3", "yarn")),
    )
    high_frequency: float = option(
        4.0,
        "frequencies with more rotations in original_length are not scaled (YaRN's authors: 32)",
        low=0.0,
        needs=where(scaling=("llama3", "yarn")),
    )
    original_length: int = option(
        8192, "context length of the original training", low=1, needs=where(scaling=("llama3", "yarn"))
    )
    attention_factor: float = option(
        0.0,
        "factor of rotated queries and keys; 0 for 0.1 ln(factor) + 1",
        low=0.0,
        needs=where(scaling="yarn"),
    )
    truncate: bool = option(
        True, "yarn blends between whole dimensions, as its authors' code does", needs=where(scaling="yarn")
    )


@dataclass(frozen=True)
class PositionOptions:
    """Options of positions inside attention."""

    position: AttentionPosition = option(
        "none", "positions inside attention; all layers share the tables of relative_key and t5"
    )
    rope: RopeConfig = group(RopeConfig(), "frequencies of rotary positions", needs=where(position="rope"))
    t5_buckets: int = option(32, "number of buckets of distances", low=4, needs=where(position="t5"))
    t5_distance: int = option(
        128, "distance from which on all are in the last bucket", low=4, needs=where(position="t5")
    )


@dataclass(frozen=True)
class WeightOptions:
    """Options of the weights, whatever is attended to."""

    scale: float = option(0.0, "factor of the logits; 0 for 1/sqrt(size of a query), of head_size if merged", low=0.0)
    softcap: float = option(
        0.0, "c in c tanh(q k / c), before biases and the mask (Gemma 2: 50); 0 for no softcap", low=0.0
    )
    sink: Literal["none", "off_by_one", "learned"] = option(
        "none",
        "a term added to the denominator of the softmax: 1 (off-by-one softmax), or e^b with a trained b for each head",
        needs=SINK,
    )
    dropout: float = option(0.0, "dropout rate of the attention weights", low=0.0, high=0.99, decides="training")


@dataclass(frozen=True)
class AttendOptions:
    """Options of the weights over the tokens of the sequence itself."""

    sees_itself: bool = option(True, "a token attends to itself, and not only to earlier tokens")
    window: int = option(0, "number of nearest tokens that a token attends to; 0 for all", low=0)
    span: Literal["full", "adaptive"] = option("full", "adaptive: each head learns how much of the window it uses")
    span_ramp: int = option(32, "tokens over which an adaptive span fades out", low=1, needs=where(span="adaptive"))
    span_loss: float = option(
        2e-6,
        "weight in the loss of the mean adaptive span in tokens",
        low=0.0,
        decides="training",
        needs=where(span="adaptive"),
    )
    shaping: Literal["none", "skip_init", "shaped"] = option(
        "none", "trained mixture of the weights A and the identity: aI + bA (skip_init), or aI + bA - cC with uniform C"
    )


@dataclass(frozen=True)
class MemoryOptions:
    """Options of slots: trained keys and values that every query sees."""

    memory_slots: int = option(0, "number of slots M (persistent keys and values)", low=0)
    memory_heads: Literal["each", "shared"] = option(
        "each", "slots for each key-value head, or one set for all", needs=SLOTS_IN_SOFTMAX
    )
    memory_activation: MemoryActivation = option(
        "softmax",
        "softmax: slots have the sizes of the heads and are in one softmax with the context; others: f(x k^T + b) v is "
        "added to the output, with keys and values of the model's width and a bias (a feed-forward layer as a memory)",
        needs=SLOTS,
    )


@dataclass(frozen=True)
class OutputOptions:
    """Options of the step from the heads to the residual stream."""

    output: Literal["learned", "identity"] = option("learned", "matrix W_O, or the concatenated heads")
    output_gate: Literal["none", "elementwise", "head"] = option(
        "none", "multiplies heads by sigmoid(x W_g) before W_O: a gate for each number of a head, or one for each head"
    )
