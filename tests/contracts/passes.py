"""Passes of a model over tokens: logits, and the values of taps."""

import numpy as np

from xfresearch.models import transformer
from xfresearch.models.context import Context, Execution, Source
from xfresearch.models.model_config import ModelConfig
from xfresearch.models.taps import Patch, captured, request

PLAIN = Execution("plain", "ragged")


def run(
    config: ModelConfig, params, tokens_BL, layers="unroll", remat="none", record=(), replace=None, taps=None, **context
):
    """The bound model and its Output. By default, positions count from 0, kernels are the plain ones, and an encoder reads
    a source of its max_length.

    record: names of taps. replace: {name: function or Patch}. taps: a Request instead of these."""
    model = transformer.bind(config, params)
    if config.encoder and "source" not in context:
        shape = (len(tokens_BL), config.encoder.max_length)
        context["source"] = Source(np.random.default_rng(11).integers(0, config.vocab_size, shape).astype(np.int32))
    positions_BL = np.broadcast_to(np.arange(tokens_BL.shape[1]), tokens_BL.shape)
    ctx = Context(**{"positions_BL": positions_BL, "execution": PLAIN, **context})
    patches = {name: new if isinstance(new, Patch) else Patch(new) for name, new in (replace or {}).items()}
    return model, model(tokens_BL, ctx, layers=layers, remat=remat, taps=taps or request(config, record, patches))


def forward(config: ModelConfig, params, tokens_BL, *args, **options):
    """Logits and auxiliary losses of `run`."""
    model, out = run(config, params, tokens_BL, *args, **options)
    return model.logits(out.hidden_BLD), out.losses


def capture(config: ModelConfig, params, tokens_BL, names, **options) -> list:
    """The values of the taps `names` in `run`."""
    out = run(config, params, tokens_BL, record=names, **options)[1]
    return list(captured(config, out.captures, names).values())
