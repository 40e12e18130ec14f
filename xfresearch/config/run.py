"""The options of a run: a model, its data, and how it is trained."""

from dataclasses import dataclass
from typing import Literal

from xfresearch.config.fields import group, option
from xfresearch.models.model_config import ModelConfig


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
    manual_dir: str = option(
        "", "directory with files downloaded by hand (wikitext2, enwik8, text8)", decides="machine"
    )
    cache_dir: str = option(
        "", "where prepared data is kept; '' is $XFRESEARCH_CACHE or ~/.cache/xfresearch", decides="machine"
    )
    workers: int = option(0, "threads that tokenise; 0 is one per core", low=0, decides="machine")
    prefetch: int = option(4, "batches prepared ahead of the step", low=1, decides="machine")


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
    remat: Literal["none", "full", "dots"] = option(
        "none", "what the backward pass computes anew", decides="execution"
    )
    layers: Literal["auto", "scan", "unroll"] = option(
        "auto", "how layers are compiled; auto: unroll on CPU", decides="execution"
    )
    loss_rows: int = option(1024, "tokens whose logits exist at once in the loss", low=1, decides="execution")
    attention_kernel: Literal["auto", "plain", "blocked", "banded", "chunked", "splash", "cudnn", "ring"] = option(
        "auto",
        "implementation of attention (docs/kernels.md); auto is the platform's fastest that can serve the model",
        decides="execution",
    )
    expert_kernel: Literal["auto", "ragged", "blocked", "megablox"] = option(
        "auto", "product of rows with their experts; auto is the platform's fastest", decides="execution"
    )


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

    seed: int = option(
        0, "of initialisation, batches and dropout", low=0, high=2**31 - 1, decides="training"
    )
    steps: int = option(1000, "updates", low=1, decides="training")
    batch_size: int = option(16, "sequences per update, over all devices", low=1, decides="training")
    sequence_length: int = option(256, "tokens per sequence", low=2, decides="training")
    data: DataConfig = group(DataConfig(), "text", decides="training")
    model: ModelConfig = group(ModelConfig(), "transformer")
    optimizer: OptimizerConfig = group(OptimizerConfig(), "updates and their learning rate", decides="training")
    training: TrainingConfig = group(TrainingConfig(), "how an update is computed", decides="training")
    mesh: MeshConfig = group(MeshConfig(), "devices", decides="execution")
    checkpoint: CheckpointConfig = group(CheckpointConfig(), "what is saved", decides="execution")
    evaluation: EvaluationConfig = group(EvaluationConfig(), "held-out loss", decides="execution")
    log: LogConfig = group(LogConfig(), "what is written", decides="execution")
