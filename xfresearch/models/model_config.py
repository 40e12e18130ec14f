"""The options of a language model: an embedding, a stack of blocks, and an output head."""

from dataclasses import dataclass, replace
from typing import Literal

import jax

from xfresearch.config.fields import change, check_read, option, where
from xfresearch.models import layers, stack
from xfresearch.models.block_config import NormKind, check_norms
from xfresearch.models.feed_forwards.moe import MoeConfig
from xfresearch.models.layouts import LAYOUTS
from xfresearch.models.norms import NormSpec
from xfresearch.models.stack import StackConfig
from xfresearch.runtime.errors import UserError, require


@dataclass(frozen=True)
class ModelConfig(StackConfig):
    vocab_size: int = option(0, "vocabulary size V; 0 for the tokenizer's, or the number of classes of labels", low=0)
    position: Literal["none", "learned", "sinusoidal"] = option("none", "positions that are added to the embedding")
    position_offset: int = option(
        0, "row of the position table that position 0 reads (OPT: 2)", low=0, needs=where(position="learned")
    )
    embedding_norm: NormKind = option("none", "norm of the embedding")
    embedding_scale: Literal["none", "sqrt_width", "learned"] = option(
        "none", "factor of the token embedding, applied before positions are added; learned starts at sqrt(width)"
    )
    embedding_std: float = option(
        0.0, "standard deviation of the initial token embedding; 0 for that of init", low=0.0, decides="initialisation"
    )
    final_norm: NormKind = option("layer", "norm before the output head")
    tie_embeddings: bool = option(True, "the output head is the transpose of the embedding")
    head_bias: bool = option(False, "the output head has a bias")
    logit_softcap: float = option(
        0.0, "c in logits = c tanh(logits / c), after the bias (Gemma 2: 30); 0 for no softcap", low=0.0
    )
    dropout: float = option(0.0, "dropout rate of the embedding", low=0.0, high=0.99, decides="training")

    def __hash__(self) -> int:  # `blocks` is a dict, which has no hash; equal configs have equal representations
        return hash(repr(self))

    @property
    def random(self) -> bool:
        """Whether the model draws random numbers in training."""
        blocks = self.blocks.values()
        within = any(options.random for block in blocks for options in block.sublayers.values())
        return bool(self.dropout or within or any(block.dropout for block in blocks))

    def norm_spec(self, kind: str) -> NormSpec:
        """A norm of this kind outside the blocks. It has the norm options of the first block."""
        return self.blocks[layers.stacks(self)[0].block].norm_spec(kind)


def resolve_model(model: ModelConfig) -> ModelConfig:
    """A model's config with derived sizes filled in. Raises UserError at the first invalid option."""
    model = stack.resolved(model)
    check_read(model, "model")
    first = layers.stacks(model)[0].block
    for name, block in model.blocks.items():
        elsewhere = (model.embedding_norm, model.final_norm) if name == first else ()
        check_norms(block, elsewhere, f"model.blocks.{name}")
    _check_final_norm(model)
    return model


def _check_final_norm(model: ModelConfig) -> None:
    """Requires the final norm for ResiDual's second stream, and forbids it directly after another norm."""
    last = model.blocks[layers.stacks(model)[-1].block]
    branch = stack.last_branch(model)
    for name, each in model.blocks.items():
        same = LAYOUTS[each.layout].branches[-1].connection.ends_with == branch.connection.ends_with
        allowed = f"like {last.layout!r} in the last layer, whose head reads other streams"
        require(same, f"model.blocks.{name}.layout", each.layout, allowed)
    if branch.connection.ends_with:
        allowed = f"a norm with layout={last.layout!r}: its second stream has no other norm"
        require(model.final_norm != "none", "model.final_norm", model.final_norm, allowed)
        return
    normed = "post" in branch.norms and last.norm_at(f"{branch.name}_post").kind != "none"
    allowed = f"'none' if the last block, with layout={last.layout!r}, ends in a norm"
    require(not normed or model.final_norm == "none", "model.final_norm", model.final_norm, allowed)


def position_rows(model: ModelConfig) -> int:
    """Rows of the table of learned positions, 0 without a table. The first `position_offset` rows are never read."""
    return model.max_length + model.position_offset if model.position == "learned" else 0


DTYPES = ("float32", "bfloat16", "float64")
LIMITS = "the model's position table or the capacity of its experts"  # what sets the longest sequence, for errors


def longest_sequence(model: ModelConfig) -> int:
    """The longest sequence that the model supports: its tables of positions, and the capacity of its experts; 0 for any."""
    return max(model.max_length if model.position == "learned" else 0, stack.longest_input(model))


def mixtures(model: ModelConfig) -> list[MoeConfig]:
    """The options of every mixture of experts in a model's blocks."""
    options = [options for block in model.blocks.values() for options in block.sublayers.values()]
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
    return resolve_model(change(model, "dtype", dtype))
