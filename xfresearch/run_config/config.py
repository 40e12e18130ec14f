"""The options of a run with those of its model."""

from dataclasses import dataclass

from xfresearch.models.model_config import ModelConfig
from xfresearch.options.fields import group
from xfresearch.options.run_options import RunConfig


@dataclass(frozen=True)
class Config(RunConfig):
    """The options of a run."""

    model: ModelConfig = group(ModelConfig(), "the transformer")
