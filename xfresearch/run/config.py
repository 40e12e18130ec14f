"""The options of a run with those of its model."""

from dataclasses import dataclass

from xfresearch.config.fields import group
from xfresearch.config.options import RunConfig
from xfresearch.models.model_config import ModelConfig


@dataclass(frozen=True)
class Config(RunConfig):
    """The options of a run."""

    model: ModelConfig = group(ModelConfig(), "the transformer")
