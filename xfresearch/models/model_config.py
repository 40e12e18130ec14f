"""The options of a language model: an embedding, a stack of blocks, and an output head, with an encoder or without."""

from dataclasses import dataclass, replace
from typing import Literal

import jax

from xfresearch.models import encoder, token_stack
from xfresearch.models.encoder import NAME, EncoderConfig, EncoderStack, encoder_of
from xfresearch.models.feed_forwards.moe import MoeConfig
from xfresearch.models.layouts import LAYOUTS
from xfresearch.models.norms import NormKind
from xfresearch.models.sublayers import Sublayer
from xfresearch.models.token_stack import TokenStackConfig
from xfresearch.options.fields import named, option, unless, with_values
from xfresearch.options.reading import check_read
from xfresearch.runtime.errors import UserError, require


@dataclass(frozen=True)
class ModelConfig(TokenStackConfig):
    vocab_size: int = option(0, "vocabulary size V; 0 for the tokenizer's, or the number of classes of labels", low=0)
    token_types: int = option(
        0, "rows of a table of token types, which is added to the embedding (BERT: 2); 0 for no table", low=0
    )
    tie_embeddings: bool = option(True, "the output head is the transpose of the embedding")
    head_scale: Literal["none", "inverse_sqrt_width"] = option(
        "none", "factor of what the output head reads (T5 v1.0: inverse_sqrt_width)"
    )
    head_activation: Literal["none", "relu", "gelu", "gelu_tanh", "swish"] = option(
        "none", "activation of a dense layer with a bias before the output head (BERT: gelu); none for no such layer"
    )
    head_norm: NormKind = option("none", "norm after this layer (BERT: layer)", needs=unless(head_activation="none"))
    head_bias: bool = option(False, "the output head has a bias")
    logit_softcap: float = option(
        0.0, "c in logits = c tanh(logits / c), after the bias (Gemma 2: 30); 0 for no softcap", low=0.0
    )
    stacks: dict[str, EncoderConfig] = named(
        {NAME: EncoderConfig}, "other stacks by name: 'encoder', whose output cross-attention reads"
    )

    def __hash__(self) -> int:  # `blocks` is a dict, which has no hash; equal configs have equal representations
        return hash(repr(self))

    @property
    def encoder(self) -> EncoderStack | None:
        """The stack that reads the source; None without."""
        return encoder_of(self, self.stacks[NAME], self.vocab_size) if NAME in self.stacks else None

    @property
    def head_factor(self) -> float:
        """The factor of the final hidden states in the output head."""
        return self.width**-0.5 if self.head_scale == "inverse_sqrt_width" else 1.0

    @property
    def norms_outside(self) -> tuple[str, ...]:
        return *super().norms_outside, self.head_norm

    @property
    def all_stacks(self) -> list[TokenStackConfig]:
        """The stacks of the model in the order of computation: the encoder, if there is one, then the model itself."""
        return [self.encoder, self] if self.encoder else [self]

    @property
    def source_width(self) -> int:
        return self.encoder.width if self.encoder else 0

    @property
    def source_length(self) -> int:
        return self.encoder.max_length if self.encoder else 0

    def sublayers(self, role: str = "", has: str = "", layer: int | None = None) -> list[Sublayer]:
        """The sublayers of StackConfig.sublayers, those of the encoder first. `layer` is a number of the decoder's."""
        own = super().sublayers(role, has, layer)
        return self.encoder.sublayers(role, has) + own if self.encoder and layer is None else own

    @property
    def without_prefix(self) -> str:
        """Why the first tokens of a text cannot see each other in this model; '' if they can."""
        if not self.causal:
            return "model.causal=False: every token sees all others"
        reasons = ((each.path, each.options.without_prefix) for each in self.sublayers() if not each.prefix)
        return next((f"{path}: {reason}" for path, reason in reasons if reason), "")

    @property
    def random(self) -> bool:
        """Whether the model draws random numbers in training."""
        return super().random or bool(self.encoder and self.encoder.random)


def resolve_model(model: ModelConfig) -> ModelConfig:
    """A model's config with derived sizes filled in. Raises UserError at the first invalid option."""
    for name in model.stacks:
        require(name == NAME, "model.stacks", name, f"{NAME!r}: the stack that makes the logits is the model itself")
    if model.encoder:
        model = replace(model, stacks={NAME: encoder.resolved(model.encoder, model.width)})
    model = token_stack.resolved(model)
    check_read(model, "model")
    if model.stacks:
        reads = any(LAYOUTS[block.layout].reads_source for block in model.blocks.values())
        layouts = ", ".join(name for name, layout in LAYOUTS.items() if layout.reads_source)
        first = next(iter(model.blocks.values())).layout
        require(reads, "model.blocks.main.layout", first, f"one that reads the encoder, in a block at least: {layouts}")
    return model


def predicts_next(model: ModelConfig) -> str:
    """Why figures of next tokens mean nothing for a model; '' if they do. An encoder beside the decoder is no reason."""
    return "" if model.causal else "it does not predict next tokens"


DTYPES = ("float32", "bfloat16", "float64")
LIMITS = "the model's position table or the capacity of its experts"  # limits of the longest sequence, for errors


def longest_sequence(model: ModelConfig) -> int:
    """The longest sequence that the model supports: its tables of positions, and the capacity of its experts; 0 for any."""
    return model.longest


def mixtures(model: ModelConfig) -> list[MoeConfig]:
    """The options of every mixture of experts in a model's blocks."""
    options = [each for stack in model.all_stacks for block in stack.blocks.values() for each in block.sublayers.values()]
    return [each.mixture for each in options if each.mixture]


def check_length(model: ModelConfig, length: int) -> None:
    """Raises UserError if the model does not support sequences of `length`."""
    rows = longest_sequence(model)
    if rows and length > rows:
        allowed = f"at most {rows}, by {LIMITS}"
        raise UserError(f"sequence length {length} is not allowed: it must be {allowed}")


def with_dtype(model: ModelConfig, dtype: str) -> ModelConfig:
    """`model` with the compute dtype `dtype`; unchanged if `dtype` is empty. float64 is also the dtype of the parameters,
    and switches JAX to 64 bits."""
    if not dtype:
        return model
    require(dtype in DTYPES, "model.dtype", dtype, f"one of {', '.join(DTYPES)}")
    if dtype == "float64":
        jax.config.update("jax_enable_x64", True)
        model = replace(model, param_dtype="float64")
    return resolve_model(with_values(model, {"dtype": dtype}))
