"""Fills in a config's derived sizes and checks what needs more than one field; UserError on the first that is wrong."""

from dataclasses import MISSING, fields, replace

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
from xfresearch.models.layouts import LAYOUTS, check_sites
from xfresearch.models.sizes import head_sizes, longest_sequence, rotary_size
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
    learned, offset = "0 unless model.position='learned'", model.position_offset
    require(not offset or model.position == "learned", "model.position_offset", offset, learned)
    model = replace(model, blocks=blocks)
    _check_shared_positions(model)
    for name, block in blocks.items():
        _check_reach(block.attention, model, f"model.blocks.{name}.attention")
        if block.feed_forward.kind == "moe":
            _check_moe(model, block.feed_forward.moe, f"model.blocks.{name}.feed_forward.moe")
    return model


def _resolve_block(block: BlockConfig, model: ModelConfig, key: str) -> BlockConfig:
    moe = block.feed_forward.moe
    require(moe.top_k <= moe.experts, f"{key}.feed_forward.moe.top_k", moe.top_k, f"at most moe.experts={moe.experts}")
    require(
        not (block.feed_forward.kind == "moe" and block.feed_forward.bias),
        f"{key}.feed_forward.bias",
        True,
        "False under kind='moe'",
    )
    check_sites(block, key)
    attention = _resolve_attention(block, model, f"{key}.attention")
    return replace(block, attention=attention, feed_forward=_resolve_feed_forward(block.feed_forward, model.width))


def _resolve_feed_forward(f: FeedForwardConfig, width: int) -> FeedForwardConfig:
    if f.hidden:
        return f
    kind = f.moe.expert if f.kind == "moe" else f.kind
    hidden = int(f.hidden_factor * width + 1e-6)
    if ACTIVATIONS[kind].gated and f.gated_hidden == "matched":
        hidden = 8 * max(round(hidden * 2 / 3 / 8), 1)
    return replace(f, hidden=max(hidden, 1))


def _resolve_attention(block: BlockConfig, model: ModelConfig, key: str) -> AttentionConfig:
    a, width = block.attention, model.width
    if not a.head_size:
        require(width % a.heads == 0, f"{key}.heads", a.heads, f"a divisor of model.width={width}, or set head_size")
        a = replace(a, head_size=width // a.heads)
    a = replace(a, kv_heads=a.kv_heads or a.heads)
    if a.query == "merged":  # it stands for both
        both = "left out under query='merged', which stands for both"
        require(a.key in ("learned", "identity_whole"), f"{key}.key", a.key, both)
        a = replace(a, key="learned" if a.rank else "identity_whole")
    if LAYOUTS[block.layout].fused:  # the heads are what the feed-forward reads
        a = replace(a, output="identity")
    divides = f"a divisor of attention.heads={a.heads}"
    require(a.heads % a.kv_heads == 0, f"{key}.kv_heads", a.kv_heads, divides)
    require(not a.rank or a.query == "merged", f"{key}.rank", a.rank, "0 unless query='merged'")
    if a.kind == "lambda":
        _check_lambda(a, model, key)
    _check_identities(a, block, width, key)
    _check_positions(a, width, key)
    _check_shaping(a, key)
    return a


def _check_lambda(a: AttentionConfig, model: ModelConfig, key: str) -> None:
    """A lambda layer has heads and what `lambdas` says, and nothing else of what attention can have."""
    own = {"kind", "heads", "kv_heads", "head_size", "lambdas", "output", "kernel"}
    only = {f.name: f.default for f in fields(a) if f.name not in own and f.default is not MISSING}
    for name, value in (only | {"kv_heads": a.heads}).items():
        given = getattr(a, name)
        require(given == value, f"{key}.{name}", given, f"{value!r} under kind='lambda', which has nothing of the kind")
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
        fits = f"'identity' only where heads * size = model.width={width}, here {heads} * {size}"
        require(kind != "identity" or heads * size == width, f"{key}.{name}", kind, fits)
    fits = f"'identity' only where heads * size of a value = model.width={width}, here {a.heads} * {sizes.v}"
    fused = LAYOUTS[block.layout].fused
    require(fused or a.output != "identity" or a.heads * sizes.v == width, f"{key}.output", a.output, fits)


def _check_positions(a: AttentionConfig, width: int, key: str) -> None:
    """What turns or rescales each head's queries and keys cannot be merged into one matrix between them."""
    merged = a.query == "merged"
    turned = (
        "without query='merged': RoPE turns queries and keys by their positions, which no one matrix between them does"
    )
    require(not (merged and a.position == "rope"), f"{key}.position", a.position, turned)
    normed = "'none' under query='merged', which has no queries and keys of its own to norm"
    require(not (merged and a.qk_norm != "none"), f"{key}.qk_norm", a.qk_norm, normed)
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
    alone = "0 unless rope.scaling='yarn'"
    require(yarn or not rope.attention_factor, f"{key}.attention_factor", rope.attention_factor, alone)


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
    require(optimizer.warmup <= config.steps, "optimizer.warmup", optimizer.warmup, f"at most steps={config.steps}")
    require(
        config.batch_size % training.accumulate == 0,
        "training.accumulate",
        training.accumulate,
        f"a divisor of batch_size={config.batch_size}",
    )
