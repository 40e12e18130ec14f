"""The options of a language model: a stack of blocks between an embedding and a head."""

from dataclasses import dataclass
from typing import Literal

from xfresearch.config.fields import check_read, option, where
from xfresearch.errors import require
from xfresearch.models import layers, stack
from xfresearch.models.block_config import NormKind, check_norms
from xfresearch.models.feed_forwards.moe import MoeConfig, MoeFeedForwardConfig
from xfresearch.models.layouts import LAYOUTS
from xfresearch.models.norms import NormSpec
from xfresearch.models.stack import StackConfig


@dataclass(frozen=True)
class ModelConfig(StackConfig):
    vocab_size: int = option(0, "vocabulary V; 0 is the tokenizer's, or the classes of a data set with labels", low=0)
    position: Literal["none", "learned", "sinusoidal"] = option("none", "positions added to the embedding")
    position_offset: int = option(
        0, "row of the learned positions that position 0 reads (OPT: 2)", low=0, needs=where(position="learned")
    )
    embedding_norm: NormKind = option("none", "norm after the embedding")
    embedding_scale: Literal["none", "sqrt_width", "learned"] = option(
        "none", "factor of the embedding, before positions are added; learned starts at sqrt(width)"
    )
    embedding_std: float = option(
        0.0, "std of the token embedding; 0 is as init says", low=0.0, decides="initialisation"
    )
    final_norm: NormKind = option("layer", "norm before the head")
    tie_embeddings: bool = option(True, "the head is the embedding's transpose")
    head_bias: bool = option(False, "the head has a bias")
    logit_softcap: float = option(
        0.0, "c in logits = c tanh(logits / c), after the bias (Gemma 2: 30); 0 is none", low=0.0
    )
    dropout: float = option(0.0, "dropout rate of the embedding", low=0.0, high=0.99, decides="training")

    def __hash__(self):  # `blocks` is a dict; equal configs have equal texts
        return hash(repr(self))

    def norm_spec(self, kind: str) -> NormSpec:
        """A norm outside the blocks: of this kind, with the options that the first block's norms have."""
        return self.blocks[layers.stacks(self)[0].block].norm_spec(kind)


def resolve_model(model: ModelConfig) -> ModelConfig:
    """A model's config with derived sizes filled in and checked; UserError on the first that is wrong."""
    model = stack.resolved(model)
    check_read(model, "model")
    first = layers.stacks(model)[0].block
    for name, block in model.blocks.items():
        elsewhere = (model.embedding_norm, model.final_norm) if name == first else ()
        check_norms(block, elsewhere, f"model.blocks.{name}")
    _check_final_norm(model)
    return model


def _check_final_norm(model: ModelConfig) -> None:
    """A stream that a block's last norm has normed is not normed again; ResiDual's second stream has only that norm."""
    if stack.has_dual(model):
        norm = "a norm with layout='resi_dual', whose second stream has no other"
        require(model.final_norm != "none", "model.final_norm", model.final_norm, norm)
        return
    last = model.blocks[layers.stacks(model)[-1].block]
    sublayer = LAYOUTS[last.layout].sublayers[-1]
    normed = "post" in sublayer.norms and last.norm_at(f"{sublayer.name}_post").kind != "none"
    again = f"'none' where the last block, with layout={last.layout!r}, ends in a norm"
    require(not normed or model.final_norm == "none", "model.final_norm", model.final_norm, again)


def position_rows(model: ModelConfig) -> int:
    """Rows of the table of learned positions, 0 where there is none; the first `position_offset` are never read."""
    return model.max_length + model.position_offset if model.position == "learned" else 0


def longest_sequence(model: ModelConfig) -> int:
    """Tokens that the model's tables of positions reach, 0 where it has none."""
    return max(model.max_length if model.position == "learned" else 0, stack.longest_input(model))


def mixtures(model: ModelConfig) -> list[MoeConfig]:
    """The options of every mixture of experts in a model's blocks."""
    options = [options for block in model.blocks.values() for options in block.sublayers.values()]
    return [each.moe for each in options if isinstance(each, MoeFeedForwardConfig)]
