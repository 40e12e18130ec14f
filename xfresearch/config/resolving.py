"""Fills in a run's derived options and checks what needs more than one of them; UserError on the first that is wrong."""

from dataclasses import replace

from xfresearch.config.fields import check_read
from xfresearch.config.reading import from_dict
from xfresearch.config.run import Config, DataConfig
from xfresearch.data.labels import OF_TEXT, open_data_set, trains_on_labels
from xfresearch.errors import require
from xfresearch.models.model_config import ModelConfig, longest_sequence, resolve_model


def resolve(config: Config) -> Config:
    """`config` with its derived sizes filled in and every combination checked; UserError on the first that is wrong."""
    model = config.model
    if not model.max_length:
        model = replace(model, max_length=config.sequence_length)
    config = replace(config, model=resolve_model(model))
    check_read(config, "")
    limit = longest_sequence(config.model)
    rows = f"at most model.max_length={limit}, the rows of the model's table of positions"
    require(not limit or config.sequence_length <= limit, "sequence_length", config.sequence_length, rows)
    _check_data(config.data)
    _check_training(config)
    if trains_on_labels(config.data):
        return _resolve_labels(config)
    blind = "True to train on next tokens: a model that sees the tokens it predicts learns nothing"
    require(config.model.causal, "model.causal", False, blind)
    return config


def model_from(value) -> ModelConfig:
    """A resolved ModelConfig from one, from a ConfigDict or mapping (`config.model`), or from a whole run's config."""
    if isinstance(value, Config):
        return resolve(value).model
    if isinstance(value, ModelConfig):
        return resolve_model(value)
    if "model" in value:
        return resolve(from_dict(Config, value)).model
    return resolve_model(from_dict(ModelConfig, value, "config.model"))


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
