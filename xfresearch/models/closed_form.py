"""Parameters, FLOPs and cache of any config, in closed form."""

from xfresearch.config.resolving import model_from
from xfresearch.errors import require
from xfresearch.models.costs import Costs
from xfresearch.models.transformer import Transformer


def costs(config, sequence_length: int | None = None) -> Costs:
    """Costs of a model: a ModelConfig, `config.model` of ml-collections, or a whole run's config.

    `sequence_length` (tokens) is what attention is counted for; by default the model's max_length.
    UserError where the config is not valid or its vocabulary is not known yet (model.vocab_size = 0).
    """
    model = model_from(config)
    length = sequence_length or model.max_length
    require(model.vocab_size > 0, "model.vocab_size", model.vocab_size, "known, at least 1, to count a model")
    require(length > 0, "model.max_length", length, "known, at least 1, to count a model (or give sequence_length)")
    return Transformer.costs(model, length)
