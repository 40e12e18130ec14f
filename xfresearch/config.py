"""The configuration of a run: frozen, typed dataclasses.

Every choice is a field here with its default, its range and one line of documentation. `config_io` turns
ml-collections files, dotted overrides and JSON into these classes; nothing below it ever sees a ConfigDict.
A field that is 0 (or '') where its text says so is filled in by `resolving.py`, so that models only meet concrete numbers.
"""

import dataclasses
from dataclasses import dataclass, field
from typing import Literal

from xfresearch.models.layouts import LAYOUTS
from xfresearch.models.variants import ACTIVATIONS, ATTENTIONS, FEED_FORWARDS, NORMS


def option(default, doc: str, low=None, high=None, above=None):
    """A field with its documentation and, for numbers, the closed range it may take, or what it must be above."""
    metadata = {"doc": doc, "low": low, "high": high, "above": above}
    if dataclasses.is_dataclass(default) or isinstance(default, dict):
        return field(default_factory=lambda: dict(default) if isinstance(default, dict) else default, metadata=metadata)
    return field(default=default, metadata=metadata)


# Names of variants are those of the tables in models/variants.py and models/layouts.py.
NormKind = Literal[*NORMS]
SiteNormKind = Literal["", *NORMS]
AttentionKind = Literal[*ATTENTIONS]
ExpertKind = Literal[*[name for name, activation in ACTIVATIONS.items() if not activation.norm]]
# Slots in the heads' softmax, or slots of the model's width under an activation that acts on each of them alone.
MemoryActivation = Literal["softmax", *[name for name, a in ACTIVATIONS.items() if a.elementwise and not a.gated]]
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
class RopeConfig:
    theta: float = option(10_000.0, "base of the frequencies", low=1.0)
    fraction: float = option(1.0, "share of each head's dimensions that is rotated, the first ones", low=0.0, high=1.0)
    scaling: Literal["none", "linear", "llama3", "yarn"] = option(
        "none", "how frequencies are stretched for a longer context"
    )
    factor: float = option(8.0, "by how much", low=1.0)
    low_frequency: float = option(
        1.0, "llama3, yarn: turns in the original length below which a frequency is stretched", low=0.0
    )
    high_frequency: float = option(4.0, "llama3, yarn: turns above which it is kept (YaRN's authors: 32)", low=0.0)
    original_length: int = option(8192, "llama3, yarn: context that the model was trained with first", low=1)
    attention_factor: float = option(
        0.0, "yarn: factor of what is rotated, queries and keys alike; 0 is 0.1 ln(factor) + 1", low=0.0
    )


@dataclass(frozen=True)
class LambdaConfig:
    key_size: int = option(16, "size K of keys and queries", low=1)
    window: int = option(23, "tokens R that a position lambda reaches, itself included; 0 is model.max_length", low=0)
    depth: int = option(1, "keys and values U of a token, summed over in its lambda", low=1)
    norm: NormKind = option("layer", "norm of queries and values")
    chunk: int = option(32, "tokens computed at once; 16 to 32 are fastest on CPU", low=1)


@dataclass(frozen=True)
class AttentionConfig:
    kind: AttentionKind = option("softmax", "how positions are mixed")
    heads: int = option(4, "query heads H", low=1)
    kv_heads: int = option(0, "key-value heads G, dividing H; 0 is H (multi-head), 1 is multi-query", low=0)
    head_size: int = option(0, "size K of a head; 0 is width / heads", low=0)
    query: Literal["learned", "identity", "identity_whole", "merged"] = option(
        "learned",
        "queries: a matrix, the input split among the heads, the whole input for every head, or one matrix per head in "
        "place of the pair of query and key",
    )
    rank: int = option(0, "rank of query = 'merged', and of nothing else; 0 is full", low=0)
    key: Literal["learned", "identity", "identity_whole"] = option("learned", "keys, as for queries")
    value: Literal["learned", "identity", "identity_whole", "identity_plus", "key"] = option(
        "learned",
        "values, as for queries; 'identity_plus' is a trained matrix a I + b W, a = b = 1 and W = 0 at first; 'key' is what "
        "the keys are before norm and rotation",
    )
    output: Literal["learned", "identity"] = option("learned", "matrix W_O, or the heads side by side")
    position: Literal["none", "rope", "alibi", "t5", "relative_key"] = option(
        "none", "position information inside attention; relative_key and t5 are shared by all layers"
    )
    rope: RopeConfig = option(RopeConfig(), "rotary frequencies, for position = 'rope'")
    t5_buckets: int = option(32, "buckets of distances, for position = 't5'", low=4)
    t5_distance: int = option(128, "distance from which all share the last bucket, for position = 't5'", low=4)
    qk_norm: NormKind = option("none", "norm of queries and keys")
    qk_norm_over: Literal["head", "heads"] = option(
        "head", "what it is over: each head by itself, or all heads of a token together"
    )
    clip: float = option(
        0.0,
        "queries, keys and values are clipped to [-clip, clip], after norms and before RoPE (OLMo); 0 is not",
        low=0.0,
    )
    bias: tuple[str, ...] = option(
        (), "learned projections that have a bias: names among 'query', 'key', 'value', 'output'"
    )
    scale: float = option(0.0, "factor of the logits; 0 is 1/sqrt(size of a query), or of head_size if merged", low=0.0)
    softcap: float = option(
        0.0,
        "c in c tanh(products / c) of queries and keys, before biases and the mask (Gemma 2: 50); 0 is none",
        low=0.0,
    )
    memory_slots: int = option(0, "persistent key-value slots M, in one softmax with the context", low=0)
    memory_heads: Literal["each", "shared"] = option("each", "slots of each key-value head's own, or one set for all")
    memory_activation: MemoryActivation = option(
        "softmax",
        "softmax: slots of the heads' sizes join their softmax; another: f(x k^T + b) v beside the heads, with keys and "
        "values of the model's width and a bias (the feed-forward restated as memory)",
    )
    sees_itself: bool = option(True, "a token attends to itself, and not only to those before it")
    window: int = option(0, "how many tokens a token attends to, the nearest ones; 0 is all", low=0)
    span: Literal["full", "adaptive"] = option("full", "adaptive: each head learns how much of the window it uses")
    trimmed: int = option(0, "tokens back that trained spans need, set by evaluation; 0 is not trimmed", low=0)
    span_ramp: int = option(32, "tokens over which an adaptive span fades out", low=1)
    span_loss: float = option(2e-6, "weight of an adaptive span's mean length in tokens, in the loss", low=0.0)
    shaping: Literal["none", "skip_init", "shaped"] = option(
        "none", "trained mixture of the weights A with the identity: aI + bA, or aI + bA - cC with C uniform"
    )
    lambdas: LambdaConfig = option(LambdaConfig(), "lambda layers, for kind = 'lambda'")
    dropout: float = option(0.0, "dropout rate of the attention weights", low=0.0, high=0.99)
    kernel: Literal["auto", "plain", "blocked", "banded", "chunked", "splash", "cudnn", "pallas", "ring"] = option(
        "auto", "implementation in training (docs/kernels.md); auto is the platform's fastest that serves the block"
    )


@dataclass(frozen=True)
class MoeConfig:
    experts: int = option(8, "experts E", low=1)
    top_k: int = option(2, "experts that each token uses", low=1)
    expert: ExpertKind = option("swiglu", "kind of each expert")
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
    kernel: Literal["auto", "ragged", "blocked", "megablox"] = option(
        "auto", "product of rows with their experts; auto is the platform's fastest"
    )


@dataclass(frozen=True)
class FeedForwardConfig:
    kind: FeedForwardKind = option("gelu", "activation, or 'moe' for sparse experts")
    hidden: int = option(0, "hidden size F (of each expert); 0 is hidden_factor * width", low=0)
    hidden_factor: float = option(4.0, "hidden size over width, where hidden is 0", low=0.0)
    gated_hidden: Literal["same", "matched"] = option(
        "same",
        "where hidden is 0, gated kinds have the same hidden size, or 2/3 of it (to the nearest 8): equal parameters",
    )
    bias: bool = option(False, "biases on the projections")
    moe: MoeConfig = option(MoeConfig(), "experts, for kind = 'moe'")


@dataclass(frozen=True)
class BlockConfig:
    layout: LayoutKind = option("pre_norm", "where norms and skips stand (models/block.py)")
    norm: NormKind = option("layer", "norm of every site of the block")
    norms: NormSites = option(NormSites(), "norm of single sites, where they differ")
    norm_gain: bool = option(True, "norms have a trained gain")
    norm_offset: float = option(0.0, "added to every trained gain, which starts at 1 less (Gemma: 1)", low=0.0)
    norm_bias: bool = option(False, "norms have a trained bias")
    norm_bare: tuple[str, ...] = option((), "sites whose norm has neither gain nor bias (attention_in, ...)")
    norm_epsilon: float = option(1e-5, "added to the mean square", low=0.0)
    norm_cast: Literal["after_gain", "before_gain"] = option(
        "after_gain", "where float32 goes back to the dtype of the computation (before_gain as in Llama)"
    )
    norm_alpha: float = option(0.5, "first value of dyt's alpha", above=0.0)
    norm_alpha_attention: float = option(
        0.0, "first value of dyt's alpha at attention's sites; 0 is norm_alpha", low=0.0
    )
    branch_gain: float = option(
        0.0, "first value of the feed-forward's trained gain (skipless layouts); 0 is 0.1 sqrt(18 / depth)", low=0.0
    )
    dropout: float = option(0.0, "dropout rate of what each sublayer writes", low=0.0, high=0.99)
    attention: AttentionConfig = option(AttentionConfig(), "the sublayer that mixes positions")
    feed_forward: FeedForwardConfig = option(FeedForwardConfig(), "the sublayer that acts on each position")


@dataclass(frozen=True)
class ModelConfig:
    width: int = option(256, "width D of the residual stream", low=1)
    depth: int = option(4, "layers N, a multiple of the pattern's length", low=1)
    vocab_size: int = option(0, "vocabulary V; 0 is the tokenizer's, or the classes of a data set with labels", low=0)
    max_length: int = option(0, "tokens that positions, spans and capacities reckon with; 0 is sequence_length", low=0)
    pattern: tuple[str, ...] = option(("main",), "names of blocks, repeated to fill the depth")
    blocks: dict[str, BlockConfig] = option({"main": BlockConfig()}, "the blocks that the pattern names")
    position: Literal["none", "learned", "sinusoidal"] = option("none", "positions added to the embedding")
    position_offset: int = option(0, "row of the learned positions that position 0 reads (OPT: 2)", low=0)
    embedding_norm: NormKind = option("none", "norm after the embedding")
    embedding_scale: Literal["none", "sqrt_width", "learned"] = option(
        "none", "factor of the embedding, before positions are added; learned starts at sqrt(width)"
    )
    final_norm: NormKind = option("layer", "norm before the head")
    tie_embeddings: bool = option(True, "the head is the embedding's transpose")
    head_bias: bool = option(False, "the head has a bias")
    logit_softcap: float = option(
        0.0, "c in logits = c tanh(logits / c), after the bias (Gemma 2: 30); 0 is none", low=0.0
    )
    causal: bool = option(
        True, "a position sees only itself and those before; False trains on labels alone (docs/majority.md)"
    )
    dropout: float = option(0.0, "dropout rate of the embedding", low=0.0, high=0.99)
    init: Literal["fan_in", "normal"] = option(
        "fan_in", "std of kernels and embedding: 1/sqrt(inputs) (1/sqrt(width)), or init_std"
    )
    init_std: float = option(0.02, "std under init = 'normal'", above=0.0)
    embedding_std: float = option(0.0, "std of the token embedding; 0 is as init says", low=0.0)
    dtype: Literal["float32", "bfloat16", "float64"] = option("float32", "dtype of the computation")
    param_dtype: Literal["float32", "float64"] = option("float32", "dtype in which parameters are kept")

    def __hash__(self):  # `blocks` is a dict; equal configs have equal texts
        return hash(repr(self))


@dataclass(frozen=True)
class DataConfig:
    corpus: tuple[str, ...] = option(
        ("python_stdlib",), "corpora: NAME or NAME:PATH (text_files:notes/*.txt), or one with labels (majority)"
    )
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
    clip: float = option(1.0, "largest norm of a gradient, as clip_by says; 0 is no clipping", low=0.0)
    clip_by: Literal["global", "tensor"] = option(
        "global",
        "global: the gradient is clipped by the norm over all parameters, before scaling; tensor (adagrad only): each "
        "layer's tensor takes a step times min(1, clip / norm of its gradient), and the sum of squares is not clipped",
    )


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
    data: int = option(-1, "replicas of the model; one axis may be -1: every device left over", low=-1)
    fsdp: int = option(1, "shards of parameters, gathered when used", low=-1)
    expert: int = option(1, "shards of the experts", low=-1)
    tensor: int = option(1, "shards of heads, hidden units and vocabulary", low=-1)
    context: int = option(1, "shards of the sequence", low=-1)
    between: Literal["auto", "data", "fsdp", "expert", "tensor", "context"] = option(
        "auto", "axis whose parts are spread over slices, where there are several; auto is the first that can be"
    )


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
    profile_start: int = option(0, "first update that is profiled; 0 is none", low=0)
    profile_steps: int = option(5, "updates that a profile covers", low=1)
    sample: str = option("", "prompt of the sample in report.html; '' is the start of the validation split")


@dataclass(frozen=True)
class Config:
    """A whole run."""

    seed: int = option(0, "of initialisation, batches and dropout", low=0, high=2**31 - 1)
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
