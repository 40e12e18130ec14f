"""Parameters, FLOPs and cache size of any config, in closed form."""

from typing import Any

from xfresearch.models.costs import Costs
from xfresearch.models.transformer import Transformer
from xfresearch.run_config.resolving import model_from
from xfresearch.runtime.errors import require


def costs(config: Any, sequence_length: int | None = None) -> Costs:
    """Costs of a model, given a ModelConfig, `config.model` of ml-collections, or the config of a run.

    `sequence_length` is the number of tokens that attention reads, by default the model's max_length. If
    model.vocab_size is 0, the tokenizer of the run's config decides. Raises UserError if the config is invalid or the
    vocabulary is not known.
    """
    model = model_from(config)
    length = sequence_length or model.max_length
    allowed = "at least 1 to compute costs, unless the config of the run is given, whose tokenizer decides"
    require(model.vocab_size > 0, "model.vocab_size", model.vocab_size, allowed)
    require(length > 0, "model.max_length", length, "at least 1 to compute costs, unless sequence_length is given")
    return Transformer.costs(model, length)
