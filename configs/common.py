"""Settings that the named configs share: data, batch, steps and optimizer for each size."""

from xfresearch.run_config.config_files import default_config
from xfresearch.runtime.errors import UserError, nearest

SIZES = ("full", "3m", "tiny")


def base(size: str, sizes=SIZES):
    """A config with the settings of a run of `size`. Raises UserError for an unknown size."""
    if size not in sizes:
        raise UserError(f"there is no size {size!r}{nearest(size, sizes)} (allowed: {', '.join(sizes)})")
    config = default_config()
    {"3m": _three_million, "5m": _five_million, "tiny": _tiny}.get(size, _full)(config)
    return config


def _full(config) -> None:
    config.data.tokenizer, config.data.bpe_vocab = "bpe", 32_000
    config.batch_size, config.steps, config.optimizer.warmup = 64, 20_000, 500
    config.optimizer.learning_rate = 6e-4
    config.model.dtype = "bfloat16"


def _five_million(config) -> None:
    """About 5 M parameters and 1.2 M tokens of WikiText-2 (4.5 MB of text): some minutes on two cores."""
    config.data.corpus, config.data.tokenizer, config.data.bpe_vocab = ("wikitext2",), "bpe", 2048
    config.batch_size, config.sequence_length, config.steps = 16, 256, 300
    config.optimizer.kind, config.optimizer.learning_rate, config.optimizer.warmup = "muon", 1e-2, 20
    config.optimizer.schedule, config.optimizer.final_fraction = "linear", 0.0
    config.checkpoint.every = config.evaluation.every = 100
    config.evaluation.sequences = 64


def _three_million(config) -> None:
    """About 3 M parameters and 0.03 M tokens of WikiText-2 as bytes: the table of docs/data/tables/variants.md."""
    config.data.corpus, config.data.tokenizer = ("wikitext2",), "bytes"
    config.model.width, config.model.depth, config.model.blocks.main.attention.heads = 256, 4, 4
    config.batch_size, config.sequence_length, config.steps = 8, 128, 32
    config.optimizer.learning_rate, config.optimizer.warmup = 3e-3, 4
    config.optimizer.schedule, config.optimizer.final_fraction = "linear", 0.0
    config.checkpoint.every, config.evaluation.every = 1000, 1000
    config.evaluation.final_sequences = 128


def _tiny(config) -> None:
    """A small model on bytes, to try commands with. Most of its run is compilation."""
    config.model.width, config.model.depth = 32, 2
    config.model.blocks.main.attention.heads = 4
    config.batch_size, config.sequence_length, config.steps = 8, 64, 30
    config.optimizer.warmup, config.optimizer.learning_rate = 5, 1e-2
    config.checkpoint.every = config.evaluation.every = 15
    config.evaluation.sequences = config.evaluation.final_sequences = 32
