"""Which kernels serve each block of a run, said before anything is traced."""

from dataclasses import replace

import jax

from xfresearch.config import BlockConfig, Config, ModelConfig
from xfresearch.errors import UserError
from xfresearch.kernels.attention import Call, Sight, alteration, choose_attention, describe
from xfresearch.kernels.choice import Choice
from xfresearch.kernels.grouped_matmul import Call as Product
from xfresearch.kernels.grouped_matmul import choose_grouped_matmul
from xfresearch.models.partition import platform
from xfresearch.models.sizes import head_sizes, slot_heads, softmax_slots


def attention_choices(config: Config, mesh=None) -> dict[str, Choice]:
    """{name of a block: the kernel of its softmax attention in training, and why}.

    UserError where one that is asked for cannot serve, with the key that asks for it.
    """
    found = {}
    packed = config.data.packing == "documents"
    for name, block in config.model.blocks.items():
        if block.attention.kind != "softmax":
            continue
        call = attention_call(config.model, block, config.sequence_length, packed, mesh)
        try:
            found[name] = choose_attention(call, block.attention.kernel)
        except UserError as error:
            raise UserError(f"config.model.blocks.{name}.{error}") from None
    return found


def expert_choices(config: Config, mesh=None) -> dict[str, Choice]:
    """{name of a block: how rows meet their experts in training, and why}; UserError as of `attention_choices`."""
    found = {}
    for name, block in config.model.blocks.items():
        moe = block.feed_forward.moe
        if block.feed_forward.kind != "moe":
            continue
        if moe.routing == "expert_choice" or moe.capacity and mesh is not None:
            if moe.kernel != "auto":
                key = f"config.model.blocks.{name}.feed_forward.moe.kernel"
                raise UserError(f"{key}={moe.kernel!r} is not allowed here: experts of as many slots each are batched")
            found[name] = Choice("batched", "each expert has as many slots as any other")
            continue
        try:
            found[name] = choose_grouped_matmul(Product(platform(mesh), config.model.dtype), moe.kernel)
        except UserError as error:
            raise UserError(f"config.model.blocks.{name}.{error}") from None
    return found


def attention_call(model: ModelConfig, block: BlockConfig, length: int, segments: bool, mesh=None) -> Call:
    """What a block's attention asks for in training, over sequences of `length` tokens."""
    a, sizes = block.attention, head_sizes(block.attention, model.width)

    def shape(*sizes):
        return jax.ShapeDtypeStruct(sizes, model.dtype)

    q, k = shape(1, length, a.heads, sizes.qk), shape(1, length, sizes.key_heads, sizes.qk)
    v = shape(1, length, sizes.value_heads, sizes.v)
    slots = softmax_slots(a), slot_heads(a)
    memory = (shape(*slots, sizes.qk), shape(*slots, sizes.v)) if softmax_slots(a) else None
    biases = a.position in ("alibi", "t5", "relative_key") or a.span == "adaptive"
    altered = alteration(biases=biases, shaping=a.shaping != "none", dropout=a.dropout, softcap=a.softcap)
    sight = Sight(model.causal, int(not a.sees_itself), a.trimmed or a.window)
    ids = shape(1, length)
    return describe(q, k, v, memory, (ids, ids) if segments else None, 0, sight, altered, mesh)


def for_reading(model: ModelConfig) -> ModelConfig:
    """`model` with every kernel left to the machine that reads it: what a run asks for binds its training alone."""
    return with_kernels(model, "auto", "auto")


def with_kernels(model: ModelConfig, attention: str, moe: str) -> ModelConfig:
    """`model` with these kernels of attention and of experts in every block."""

    def asking(block: BlockConfig) -> BlockConfig:
        if block.attention.kind == "softmax":
            block = replace(block, attention=replace(block.attention, kernel=attention))
        if block.feed_forward.kind == "moe":
            f = block.feed_forward
            block = replace(block, feed_forward=replace(f, moe=replace(f.moe, kernel=moe)))
        return block

    return replace(model, blocks={name: asking(block) for name, block in model.blocks.items()})
