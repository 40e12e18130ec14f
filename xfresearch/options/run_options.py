"""The options of a run but those of its model: its data, and how it is trained."""

from dataclasses import dataclass
from typing import Any, Literal

from xfresearch.options.fields import choice, group, option, where
from xfresearch.options.objectives import OBJECTIVES


@dataclass(frozen=True)
class DataConfig:
    corpus: tuple[str, ...] = option(
        ("python_stdlib",),
        "corpora: NAME, NAME:PATH or the PATH of text files, or a single data set with labels (docs/playground.md)",
    )
    objective: Any = choice(OBJECTIVES, "next", "what a model predicts, and from what (docs/objectives.md)")
    weights: tuple[float, ...] = option((), "share of sequences from each corpus; () for equal shares")
    text_field: str = option(
        "text", "field or column with the text, in files of rows, such as JSON lines, CSV and parquet, and TFDS examples"
    )
    tokenizer: str = option("bytes", "bytes | bpe (trained on the corpus) | path of a tokenizer file or directory")
    bpe_vocab: int = option(4096, "vocabulary size with tokenizer = 'bpe'", low=257)
    packing: Literal["stream", "documents"] = option(
        "stream", "sequences are parts of one stream of text, or hold whole documents with segment ids"
    )
    manual_dir: str = option("", "directory of manually downloaded files (wikitext2, enwik8, text8)", decides="machine")
    cache_dir: str = option(
        "",
        "directory of prepared data; '' for $XFRESEARCH_CACHE if set, otherwise ~/.cache/xfresearch",
        decides="machine",
    )
    links: Literal["inside", "anywhere"] = option(
        "inside", "links in a directory of a corpus that are followed: those that stay inside it, or any", decides="machine"
    )
    shards: str = option(
        "",
        "folder or bucket of prepared shards that hosts share; '' for the cache",
        decides="machine",
    )
    workers: int = option(0, "processes that prepare text; 0 for one per core", low=0, decides="machine")
    prefetch: int = option(4, "batches that are prepared in advance", low=1, decides="machine")


@dataclass(frozen=True)
class OptimizerConfig:
    kind: Literal["adamw", "lion", "adafactor", "adagrad", "muon", "sgd"] = option("adamw", "update rule")
    learning_rate: float = option(1e-3, "peak learning rate", low=0.0)
    schedule: Literal["constant", "cosine", "linear", "wsd"] = option(
        "cosine", "learning rate after warm-up; wsd (warm-up, stable, decay) ends with a linear decay"
    )
    warmup: int = option(100, "updates of linear warm-up; a run that is shorter says so", low=0)
    final_fraction: float = option(0.1, "final learning rate as a fraction of the peak", low=0.0, high=1.0)
    decay_fraction: float = option(
        0.2, "fraction of the updates in which the rate decays", low=0.0, high=1.0, needs=where(schedule="wsd")
    )
    weight_decay: float = option(0.1, "decoupled decay of kernels; norms, biases and embeddings do not decay", low=0.0)
    beta1: float = option(
        0.9,
        "decay of the first moment (sgd: of the momentum; muon: for parameters other than matrices)",
        low=0.0,
        high=0.9999,
        needs=where(kind=("adamw", "lion", "muon", "sgd")),
    )
    beta2: float = option(
        0.95, "decay of the second moment", low=0.0, high=0.999999, needs=where(kind=("adamw", "lion", "muon"))
    )
    epsilon: float = option(
        1e-8, "added to the square root of the second moment", low=0.0, needs=where(kind=("adamw", "adagrad", "muon"))
    )
    clip: float = option(1.0, "maximum gradient norm (see clip_by); 0 disables clipping", low=0.0)
    clip_by: Literal["global", "tensor"] = option(
        "global",
        "global: clip the gradient by its norm over all parameters, before scaling; tensor (adagrad only): multiply "
        "the step of each layer's tensor by min(1, clip / norm of its gradient), with unclipped sums of squares",
    )
    trainable: tuple[str, ...] = option(
        (), "patterns of the paths of the parameters to train, such as ('*norm*','head/*'); () for all parameters"
    )


@dataclass(frozen=True)
class TrainingConfig:
    accumulate: int = option(1, "microbatches per update; their gradients are accumulated", low=1)
    z_loss: float = option(0.0, "weight of the output head's z-loss, the mean of logsumexp(logits)^2", low=0.0)
    ema: float = option(0.0, "decay of the parameter average that evaluation uses; 0 for none", low=0.0, high=0.999999)
    on_nonfinite: Literal["stop", "skip"] = option(
        "stop", "stop the run if the loss or a gradient is not finite, or skip the update, also if its result is not finite"
    )
    skip_limit: float = option(
        0.5,
        "largest share of skipped updates among the last 100, or at the end among all if there are fewer; with more, the "
        "run fails",
        low=0.0,
        high=1.0,
        decides="execution",
        needs=where(on_nonfinite="skip"),
    )
    remat: Literal["none", "full", "dots"] = option(
        "none",
        "activations that the backward pass recomputes; dots: all but matrix products without batch dimensions",
        decides="execution",
    )
    layers: Literal["auto", "scan", "unroll"] = option(
        "auto", "how layers are compiled; auto: the fastest on the device (docs/sharding.md)", decides="execution"
    )
    loss_rows: int = option(
        0, "tokens whose logits the loss computes at a time; 0: by the device (docs/sharding.md)", low=0, decides="execution"
    )
    attention_kernel: Literal[
        "auto", "plain", "blocked", "banded", "chunked", "splash", "cudnn", "tokamax", "ring"
    ] = option(
        "auto",
        "implementation of attention (docs/sharding.md); auto: the fastest one that supports the platform and the model",
        decides="execution",
    )
    expert_kernel: Literal["auto", "ragged", "blocked", "megablox", "tokamax"] = option(
        "auto", "implementation of expert matrix products; auto: the fastest one on the platform", decides="execution"
    )


@dataclass(frozen=True)
class MeshConfig:
    data: int = option(-1, "replicas of the model; one axis may be -1 for all remaining devices", low=-1)
    fsdp: int = option(1, "shards of the parameters, which are gathered when used", low=-1)
    expert: int = option(1, "shards of the experts", low=-1)
    tensor: int = option(1, "shards of heads, hidden units and vocabulary", low=-1)
    context: int = option(1, "shards of the sequence", low=-1)
    between: Literal["auto", "data", "fsdp", "expert", "tensor", "context"] = option(
        "auto", "axis that is split across slices if there are several; auto: the first axis that can be split"
    )


@dataclass(frozen=True)
class CheckpointConfig:
    every: int = option(500, "updates between checkpoints; the last update is always saved", low=1)
    seconds: float = option(0.0, "least seconds between checkpoints of `every`; one that is due sooner is left out", low=0.0)
    keep: int = option(2, "number of newest checkpoints to keep; the last one that is known to be good always is", low=1)
    keep_every: int = option(0, "also save and keep those of `every` whose step is a multiple of this; 0 for none", low=0)
    keep_best: bool = option(True, "also keep the checkpoint with the best loss on evaluation.sequences sequences")
    emergency: str = option(
        "", "directory on each machine, best in memory, for emergency checkpoints (docs/launch.md); '' for none"
    )
    emergency_every: int = option(50, "updates between emergency checkpoints", low=1)


@dataclass(frozen=True)
class EvaluationConfig:
    every: int = option(500, "updates between evaluations; the last update is always evaluated; 0 for never", low=0)
    sequences: int = option(256, "sequences per evaluation during training; 0 for the whole split", low=0)
    final_sequences: int = option(0, "sequences of the evaluation after the last update; 0 for the whole split", low=0)
    split: str = option("validation", "split of the corpus to evaluate on")
    batch_size: int = option(0, "sequences per evaluation batch; 0 for the training batch size", low=0)


@dataclass(frozen=True)
class LogConfig:
    every: int = option(1, "updates between rows of metrics.jsonl and TensorBoard", low=1)
    tracker: Literal["tensorboard", "wandb", "mlflow", "jsonl"] = option(
        "tensorboard", "where the rows of metrics.jsonl go as well (docs/training.md#trackers); jsonl: nowhere else"
    )
    layer_norms: bool = option(False, "log norms of parameters, gradients and updates of each layer")
    profile_start: int = option(0, "first update to profile; 0 for no profile", low=0)
    profile_steps: int = option(5, "number of updates to profile", low=1)
    panel: int = option(0, "updates between figures of every layer (docs/anatomy.md); 0 for none", low=0)
    sample: str = option("", "first prompt of the samples in report.html; '' for one of the held-out text")


@dataclass(frozen=True)
class StartConfig:
    path: str = option(
        "",
        "trained model whose config, tokenizer and parameters the run starts from: a run, one of its checkpoints, a "
        "Hugging Face folder or a .bin file of llama2.c; '' for new parameters",
    )


@dataclass(frozen=True)
class RunConfig:
    """The options of a run. Packages that know no model take this class; run_config/config.py adds the model's options."""

    seed: int = option(
        0, "random seed of initialisation, batches and dropout", low=0, high=2**31 - 1, decides="training"
    )
    steps: int = option(1000, "number of updates", low=1, decides="training")
    batch_size: int = option(16, "sequences per update, over all devices", low=1, decides="training")
    sequence_length: int = option(256, "tokens per sequence", low=2, decides="training")
    source_length: int = option(
        0, "tokens of the source per sequence, for a model with an encoder; 0 without", low=0, decides="training"
    )
    data: DataConfig = group(DataConfig(), "training data", decides="training")
    start: StartConfig = group(StartConfig(), "the model that training starts from", decides="training")
    model: Any = None  # here for the order of the fields
    optimizer: OptimizerConfig = group(OptimizerConfig(), "update rule and learning rate", decides="training")
    training: TrainingConfig = group(TrainingConfig(), "computation of an update", decides="training")
    mesh: MeshConfig = group(MeshConfig(), "the mesh of devices", decides="execution")
    checkpoint: CheckpointConfig = group(CheckpointConfig(), "when to save, and what to keep", decides="execution")
    evaluation: EvaluationConfig = group(EvaluationConfig(), "evaluation on held-out text", decides="execution")
    log: LogConfig = group(LogConfig(), "metrics, profiles and the report", decides="execution")
