"""The options of each objective: what a model predicts, and what it sees of a text (data/objectives/ makes the batches)."""

from dataclasses import dataclass
from typing import Literal

from xfresearch.options.fields import option


@dataclass(frozen=True)
class Next:
    """Each token from those before it."""

    kind: str = option("next", "objective")


@dataclass(frozen=True)
class Seq2Seq:
    """The target of a pair from its source, with an encoder and a decoder."""

    kind: str = option("seq2seq", "objective")
    source_field: str = option(
        "source", "field or column with the source; a number is that of a column of a table without names"
    )
    target_field: str = option("target", "field or column with the target, in the same way")
    rows: Literal["packed", "padded"] = option(
        "packed", "a row has several whole pairs with segment ids, or one pair and padding"
    )


@dataclass(frozen=True)
class SpanCorruption:
    """Spans of a text that sentinels replace (Raffel et al. 2020, T5), with an encoder and a decoder."""

    kind: str = option("span_corruption", "objective")
    noise_density: float = option(0.15, "share of the tokens that sentinels replace", above=0.0, high=0.99)
    mean_span: float = option(3.0, "mean number of tokens that a sentinel replaces", low=1.0)
    sentinels: int = option(100, "number of sentinels, the last ids of the vocabulary", low=1)


@dataclass(frozen=True)
class Masked:
    """Some tokens from all others (Devlin et al. 2019, BERT), with a model that is not causal."""

    kind: str = option("masked", "objective")
    rate: float = option(0.15, "share of the tokens that are predicted", above=0.0, high=1.0)
    mask_share: float = option(0.8, "share of these that the model sees as the mask token", low=0.0, high=1.0)
    random_share: float = option(
        0.1, "share of these that it sees as a random token; the others it sees unchanged", low=0.0, high=1.0
    )


@dataclass(frozen=True)
class Prefix:
    """The rest of a text from a prefix (Raffel et al. 2020, sec. 3.2.1). An encoder reads the prefix, or in a model of a
    single stack its tokens see each other."""

    kind: str = option("prefix", "objective")
    lengths: Literal["random", "fixed"] = option(
        "random", "a prefix has any number of tokens, or with an encoder as many as the source has places"
    )


OBJECTIVES = {each().kind: each for each in (Next, Seq2Seq, SpanCorruption, Masked, Prefix)}
