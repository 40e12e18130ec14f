"""The configuration of a run: frozen, typed dataclasses, and the checks that need more than one field.

Every choice is a field here with its default, its range and one line of documentation. `config_io` turns
ml-collections files, dotted overrides and JSON into these classes; nothing below it ever sees a ConfigDict.
A field that is 0 (or '') where its text says so is filled in by `resolve`, so that models only meet concrete numbers.
"""

import dataclasses
from dataclasses import dataclass, field, replace
from typing import Literal

from xfresearch.errors import UserError, nearest
from xfresearch.models.layouts import LAYOUTS, check_sites
from xfresearch.models.variants import ACTIVATIONS, ATTENTIONS, FEED_FORWARDS, NORMS


def option(default, doc: str, low=None, high=None):
    """A field with its documentation and, for numbers, the closed range it may take."""
    metadata = {"doc": doc, "low": low, "high": high}
    if dataclasses.is_dataclass(default) or isinstance(default, dict):
        return field(default_factory=lambda: dict(default) if isinstance(default, dict) else default, metadata=metadata)
    return field(default=default, metadata=metadata)


# Names of variants are those of the tables in models/variants.py and models/layouts.py.
NormKind = Literal[*NORMS]
SiteNormKind = Literal["", *NORMS]
AttentionKind = Literal[*ATTENTIONS]
ActivationKind = Literal[*ACTIVATIONS]
FeedForwardKind = Literal[*FEED_FORWARDS]
LayoutKind = Literal[*LAYOUTS]


@dataclass(frozen=True)
class NormSites:
    attention_in: SiteNormKind = option("", "norm on what attention reads; '' is the block's norm")
    attention_out: SiteNormKind = option("", "norm on what attention writes")
    attention_post: SiteNormKind = option("", "norm after attention's residual sum")
    feed_forward_in: SiteNormKind = option("", "norm on what the feed-forward reads")
    feed_forward_out: SiteNormKind = option("", "norm on what the feed-forward writes")
    feed_forward_post: SiteNormKind = option("", "norm after the feed-forward's residual sum")


@dataclass(frozen=True)
class AttentionConfig:
    kind: AttentionKind = option("softmax", "how positions are mixed")
    heads: int = option(4, "query heads H", low=1)
    kv_heads: int = option(0, "key-value heads G, dividing H; 0 is H (multi-head), 1 is multi-query", low=0)
    head_size: int = option(0, "size K of a head; 0 is width / heads", low=0)
    position: Literal["none", "rope"] = option("none", "position information inside attention")
    rope_theta: float = option(10_000.0, "base of the rotary frequencies", low=1.0)
    bias: bool = option(False, "biases on the four projections")
    memory_slots: int = option(0, "persistent key-value slots M per head, in one softmax with the context", low=0)
    dropout: float = option(0.0, "dropout rate of the attention weights", low=0.0, high=0.99)
    kernel: Literal["auto", "plain", "blocked"] = option("auto", "implementation; auto is the backend's fastest")


@dataclass(frozen=True)
class MoeConfig:
    experts: int = option(8, "experts E", low=1)
    top_k: int = option(2, "experts that each token uses", low=1)
    expert: ActivationKind = option("swiglu", "kind of each expert")
    routing: Literal["token_choice", "expert_choice"] = option(
        "token_choice", "tokens choose experts, or (not under model.causal) experts choose tokens"
    )
    scores: Literal["softmax", "sigmoid"] = option("softmax", "what makes scores s of the router's logits")
    renormalise: bool = option(True, "gates are s divided by its sum over the chosen experts; False: s itself")
    capacity: float = option(
        0.0, "capacity factor: an expert takes at most capacity * top_k * L / E tokens of a sequence; 0 is all", low=0.0
    )
    shared: int = option(0, "shared experts, which every token uses", low=0)
    jitter: float = option(0.0, "in training the router reads x * uniform(1 - jitter, 1 + jitter)", low=0.0, high=0.99)
    balance: Literal["loss", "bias", "none"] = option(
        "loss", "how load is balanced: by balance_loss, or by a bias on the scores that only the choice sees"
    )
    balance_loss: float = option(
        0.01, "weight of the load-balance loss (Switch, eq. 4, per sequence), for balance = 'loss'", low=0.0
    )
    bias_speed: float = option(0.001, "step of the bias after each update, for balance = 'bias'", low=0.0)
    z_loss: float = option(0.001, "weight of the router's z-loss (ST-MoE, eq. 5)", low=0.0)
    kernel: Literal["auto", "ragged", "blocked"] = option("auto", "grouped matmul; auto is the backend's fastest")


@dataclass(frozen=True)
class FeedForwardConfig:
    kind: FeedForwardKind = option("gelu", "activation, or 'moe' for sparse experts")
    hidden: int = option(0, "hidden size F (of each expert); 0 is 4 * width", low=0)
    bias: bool = option(False, "biases on the projections")
    moe: MoeConfig = option(MoeConfig(), "experts, for kind = 'moe'")


@dataclass(frozen=True)
class BlockConfig:
    layout: LayoutKind = option("pre_norm", "where norms and skips stand (models/block.py)")
    norm: NormKind = option("layer", "norm of every site of the block")
    norms: NormSites = option(NormSites(), "norm of single sites, where they differ")
    norm_gain: bool = option(True, "norms have a trained gain")
    norm_bias: bool = option(True, "norms have a trained bias (rms never has)")
    norm_epsilon: float = option(1e-5, "added to the variance", low=0.0)
    dropout: float = option(0.0, "dropout rate of what each sublayer writes", low=0.0, high=0.99)
    attention: AttentionConfig = option(AttentionConfig(), "the sublayer that mixes positions")
    feed_forward: FeedForwardConfig = option(FeedForwardConfig(), "the sublayer that acts on each position")


@dataclass(frozen=True)
class ModelConfig:
    width: int = option(256, "width D of the residual stream", low=1)
    depth: int = option(4, "layers N, a multiple of the pattern's length", low=1)
    vocab_size: int = option(0, "vocabulary V; 0 is the tokenizer's", low=0)
    max_length: int = option(0, "longest sequence of a learned position table; 0 is sequence_length", low=0)
    pattern: tuple[str, ...] = option(("main",), "names of blocks, repeated to fill the depth")
    blocks: dict[str, BlockConfig] = option({"main": BlockConfig()}, "the blocks that the pattern names")
    position: Literal["none", "learned", "sinusoidal"] = option("none", "positions added to the embedding")
    embedding_norm: NormKind = option("none", "norm after the embedding")
    final_norm: NormKind = option("layer", "norm before the head")
    causal: bool = option(True, "a position sees only itself and those before; False is for encoders used as a library")
    tie_embeddings: bool = option(True, "the head is the embedding's transpose")
    dropout: float = option(0.0, "dropout rate of the embedding", low=0.0, high=0.99)
    init: Literal["fan_in", "normal"] = option(
        "fan_in", "std of kernels and embedding: 1/sqrt(inputs) (1/sqrt(width)), or init_std"
    )
    init_std: float = option(0.02, "std under init = 'normal'", low=0.0)
    dtype: Literal["float32", "bfloat16", "float64"] = option("float32", "dtype of the computation")
    param_dtype: Literal["float32", "float64"] = option("float32", "dtype in which parameters are kept")

    def __hash__(self):  # `blocks` is a dict; equal configs have equal texts
        return hash(repr(self))


@dataclass(frozen=True)
class DataConfig:
    corpus: tuple[str, ...] = option(("python_stdlib",), "corpora: NAME or NAME:PATH (text_files:notes/*.txt)")
    weights: tuple[float, ...] = option((), "share of sequences from each corpus; () is equal shares")
    field: str = option("text", "field that holds the text, in .jsonl files and TFDS examples")
    tokenizer: str = option("bytes", "bytes | bpe (trained on the corpus) | path of a tokenizer's file or directory")
    bpe_vocab: int = option(4096, "vocabulary of tokenizer = 'bpe'", low=257)
    packing: Literal["stream", "documents"] = option("stream", "one running stream, or whole documents with segments")
    manual_dir: str = option("", "directory with files downloaded by hand (wikitext2, enwik8, text8)")
    cache_dir: str = option("", "where prepared data is kept; '' is $XFRESEARCH_CACHE or ~/.cache/xfresearch")
    workers: int = option(0, "threads that tokenise; 0 is one per core", low=0)
    prefetch: int = option(4, "batches prepared ahead of the step", low=1)


@dataclass(frozen=True)
class OptimizerConfig:
    kind: Literal["adamw", "lion", "adafactor", "adagrad", "muon", "sgd"] = option("adamw", "update rule")
    learning_rate: float = option(1e-3, "peak learning rate", low=0.0)
    schedule: Literal["constant", "cosine", "linear", "wsd"] = option(
        "cosine", "shape after warm-up; wsd is stable, then linear decay"
    )
    warmup: int = option(100, "steps of linear warm-up", low=0)
    final_fraction: float = option(0.1, "last learning rate as a share of the peak", low=0.0, high=1.0)
    decay_fraction: float = option(0.2, "share of the steps that wsd decays over", low=0.0, high=1.0)
    weight_decay: float = option(0.1, "decoupled decay of kernels; norms, biases and embeddings have none", low=0.0)
    beta1: float = option(0.9, "first moment (momentum for sgd and muon)", low=0.0, high=0.9999)
    beta2: float = option(0.95, "second moment", low=0.0, high=0.999999)
    epsilon: float = option(1e-8, "added to the second moment's root", low=0.0)
    clip: float = option(1.0, "largest global norm of the gradient; 0 is no clipping", low=0.0)


@dataclass(frozen=True)
class TrainingConfig:
    accumulate: int = option(1, "microbatches whose gradients make one update", low=1)
    z_loss: float = option(0.0, "weight of the head's z-loss: mean of logsumexp(logits)^2", low=0.0)
    ema: float = option(0.0, "decay of the averaged weights that evaluation uses; 0 keeps none", low=0.0, high=0.999999)
    on_nonfinite: Literal["stop", "skip"] = option("stop", "a loss or gradient that is not finite: stop, or skip it")
    remat: Literal["none", "full", "dots"] = option("none", "what the backward pass computes anew")
    layers: Literal["auto", "scan", "unroll"] = option("auto", "how layers are compiled; auto: unroll on CPU")
    loss_rows: int = option(1024, "tokens whose logits exist at once in the loss", low=1)


@dataclass(frozen=True)
class MeshConfig:
    data: int = option(-1, "replicas of the model; -1 is every device left over", low=-1)
    fsdp: int = option(1, "shards of parameters, gathered when used", low=1)
    expert: int = option(1, "shards of the experts", low=1)
    tensor: int = option(1, "shards of heads, hidden units and vocabulary", low=1)
    context: int = option(1, "shards of the sequence", low=1)


@dataclass(frozen=True)
class CheckpointConfig:
    every: int = option(500, "steps between checkpoints; the last step is always saved", low=1)
    keep: int = option(2, "newest checkpoints kept", low=1)
    keep_every: int = option(0, "also keep every checkpoint whose step this divides; 0 is none", low=0)
    keep_best: bool = option(True, "also keep the checkpoint with the best validation loss")


@dataclass(frozen=True)
class EvaluationConfig:
    every: int = option(500, "steps between evaluations; the last step is always evaluated; 0 is never", low=0)
    sequences: int = option(256, "sequences of the split to use during training; 0 is all of them", low=0)
    final_sequences: int = option(0, "sequences of the split to use after the last step; 0 is all of them", low=0)
    split: str = option("validation", "split of the corpus")
    batch_size: int = option(0, "sequences per batch; 0 is the training batch", low=0)


@dataclass(frozen=True)
class LogConfig:
    every: int = option(1, "steps between rows of metrics.jsonl and TensorBoard", low=1)
    tensorboard: bool = option(True, "write TensorBoard event files")
    layer_norms: bool = option(False, "log norms of parameters, gradients and updates, layer by layer")
    sample: str = option("", "prompt of the sample in report.html; '' is the start of the validation split")


@dataclass(frozen=True)
class Config:
    """A whole run."""

    seed: int = option(0, "of initialisation, batches and dropout", low=0)
    steps: int = option(1000, "updates", low=1)
    batch_size: int = option(16, "sequences per update, over all devices", low=1)
    sequence_length: int = option(256, "tokens per sequence", low=2)
    data: DataConfig = option(DataConfig(), "text")
    model: ModelConfig = option(ModelConfig(), "transformer")
    optimizer: OptimizerConfig = option(OptimizerConfig(), "updates and their learning rate")
    training: TrainingConfig = option(TrainingConfig(), "how an update is computed")
    mesh: MeshConfig = option(MeshConfig(), "devices")
    checkpoint: CheckpointConfig = option(CheckpointConfig(), "what is saved")
    evaluation: EvaluationConfig = option(EvaluationConfig(), "held-out loss")
    log: LogConfig = option(LogConfig(), "what is written")


def resolve(config: Config) -> Config:
    """`config` with its derived sizes filled in and every combination checked; UserError on the first that is wrong."""
    model = config.model
    if not model.max_length:
        model = replace(model, max_length=config.sequence_length)
    if model.position == "learned":
        require(
            config.sequence_length <= model.max_length,
            "sequence_length",
            config.sequence_length,
            f"at most model.max_length={model.max_length}, the rows of the learned position table",
        )
    require(
        model.causal, "model.causal", False, "True to train: a model that sees the tokens it predicts learns nothing"
    )
    config = replace(config, model=resolve_model(model))
    _check_data(config.data)
    _check_training(config)
    return config


def resolve_model(model: ModelConfig) -> ModelConfig:
    """A model's config with head sizes and hidden sizes filled in and checked; UserError on the first that is wrong."""
    blocks = {name: _resolve_block(block, model.width, f"model.blocks.{name}") for name, block in model.blocks.items()}
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
    for name, block in blocks.items():
        if block.feed_forward.kind == "moe":
            _check_moe(model, block.feed_forward.moe, f"model.blocks.{name}.feed_forward.moe")
    return replace(model, blocks=blocks)


def _resolve_block(block: BlockConfig, width: int, key: str) -> BlockConfig:
    attention = block.attention
    if not attention.head_size:
        require(
            width % attention.heads == 0,
            f"{key}.attention.heads",
            attention.heads,
            f"a divisor of model.width={width}, or set attention.head_size",
        )
        attention = replace(attention, head_size=width // attention.heads)
    attention = replace(attention, kv_heads=attention.kv_heads or attention.heads)
    require(
        attention.heads % attention.kv_heads == 0,
        f"{key}.attention.kv_heads",
        attention.kv_heads,
        f"a divisor of attention.heads={attention.heads}",
    )
    require(
        attention.position != "rope" or attention.head_size % 2 == 0,
        f"{key}.attention.head_size",
        attention.head_size,
        "an even number under position='rope'",
    )
    require(
        block.layout != "all_attention" or attention.memory_slots > 0,
        f"{key}.attention.memory_slots",
        attention.memory_slots,
        "at least 1 under layout='all_attention', whose memory stands for the feed-forward",
    )
    moe = block.feed_forward.moe
    require(moe.top_k <= moe.experts, f"{key}.feed_forward.moe.top_k", moe.top_k, f"at most moe.experts={moe.experts}")
    require(
        not (block.feed_forward.kind == "moe" and block.feed_forward.bias),
        f"{key}.feed_forward.bias",
        True,
        "False under kind='moe'",
    )
    check_sites(block, key)
    feed_forward = replace(block.feed_forward, hidden=block.feed_forward.hidden or 4 * width)
    return replace(block, attention=attention, feed_forward=feed_forward)


def _check_moe(model: ModelConfig, moe: MoeConfig, key: str) -> None:
    if moe.routing == "token_choice":
        needs = "at least 1 where an expert's capacity is a share of it"
        require(not moe.capacity or model.max_length > 0, "model.max_length", model.max_length, needs)
        return
    later = "'token_choice' where model.causal=True: an expert would choose among later tokens"
    require(not model.causal, f"{key}.routing", moe.routing, later)
    under = "under routing='expert_choice'"
    require(moe.capacity > 0, f"{key}.capacity", moe.capacity, f"above 0 {under}")
    require(
        not moe.renormalise, f"{key}.renormalise", True, f"False {under}: a token's experts do not know of each other"
    )
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


def _check_training(config: Config) -> None:
    optimizer, training = config.optimizer, config.training
    require(optimizer.warmup <= config.steps, "optimizer.warmup", optimizer.warmup, f"at most steps={config.steps}")
    require(
        config.batch_size % training.accumulate == 0,
        "training.accumulate",
        training.accumulate,
        f"a divisor of batch_size={config.batch_size}",
    )


def require(condition: bool, key: str, value, allowed: str) -> None:
    """UserError in the one form that all of them have: key, value given, what is allowed."""
    if not condition:
        raise UserError(f"config.{key}={value!r} is not allowed: it must be {allowed}")
