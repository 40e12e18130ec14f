"""The cheap figures of the analyses, of every layer while a model trains: config.log.panel.

On a few held-out rows, of at most LENGTH tokens, and on as many rows of random tokens that are repeated once. With an
encoder there are figures of both stacks, and of cross-attention. Names and meanings: pages/panel.py. Definitions:
attention.py, alignment.py, norms.py, routing.py and lens.py.
"""

from collections.abc import Iterable, Mapping
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from xfresearch.analysis import alignment
from xfresearch.analysis.attention import SITES as OF_ATTENTION
from xfresearch.analysis.attention import repetition, statistics
from xfresearch.analysis.lens import applies as has_lens
from xfresearch.analysis.lens import by_depth
from xfresearch.analysis.passes import half_of, inside_blocks, of_sublayers, rows_of, wide
from xfresearch.analysis.routing import SITES as OF_ROUTING
from xfresearch.analysis.routing import choices
from xfresearch.analysis.sequences import Sequences, first_of_rows, mean_of_tokens, passed
from xfresearch.models import layers
from xfresearch.models.context import Source
from xfresearch.models.inputs import tap_shapes
from xfresearch.models.model_config import ModelConfig
from xfresearch.models.taps import ENCODER, Request, request
from xfresearch.pages.panel import CROSS, NAMES
from xfresearch.sharding.first_execution import alone_at_first
from xfresearch.sharding.placing import replicated

LENGTH = 256
REPEATED = 32  # random tokens before the repetition
VALUES = {"mixer": (*OF_ATTENTION, "before"), "cross": (*alignment.SITES, "before")}
VALUES |= {"feed_forward": ("coefficients", *OF_ROUTING)}
PARTS = ("", CROSS)  # of a stack: cross-attention is apart


class Panel:
    """The figures of one run. Make it once: every one compiles its program."""

    def __init__(self, model: ModelConfig, batch: Mapping[str, np.ndarray], mesh=None):
        """batch: held-out rows, the same in every process; their first LENGTH tokens are used, and of packed pairs the first
        one of each row. mesh: that of the parameters."""
        rows = first_of_rows(batch).shortened(LENGTH)
        half = half_of(model, rows.inputs.tokens_NL.shape[1], REPEATED) if model.causal else 0
        tokens_BL, source_BS = (self._repeated(model, rows, half, seed) for seed in (0, 1))
        repeated = Sequences(tokens_BL, source=Source(source_BS) if model.encoder else None)
        everywhere = None if mesh is None else jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
        self._model = model
        self._rows = jax.tree.map(partial(replicated, mesh), (rows, repeated))
        self._measure = alone_at_first(jax.jit(partial(_measure, model), out_shardings=everywhere))

    @staticmethod
    def _repeated(model: ModelConfig, rows: Sequences, half: int, seed: int) -> np.ndarray:
        random_BL = np.random.default_rng(seed).integers(model.vocab_size, size=(len(rows), half))
        return np.concatenate([random_BL, random_BL], 1).astype(rows.tokens_NL.dtype)

    def __call__(self, params: dict) -> dict[str, list[float]]:
        """{figure: a number for each layer}, NaN for a layer without it. Every process must call this."""
        figures = jax.device_get(jax.block_until_ready(self._measure(params, *self._rows)))
        of_all = {name: value_N.tolist() for name, value_N in figures.pop("depth").items()}
        for part, of_stacks in figures.items():
            stack = self._model.encoder if part == ENCODER else self._model
            assert stack is not None
            for layer in layers.layers(stack):
                for name, value_R in of_stacks.get(layer.stack, {}).items():
                    of_all.setdefault(f"{part}/{name}".lstrip("/"), [np.nan] * stack.depth)[layer.number] = float(
                        value_R[layer.index]
                    )
        return {name: of_all[name] for name in NAMES if name in of_all}


def _measure(model: ModelConfig, params: dict, rows: Sequences, repeated: Sequences) -> dict:
    """{part: {stack: {figure: [R]}}, "depth": {figure: [N]}}. Parts are '' for the decoder or the only stack, 'encoder', and
    'cross' for cross-attention."""
    figures: dict = {}
    for prefix in ("", "encoder.") if model.encoder else ("",):
        figures |= _of_stack(model, params, rows, prefix, VALUES, of_sublayer)
        if half := repeated.tokens_NL.shape[1] // 2:
            again = _of_stack(model, params, repeated, prefix, {"mixer": ("weights",)}, partial(induction, half=half))
            for part, of_stacks in again.items():
                for stack, values in of_stacks.items():
                    figures[part].setdefault(stack, {}).update(values)
    figures["depth"] = {}
    if not has_lens(model):
        figures["depth"]["lens_agreement"] = by_depth(model, params, None, rows)["agreement"].mean(0)
    return figures


def _of_stack(model, params: dict, rows: Sequences, prefix: str, of_role: dict[str, tuple[str, ...]], summary) -> dict:
    """{part: {stack: {figure: [R]}}}: the mean over the sublayers of a layer that have the figure."""
    own = [each for each in model.sublayers() if each.prefix == prefix]
    wanted = {f"{each.path}.{value}" for each in own for value in of_role.get(each.role, ())}
    across = {each.name for each in own if each.role == "cross"}
    record = request(model, wanted & tap_shapes(model).keys()).record

    def of_layer(values: dict) -> dict:
        beside = rows_of(rows, prefix)
        summaries = [
            of_sublayers(partial(summary, across=is_across), beside)(
                {site: value for site, value in values.items() if (site.partition(".")[0] in across) == is_across}
            )
            for is_across in (False, True)
        ]
        return {PARTS[is_across]: _means(each.values()) for is_across, each in enumerate(summaries)}

    captures = inside_blocks(passed(model, params, rows.inputs, Request(record, summary=of_layer))[1].captures)
    of_parts: dict = {}
    for stack in {each.stack for each in own}:
        for part, figures in captures[stack].items():
            if figures:
                of_parts.setdefault(part or prefix.rstrip("."), {})[stack.rpartition("/")[2]] = figures
    return of_parts


def _means(of_sublayers: Iterable[dict]) -> dict:
    by_name: dict[str, list] = {}
    for figures in of_sublayers:
        for name, value_R in figures.items():
            by_name.setdefault(name, []).append(value_R)
    return {name: sum(values) / len(values) for name, values in by_name.items()}


def of_sublayer(values: dict, across: bool) -> dict:
    """{figure: number} of the recorded values of one sublayer. across: whether it is cross-attention."""
    figures = {}
    if across and "weights" in values:
        weights = alignment.statistics(values, sink=False)
        figures["next_token"] = weights["next"].mean(0).max()
    else:
        weights = statistics(values, sink=False)
    if weights:
        figures["attention_entropy"] = jnp.nanmean(weights["entropy"])
        figures["first_token"] = weights["first"].mean()
    if "previous" in weights:
        figures["previous_token"] = weights["previous"].mean(0).max()
    if "before" in values:  # of a mixer
        x_BLD = wide(values["before"])
        share_BL = x_BLD.sum(-1) ** 2 / jnp.maximum(x_BLD.shape[-1] * (x_BLD**2).sum(-1), jnp.finfo(x_BLD.dtype).tiny)
        figures["along_ones"] = mean_of_tokens(share_BL, values["real"]).mean()
    elif "coefficients" in values:
        m = wide(values["coefficients"])
        positive_BL = (m > 0).mean(tuple(range(2, m.ndim)), dtype=m.dtype)
        figures["positive_coefficients"] = mean_of_tokens(positive_BL, _tokens_of(values, positive_BL)).mean()
    if routed := choices(values):
        figures["router_entropy"] = mean_of_tokens(routed["entropy"], values["real"]).mean()
    return figures


def _tokens_of(values: dict, x_BL):
    """Which rows of coefficients are of tokens that are no padding: all of experts that choose tokens."""
    real_BL = values["real"]
    return real_BL if real_BL.shape == x_BL.shape else jnp.ones(x_BL.shape, bool)


def induction(values: dict, half: int, across: bool) -> dict:
    """{"induction": number} of one layer, on rows whose second half repeats the first."""
    figures = {} if across else repetition(values, half)
    return {"induction": figures["induction"].mean(0).max()} if figures else {}
