"""The cheap figures of the analyses, of every layer while a model trains: config.log.panel.

On a few held-out rows, of at most LENGTH tokens, and on as many rows of random tokens that are repeated once. Names and
meanings: pages/panel.py. Definitions: attention.py, norms.py, routing.py and lens.py.
"""

from collections.abc import Iterable
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from xfresearch.analysis.attention import SITES as OF_ATTENTION
from xfresearch.analysis.attention import repetition, statistics
from xfresearch.analysis.lens import applies as has_lens
from xfresearch.analysis.lens import by_depth
from xfresearch.analysis.passes import of_sublayers, wide
from xfresearch.analysis.routing import SITES as OF_ROUTING
from xfresearch.analysis.routing import choices
from xfresearch.models import layers
from xfresearch.models.inputs import forward, tap_shapes
from xfresearch.models.model_config import ModelConfig
from xfresearch.models.taps import Request, request
from xfresearch.pages.panel import CAPTIONS
from xfresearch.sharding.first_execution import alone_at_first
from xfresearch.sharding.placing import replicated

LENGTH = 256
REPEATED = 32  # random tokens before the repetition
VALUES = {"mixer": (*OF_ATTENTION, "before"), "feed_forward": ("coefficients", *OF_ROUTING)}


class Panel:
    """The figures of one run. Make it once: every one compiles its program."""

    def __init__(self, model: ModelConfig, tokens_BL: np.ndarray, mesh=None):
        """tokens_BL: held-out rows, the same in every process; the first LENGTH tokens are used. mesh: that of the
        parameters."""
        tokens_BL = np.asarray(tokens_BL)[:, :LENGTH]
        half = min(REPEATED, tokens_BL.shape[1] // 2) if model.causal else 0
        random_BL = np.random.default_rng(0).integers(model.vocab_size, size=(len(tokens_BL), half))
        repeated_BL = np.concatenate([random_BL, random_BL], 1).astype(tokens_BL.dtype)
        everywhere = None if mesh is None else jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
        self._model = model
        self._rows = tuple(replicated(mesh, rows_BL) for rows_BL in (tokens_BL, repeated_BL))
        self._measure = alone_at_first(jax.jit(partial(_measure, model), out_shardings=everywhere))

    def __call__(self, params: dict) -> dict[str, list[float]]:
        """{figure: a number for each layer}, NaN for a layer without it. Every process must call this."""
        figures = jax.device_get(self._measure(params, *self._rows))
        of_all = {name: value_N.tolist() for name, value_N in figures.pop("depth").items()}
        for layer in layers.layers(self._model):
            for name, value_R in figures.get(layer.stack, {}).items():
                of_all.setdefault(name, [np.nan] * self._model.depth)[layer.number] = float(value_R[layer.index])
        return {name: of_all[name] for name in CAPTIONS if name in of_all}


def _measure(model: ModelConfig, params: dict, tokens_BL, repeated_BL) -> dict:
    """{stack: {figure: [R]}, "depth": {figure: [N]}}."""
    figures = _of_stacks(model, params, tokens_BL, VALUES, of_sublayer)
    if half := repeated_BL.shape[1] // 2:
        repeated = _of_stacks(model, params, repeated_BL, {"mixer": ("weights",)}, partial(induction, half=half))
        figures = {stack: values | repeated.get(stack, {}) for stack, values in figures.items()}
    figures["depth"] = {}
    if not has_lens(model):
        figures["depth"]["lens_agreement"] = by_depth(model, params, None, tokens_BL)["agreement"].mean(0)
    return figures


def _of_stacks(model: ModelConfig, params: dict, tokens_BL, of_role: dict[str, tuple[str, ...]], summary) -> dict:
    """{stack: {figure: [R]}}: the mean over the sublayers of a layer that have the figure."""
    wanted = {f"{each.path}.{value}" for each in model.sublayers() for value in of_role.get(each.role, ())}
    record = request(model, wanted & tap_shapes(model).keys()).record
    of_stacks = forward(model, params, tokens_BL, Request(record, summary=of_sublayers(summary)))[1].captures
    return {stack: _means(values.values()) for stack, values in of_stacks.items() if stack}


def _means(of_sublayers: Iterable[dict]) -> dict:
    by_name: dict[str, list] = {}
    for figures in of_sublayers:
        for name, value_R in figures.items():
            by_name.setdefault(name, []).append(value_R)
    return {name: sum(values) / len(values) for name, values in by_name.items()}


def of_sublayer(values: dict) -> dict:
    """{figure: number} of the recorded values of one sublayer."""
    figures = {}
    if weights := statistics(values, sink=False):
        figures["attention_entropy"] = jnp.nanmean(weights["entropy"])
        figures["first_token"] = weights["first"].mean()
        figures["previous_token"] = weights["previous"].mean(0).max()
    if "before" in values:  # of a mixer
        x_BLD = wide(values["before"])
        share_BL = x_BLD.sum(-1) ** 2 / jnp.maximum(x_BLD.shape[-1] * (x_BLD**2).sum(-1), jnp.finfo(x_BLD.dtype).tiny)
        figures["along_ones"] = share_BL.mean()
    elif "coefficients" in values:
        m = wide(values["coefficients"])
        figures["positive_coefficients"] = (m > 0).mean(dtype=m.dtype)
    if routed := choices(values):
        figures["router_entropy"] = routed["entropy"].mean()
    return figures


def induction(values: dict, half: int) -> dict:
    """{"induction": number} of one layer, on rows whose second half repeats the first."""
    figures = repetition(values, half)
    return {"induction": figures["induction"].mean(0).max()} if figures else {}
