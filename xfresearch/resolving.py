"""Fills in a config's derived sizes and checks what needs more than one field; UserError on the first that is wrong."""

from dataclasses import replace

from xfresearch.config import (
    AttentionConfig,
    BlockConfig,
    Config,
    DataConfig,
    FeedForwardConfig,
    ModelConfig,
    MoeConfig,
    RopeConfig,
)
from xfresearch.data.labels import OF_TEXT, open_data_set, trains_on_labels
from xfresearch.errors import nearest, require
from xfresearch.models.layouts import LAYOUTS, check_sites, norm_kind
from xfresearch.models.options import check_read
from xfresearch.models.sizes import has_heads, head_sizes, longest_sequence, matrices, rotary_size, wide_slots
from xfresearch.models.variants import ACTIVATIONS


def resolve(config: Config) -> Config:
    """`config` with its derived sizes filled in and every combination checked; UserError on the first that is wrong."""
    model = config.model
    if not model.max_length:
        model = replace(model, max_length=config.sequence_length)
    model = resolve_model(model)
    config = replace(config, model=model)
    limit = longest_sequence(model)
    rows = f"at most model.max_length={limit}, the rows of the model's table of positions"
    require(not limit or config.sequence_length <= limit, "sequence_length", config.sequence_length, rows)
    for name, block in model.blocks.items():
        trimmed, needs = block.attention.trimmed, "0 to train: evaluation sets it"
        require(not trimmed, f"model.blocks.{name}.attention.trimmed", trimmed, needs)
    _check_data(config.data)
    _check_training(config)
    if trains_on_labels(config.data):
        return _resolve_labels(config)
    blind = "True to train on next tokens: a model that sees the tokens it predicts learns nothing"
    require(model.causal, "model.causal", False, blind)
    return config


def resolve_model(model: ModelConfig) -> ModelConfig:
    """A model's config with head sizes and hidden sizes filled in and checked; UserError on the first that is wrong."""
    blocks = {name: _resolve_block(block, model, f"model.blocks.{name}") for name, block in model.blocks.items()}
    require(len(model.pattern) > 0, "model.pattern", model.pattern, "at least one block's name")
    for name in model.pattern:
        require(
            name in blocks,
            "model.pattern",
            model.pattern,
            f"names of blocks: {', '.join(blocks)}" + nearest(name, blocks),
        )
    for name in blocks:
        require(name in model.pattern, "model.blocks", name, f"blocks that model.pattern={model.pattern} uses")
    require(
        model.depth % len(model.pattern) == 0,
        "model.depth",
        model.depth,
        f"a multiple of the {len(model.pattern)} blocks in model.pattern",
    )
    require(
        not (model.dtype == "float64" and model.param_dtype != "float64"),
        "model.param_dtype",
        model.param_dtype,
        "float64 where model.dtype is float64",
    )
    model = replace(model, blocks=blocks)
    check_read(model)
    _check_final_norm(model)
    _check_shared_positions(model)
    for name, block in blocks.items():
        _check_reach(block.attention, model, f"model.blocks.{name}.attention")
        if block.feed_forward.kind == "moe":
            _check_moe(model, block.feed_forward.moe, f"model.blocks.{name}.feed_forward.moe")
    return model


def _resolve_block(block: BlockConfig, model: ModelConfig, key: str) -> BlockConfig:
    moe = block.feed_forward.moe
    require(moe.top_k <= moe.experts, f"{key}.feed_forward.moe.top_k", moe.top_k, f"at most moe.experts={moe.experts}")
    check_sites(block, key)
    block = replace(block, attention=_resolve_attention(block, model, f"{key}.attention"))
    if all(s.name != "feed_forward" for s in LAYOUTS[block.layout].sublayers):
        return block
    feed_forward = _resolve_feed_forward(block.feed_forward, model.width, f"{key}.feed_forward")
    return replace(block, feed_forward=feed_forward)


def _resolve_feed_forward(f: FeedForwardConfig, width: int, key: str) -> FeedForwardConfig:
    kind = f.moe.expert if f.kind == "moe" else f.kind
    hidden = int(f.hidden_factor * width + 1e-6)
    if ACTIVATIONS[kind].gated and f.gated_hidden == "matched":
        hidden = 8 * max(round(hidden * 2 / 3 / 8), 1)
    if f.hidden and f.hidden != max(hidden, 1):  # a config that was resolved before says both, in agreement
        for name in ("hidden_factor", "gated_hidden"):
            value, default = getattr(f, name), type(f).__dataclass_fields__[name].default
            given = f"{default!r}, its default, where hidden={f.hidden} is given"
            require(value == default, f"{key}.{name}", value, given)
        return f
    return replace(f, hidden=max(hidden, 1))


def _resolve_attention(block: BlockConfig, model: ModelConfig, key: str) -> AttentionConfig:
    a, width = block.attention, model.width
    _check_slots(block, key)
    if not has_heads(a):
        return replace(a, bias=_resolve_bias(a, ("output",), key))
    if not a.head_size:
        require(width % a.heads == 0, f"{key}.heads", a.heads, f"a divisor of model.width={width}, or set head_size")
        a = replace(a, head_size=width // a.heads)
    a = replace(a, kv_heads=a.kv_heads or a.heads)
    if a.query == "merged":  # it stands for both
        both = "left out under query='merged', which stands for both"
        require(a.key in ("learned", "identity_whole"), f"{key}.key", a.key, both)
        a = replace(a, key="learned" if a.rank else "identity_whole")
    if LAYOUTS[block.layout].fused and a.kind != "lambda":  # the heads are what the feed-forward reads
        a = replace(a, output="identity")
    divides = f"a divisor of attention.heads={a.heads}"
    require(a.heads % a.kv_heads == 0, f"{key}.kv_heads", a.kv_heads, divides)
    require(a.rank <= width, f"{key}.rank", a.rank, f"at most model.width={width}, where the matrix has full rank")
    if a.kind == "lambda":
        _check_lambda(a, model, key)
    a = replace(a, bias=_resolve_bias(a, tuple(matrices(replace(block, attention=a), width)), key))
    _check_identities(a, block, width, key)
    _check_positions(a, width, key)
    _check_shaping(a, key)
    return a


def _resolve_bias(a: AttentionConfig, projections: tuple[str, ...], key: str) -> tuple[str, ...]:
    """`bias` in the order of the projections."""
    allowed = f"names among the projections that are learned: {', '.join(projections)}"
    require(set(a.bias) <= set(projections), f"{key}.bias", a.bias, allowed)
    return tuple(name for name in projections if name in a.bias)


def _check_slots(block: BlockConfig, key: str) -> None:
    """Slots alone need slots; those of the model's width are added to the residual stream, not to the heads."""
    a = block.attention
    slots = "at least 1 under kind='slots', which attends to nothing else"
    require(a.kind != "slots" or a.memory_slots > 0, f"{key}.memory_slots", a.memory_slots, slots)
    apart = f"'softmax' under layout={block.layout!r}: the feed-forward reads the heads there"
    fused = LAYOUTS[block.layout].fused and wide_slots(a)
    require(not fused, f"{key}.memory_activation", a.memory_activation, apart)
    own = "'learned' or an identity under kind='slots': slots have keys of their own"
    require(a.kind != "slots" or a.query != "merged", f"{key}.query", a.query, own)


def _check_lambda(a: AttentionConfig, model: ModelConfig, key: str) -> None:
    """A lambda layer's heads share its keys and values and make up the width."""
    require(a.kv_heads == a.heads, f"{key}.kv_heads", a.kv_heads, "0 under kind='lambda', whose heads share all keys")
    needs = f"model.width={model.width} / heads={a.heads} under kind='lambda', which has no output matrix"
    require(a.heads * a.head_size == model.width, f"{key}.head_size", a.head_size, needs)
    require(model.causal, "model.causal", False, f"True under {key}.kind='lambda', which reads the tokens so far")
    reaches = f"at least 1 under {key}.lambdas.window=0, which reaches that far"
    require(a.lambdas.window > 0 or model.max_length > 0, "model.max_length", model.max_length, reaches)


def _check_shaping(a: AttentionConfig, key: str) -> None:
    """Shaped attention is built so that its weights are the identity at first, which A = C takes (He & Hofmann 2023)."""
    alone = (
        "'none' with memory_slots, a window, an adaptive span or sees_itself=False: I and C are of the whole context"
    )
    whole = not a.memory_slots and not a.window and a.span == "full" and a.sees_itself
    require(a.shaping == "none" or whole, f"{key}.shaping", a.shaping, alone)
    zero = "'none' or 'skip_init' unless query has a matrix, which starts at 0, and position is not 'alibi': A is not C then"
    uniform = not a.query.startswith("identity") and a.position != "alibi"
    require(a.shaping != "shaped" or uniform, f"{key}.shaping", a.shaping, zero)


def _check_reach(a: AttentionConfig, model: ModelConfig, key: str) -> None:
    """What is counted in tokens back has no meaning where later tokens are seen, and needs to know how many there are."""
    causal = {"sees_itself": True, "window": 0, "span": "full"}
    for name, value in causal.items():
        given = getattr(a, name)
        back = f"{value!r} where model.causal=False: it counts tokens back"
        require(model.causal or given == value, f"{key}.{name}", given, back)
    back = "'none', 'rope' or 'alibi' where model.causal=False: distances are of tokens back"
    require(model.causal or a.position not in ("t5", "relative_key"), f"{key}.position", a.position, back)
    counted = a.position == "relative_key" or a.span == "adaptive"
    needs = f"at least 1 where {key} has a relative key or an adaptive span without a window: it reaches that far"
    require(not counted or a.window or model.max_length, "model.max_length", model.max_length, needs)


def _check_identities(a: AttentionConfig, block: BlockConfig, width: int, key: str) -> None:
    """An identity gives each head its share of the input, or all of it: the sizes have to fit."""
    sizes = head_sizes(a, width)
    splits = [("query", a.query, a.heads, sizes.qk), ("key", a.key, a.kv_heads, sizes.qk)]
    for name, kind, heads, size in [*splits, ("value", a.value, a.kv_heads, sizes.v)]:
        fits = f"{kind!r} only where heads * size = model.width={width}, here {heads} * {size}"
        cut = kind in ("identity", "identity_plus")
        require(not cut or heads * size == width, f"{key}.{name}", kind, fits)
    fits = f"'identity' only where heads * size of a value = model.width={width}, here {a.heads} * {sizes.v}"
    fused = LAYOUTS[block.layout].fused
    require(fused or a.output != "identity" or a.heads * sizes.v == width, f"{key}.output", a.output, fits)


def _check_positions(a: AttentionConfig, width: int, key: str) -> None:
    """What turns or rescales each head's queries and keys cannot be merged into one matrix between them."""
    turned = (
        "without query='merged': RoPE turns queries and keys by their positions, which no one matrix between them does"
    )
    require(a.query != "merged" or a.position != "rope", f"{key}.position", a.position, turned)
    if a.position == "rope":
        size = head_sizes(a, width).qk
        turns = f"a share of the {size} dimensions of a query that leaves an even number, at least 2"
        rotated = rotary_size(size, a.rope.fraction)
        require(rotated >= 2 and rotated % 2 == 0, f"{key}.rope.fraction", a.rope.fraction, turns)
        _check_stretching(a.rope, f"{key}.rope")
    apart = f"above t5_buckets / 2 = {a.t5_buckets // 2}, from which on distances share buckets"
    require(a.position != "t5" or a.t5_distance > a.t5_buckets // 2, f"{key}.t5_distance", a.t5_distance, apart)


def _check_stretching(rope: RopeConfig, key: str) -> None:
    high, low, yarn = rope.high_frequency, rope.low_frequency, rope.scaling == "yarn"
    require(high > low, f"{key}.high_frequency", high, f"above rope.low_frequency={low}")
    require(not yarn or low > 0, f"{key}.low_frequency", low, "above 0 under rope.scaling='yarn'")
    require(not yarn or rope.theta > 1, f"{key}.theta", rope.theta, "above 1 under rope.scaling='yarn'")


def _check_final_norm(model: ModelConfig) -> None:
    """A stream that a block's last norm has normed is not normed again; ResiDual's second stream has only that norm."""
    last = model.blocks[model.pattern[-1]]
    sublayer = LAYOUTS[last.layout].sublayers[-1]
    ends_normed = "post" in sublayer.norms and norm_kind(last, sublayer.name, "post") != "none"
    if any(LAYOUTS[block.layout].dual for block in model.blocks.values()):
        norm = "a norm under layout='resi_dual', whose second stream has no other"
        require(model.final_norm != "none", "model.final_norm", model.final_norm, norm)
        return
    again = f"'none' where the last block, of layout={last.layout!r}, ends in a norm"
    require(not ends_normed or model.final_norm == "none", "model.final_norm", model.final_norm, again)


def _check_shared_positions(model: ModelConfig) -> None:
    """T5's biases and the relative key are one table for all layers, so their sizes agree."""
    for kind, size in (
        ("t5", lambda a: (a.heads, a.t5_buckets)),
        ("relative_key", lambda a: head_sizes(a, model.width).qk),
    ):
        used = {name: size(b.attention) for name, b in model.blocks.items() if b.attention.position == kind}
        same = f"in blocks of equal sizes, since all layers share the table; here they are {used}"
        require(len(set(used.values())) <= 1, "model.blocks.*.attention.position", kind, same)


def _check_moe(model: ModelConfig, moe: MoeConfig, key: str) -> None:
    apart = "at most 1 under expert='softmax': side by side they would share one softmax"
    require(moe.shared <= 1 or moe.expert != "softmax", f"{key}.shared", moe.shared, apart)
    if moe.routing == "token_choice":
        alone = "at least 2 with renormalise=True: a single renormalised gate is 1 whatever the router says, its gradient 0"
        require(moe.top_k > 1 or not moe.renormalise, f"{key}.top_k", moe.top_k, alone)
        needs = "at least 1 where an expert's capacity is a share of it"
        require(not moe.capacity or model.max_length > 0, "model.max_length", model.max_length, needs)
        return
    later = "'token_choice' where model.causal=True: an expert would choose among later tokens"
    require(not model.causal, f"{key}.routing", moe.routing, later)
    under = "under routing='expert_choice'"
    require(moe.capacity > 0, f"{key}.capacity", moe.capacity, f"above 0 {under}")
    alone = f"False {under}: a token's experts do not know of each other"
    require(not moe.renormalise, f"{key}.renormalise", True, alone)
    require(moe.balance == "none", f"{key}.balance", moe.balance, f"'none' {under}, which is balanced as it is")


def _check_data(data: DataConfig) -> None:
    require(len(data.corpus) > 0, "data.corpus", data.corpus, "at least one corpus")
    if data.weights:
        require(
            len(data.weights) == len(data.corpus) and min(data.weights) > 0,
            "data.weights",
            data.weights,
            f"one weight above 0 for each of the {len(data.corpus)} corpora",
        )


def _resolve_labels(config: Config) -> Config:
    """`config` with the vocabulary of its labels; UserError where it asks for what only a text has."""
    data, model = config.data, config.model
    require(len(data.corpus) == 1, "data.corpus", data.corpus, "one alone, where it is a data set with labels")
    without = f"under data.corpus={data.corpus[0]!r}, which has labels and no text"
    for name in OF_TEXT:
        usual = getattr(DataConfig(), name)
        require(getattr(data, name) == usual, f"data.{name}", getattr(data, name), f"left at {usual!r} {without}")
    require(not config.log.sample, "log.sample", config.log.sample, f"left at '' {without}")
    classes = open_data_set(data.corpus[0], config.sequence_length).vocab_size
    fits = f"0 or at least {classes}, the classes of data.corpus={data.corpus[0]!r}"
    require(not 0 < model.vocab_size < classes, "model.vocab_size", model.vocab_size, fits)
    return replace(config, model=replace(model, vocab_size=model.vocab_size or classes))


def _check_training(config: Config) -> None:
    optimizer, training = config.optimizer, config.training
    by_tensor, clip = optimizer.clip_by == "tensor", optimizer.clip
    alone = "'global' unless optimizer.kind='adagrad'"
    require(not by_tensor or optimizer.kind == "adagrad", "optimizer.clip_by", optimizer.clip_by, alone)
    require(not by_tensor or clip > 0, "optimizer.clip", clip, "above 0 under clip_by='tensor'")
    require(optimizer.warmup <= config.steps, "optimizer.warmup", optimizer.warmup, f"at most steps={config.steps}")
    require(
        config.batch_size % training.accumulate == 0,
        "training.accumulate",
        training.accumulate,
        f"a divisor of batch_size={config.batch_size}",
    )
