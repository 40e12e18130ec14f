"""Computes the derived options of a run and checks combinations of options."""

from dataclasses import replace
from typing import Any

from xfresearch.data.labels import TEXT_OPTIONS, open_data_set, trains_on_labels
from xfresearch.models.model_config import LIMITS, ModelConfig, longest_sequence, resolve_model
from xfresearch.options.objectives import KEY, OBJECTIVES
from xfresearch.options.reading import check_read, from_dict
from xfresearch.options.run_options import DataConfig
from xfresearch.run_config.config import Config
from xfresearch.runtime.errors import require


def resolve(config: Config) -> Config:
    """`config` with derived sizes filled in and combinations checked. Raises UserError at the first invalid one."""
    model = config.model
    if not model.max_length:
        model = replace(model, max_length=config.sequence_length)
    config = replace(config, model=resolve_model(_with_source_length(config, model)))
    check_read(config, "")
    limit = longest_sequence(config.model)
    allowed = f"at most model.max_length={limit}, by {LIMITS}"
    require(not limit or config.sequence_length <= limit, "sequence_length", config.sequence_length, allowed)
    _check_data(config.data)
    _check_training(config)
    if trains_on_labels(config.data):
        return _resolve_labels(config)
    _check_objective(config)
    return config


def _with_source_length(config: Config, model: ModelConfig) -> ModelConfig:
    """The model whose encoder is for sources of at least `length` tokens. Raises UserError if only one of the two is
    given, or if the encoder's positions end before."""
    length = config.source_length
    if not model.encoder:
        allowed = "0 without an encoder (model.stacks), which would read the source"
        require(not length, "source_length", length, allowed)
        return model
    require(length > 0, "source_length", length, "at least 1, the tokens of a source, with model.stacks.encoder")
    options = model.stacks["encoder"]
    options = replace(options, max_length=options.max_length or length)
    allowed = f"at most {options.max_length}, by model.stacks.encoder.max_length"
    require(length <= options.max_length, "source_length", length, allowed)
    return replace(model, stacks={"encoder": options})


def model_from(value: Any) -> ModelConfig:
    """A resolved ModelConfig from a ModelConfig, a ConfigDict or mapping (`config.model`), or the config of a run."""
    if isinstance(value, ModelConfig):
        return resolve_model(value)
    if isinstance(value, Config):
        return _with_vocabulary(resolve(value))
    if "model" in value:
        return _with_vocabulary(resolve(from_dict(Config, value)))
    return resolve_model(from_dict(ModelConfig, value, "config.model"))


def _with_vocabulary(config: Config) -> ModelConfig:
    """The model of a run. A vocabulary size of 0 becomes that of the run's tokenizer."""
    from xfresearch.data.tokenizers import vocab_size

    model = config.model
    return replace(model, vocab_size=model.vocab_size or vocab_size(config.data))


def with_vocabulary(config: Config, needed: int) -> Config:
    """The config with model.vocab_size filled in. Raises UserError if it is set below what the tokenizer needs."""
    model = config.model
    allowed = f"0 or at least {needed}, which data.tokenizer={config.data.tokenizer!r} needs"
    require(not 0 < model.vocab_size < needed, "model.vocab_size", model.vocab_size, allowed)
    return replace(config, model=replace(model, vocab_size=model.vocab_size or needed))


def _check_data(data: DataConfig) -> None:
    require(len(data.corpus) > 0, "data.corpus", data.corpus, "at least one corpus")
    if data.weights:
        require(
            len(data.weights) == len(data.corpus) and min(data.weights) > 0,
            "data.weights",
            data.weights,
            f"one weight above 0 for each of the {len(data.corpus)} corpora",
        )


def _check_objective(config: Config) -> None:
    """Raises UserError if the objective and the model do not fit: see options/objectives.py."""
    objective, encoder = config.data.objective, bool(config.source_length)
    kinds = [name for name, each in OBJECTIVES.items() if (each.with_encoder if encoder else each.alone)]
    model = "a model with an encoder, which reads a source" if encoder else "a model without an encoder (model.stacks)"
    allowed = f"one of {', '.join(map(repr, kinds))} for {model}"
    require(objective.kind in kinds, f"{KEY}.kind", objective.kind, allowed)
    if encoder:
        allowed = "True: a decoder that sees the tokens it predicts learns nothing"
        require(config.model.causal, "model.causal", config.model.causal, allowed)
        packing, allowed = config.data.packing, f"'stream' with {KEY}.kind={objective.kind!r}"
        require(packing == "stream", "data.packing", packing, allowed)
    objective.check(config)


def _resolve_labels(config: Config) -> Config:
    """`config` with the vocabulary of its labels. Raises UserError if an option is set that only text has."""
    data = config.data
    model = config.model
    require(data.objective.kind == "next", "data.objective.kind", data.objective.kind, "'next' with a data set with labels")
    require(len(data.corpus) == 1, "data.corpus", data.corpus, "a single corpus if it is a data set with labels")
    reason = f"with data.corpus={data.corpus[0]!r}, which has labels and no text"
    for name in TEXT_OPTIONS:
        value = getattr(data, name)
        default = getattr(DataConfig(), name)
        require(value == default, f"data.{name}", value, f"left at {default!r} {reason}")
    require(not config.log.sample, "log.sample", config.log.sample, f"left at '' {reason}")
    classes = open_data_set(data.corpus[0], config.sequence_length).vocab_size
    allowed = f"0 or at least {classes}, the classes of data.corpus={data.corpus[0]!r}"
    require(not 0 < model.vocab_size < classes, "model.vocab_size", model.vocab_size, allowed)
    return replace(config, model=replace(model, vocab_size=model.vocab_size or classes))


def _check_training(config: Config) -> None:
    optimizer = config.optimizer
    training = config.training
    by_tensor = optimizer.clip_by == "tensor"
    allowed = "'global' unless optimizer.kind='adagrad'"
    require(not by_tensor or optimizer.kind == "adagrad", "optimizer.clip_by", optimizer.clip_by, allowed)
    require(not by_tensor or optimizer.clip > 0, "optimizer.clip", optimizer.clip, "above 0 with clip_by='tensor'")
    require(
        config.batch_size % training.accumulate == 0,
        "training.accumulate",
        training.accumulate,
        f"a divisor of batch_size={config.batch_size}",
    )
