"""The options of each objective: what a model predicts, and what it sees of a text (data/objectives/ makes the batches)."""

import re
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from xfresearch.options.fields import option
from xfresearch.runtime.errors import require

KEY = "data.objective"


class Objective:
    """What every objective says of itself."""

    predicts: ClassVar[str]  # the tokens that it predicts, in words
    alone: ClassVar[bool] = True  # a model of a single stack has it
    with_encoder: ClassVar[bool] = False  # a model with an encoder has it: its batches have sources

    def check(self, config: Any) -> None:
        """Raises UserError if the model of `config`, a run's, sees the tokens that are predicted, or not those that they are
        predicted from. Kind and model fit already, and a decoder with an encoder is causal."""


@dataclass(frozen=True)
class Next(Objective):
    """Each token from those before it."""

    predicts = "next tokens"
    kind: str = option("next", "objective")

    def check(self, config: Any) -> None:
        allowed = "True to train on next tokens: a model that sees the tokens it predicts learns nothing"
        require(config.model.causal, "model.causal", config.model.causal, allowed)


@dataclass(frozen=True)
class Seq2Seq(Objective):
    """The target of a pair from its source, with an encoder and a decoder."""

    predicts = "tokens of targets"
    alone, with_encoder = False, True
    kind: str = option("seq2seq", "objective")
    source_field: str = option(
        "source", "field or column with the source; a number is that of a column of a table without names"
    )
    target_field: str = option("target", "field or column with the target, in the same way")
    rows: Literal["packed", "padded"] = option(
        "packed", "a row has several whole pairs with segment ids, or one pair and padding"
    )


@dataclass(frozen=True)
class Chat(Objective):
    """The answers of conversations, as the chat template beside the tokenizer writes them."""

    predicts = "tokens of answers"
    kind: str = option("chat", "objective")
    messages_field: str = option("messages", "field with the messages of a conversation")
    prompt_field: str = option("prompt", "field with a question, in rows without messages")
    completion_field: str = option("completion", "field with its answer")
    today: str = option("2024-07-26", "the date that a template is told, YYYY-MM-DD: the data do not change with the day")

    def check(self, config: Any) -> None:
        allowed = f"True with {KEY}.kind='chat', which predicts next tokens"
        require(config.model.causal, "model.causal", config.model.causal, allowed)
        allowed = f"'documents' with {KEY}.kind='chat': a row has several conversations"
        require(config.data.packing == "documents", "data.packing", config.data.packing, allowed)
        is_date = re.fullmatch(r"\d{4}-(0[1-9]|1[0-2])-(0[1-9]|[12]\d|3[01])", self.today)
        require(bool(is_date), f"{KEY}.today", self.today, "a date, YYYY-MM-DD")


@dataclass(frozen=True)
class SpanCorruption(Objective):
    """Spans of a text that sentinels replace (Raffel et al. 2020, T5), with an encoder and a decoder."""

    predicts = "tokens of spans"
    alone, with_encoder = False, True
    kind: str = option("span_corruption", "objective")
    noise_density: float = option(0.15, "share of the tokens that sentinels replace", above=0.0, high=0.99)
    mean_span: float = option(3.0, "mean number of tokens that a sentinel replaces", low=1.0)
    sentinels: int = option(100, "number of sentinels, the last ids of the vocabulary", low=1)


@dataclass(frozen=True)
class Masked(Objective):
    """Some tokens from all others (Devlin et al. 2019, BERT), with a model that is not causal."""

    predicts = "masked tokens"
    kind: str = option("masked", "objective")
    rate: float = option(0.15, "share of the tokens that are predicted", above=0.0, high=1.0)
    mask_share: float = option(0.8, "share of these that the model sees as the mask token", low=0.0, high=1.0)
    random_share: float = option(
        0.1, "share of these that it sees as a random token; the others it sees unchanged", low=0.0, high=1.0
    )

    def check(self, config: Any) -> None:
        allowed = f"False with {KEY}.kind='masked': a masked token is predicted from the tokens on both sides"
        require(not config.model.causal, "model.causal", config.model.causal, allowed)
        allowed = f"at most 1 with {KEY}.mask_share={self.mask_share}, together"
        require(self.mask_share + self.random_share <= 1, f"{KEY}.random_share", self.random_share, allowed)


@dataclass(frozen=True)
class Prefix(Objective):
    """The rest of a text from a prefix (Raffel et al. 2020, sec. 3.2.1). An encoder reads the prefix, or in a model of a
    single stack its tokens see each other."""

    predicts = "tokens after a prefix"
    with_encoder = True
    kind: str = option("prefix", "objective")
    lengths: Literal["random", "fixed"] = option(
        "random", "a prefix has any number of tokens, or with an encoder as many as the source has places"
    )

    def check(self, config: Any) -> None:
        if config.source_length:
            return
        require(config.sequence_length > 1, "sequence_length", config.sequence_length, "at least 2, a prefix and the rest")
        why = config.model.without_prefix
        require(not why, f"{KEY}.kind", self.kind, f"another one for this model, which has no prefix: {why}")


OBJECTIVES = {each().kind: each for each in (Next, Chat, Seq2Seq, SpanCorruption, Masked, Prefix)}
