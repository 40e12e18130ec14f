"""Block influence: how far each block turns the residual stream (Men et al. 2024, arXiv 2403.03853, eq. 1).

    influence_l = 1 - mean of x . y / (|x| |y|) over tokens        x: the stream before block l, y: after it

It is 0 for a block that leaves the direction of the stream as it is, 1 where it makes it orthogonal, and 2 where it reverses
it; the paper removes the blocks with the least. In every layout the stream is the vector that the taps `before` and
`residual` have: of several streams, and of a list of outputs, their sum; of ResiDual's two streams the one that blocks read.
Padding does not count.
"""

from functools import partial
from itertools import groupby

import jax
import jax.numpy as jnp
import numpy as np

from xfresearch.analysis.passes import BATCH, about, inside_blocks, wide
from xfresearch.analysis.registry import analysis
from xfresearch.analysis.result import Part, Result, joined, over_rows
from xfresearch.analysis.sequences import ROWS, Sequences, batches, mean_of_tokens, passed, sequences
from xfresearch.models.model_config import ModelConfig
from xfresearch.models.sublayers import Sublayer
from xfresearch.models.taps import Request, request
from xfresearch.pages.charts import with_interval
from xfresearch.pages.figures import LineChart, table_of
from xfresearch.runtime.progress import stage
from xfresearch.runtime.summaries import mean_interval
from xfresearch.runtime.tables import PLUS_MINUS


@analysis(lambda model: "", "how far each block turns the residual stream")
def block_influence(lm, data=None, count: int = ROWS, sequence_length: int = 0, source=None) -> Result:
    """The influence of every block, on `count` rows of `sequence_length` tokens of `data` (sequences.py).

    .data: influence [N], and influence_rows [rows, N]; those of an encoder are encoder/name. .summary: its mean over the
    layers, and the least of a layer. The intervals are over rows. Raises UserError for data that cannot be read."""
    rows = sequences(lm, data, count, sequence_length, source=source)
    parts = {each.prefix.rstrip("."): _of_stack(lm, rows, each.prefix) for each in lm.config.all_stacks}
    return Result("block_influence", about(lm, rows, data), lm.step, *joined(parts))


def _of_stack(lm, rows: Sequences, prefix: str) -> Part:
    """The figures of the stack with this prefix of its taps."""
    measured = []
    with stage("block influence", len(rows), "rows") as progress:
        for some, real in batches(rows, BATCH):
            influence_BN = _influence(lm.config, prefix, lm.params, some)
            measured.append(np.asarray(influence_BN[:real], np.float64))
            progress.update(real)
    per_row = np.concatenate(measured)
    data, summary, *_ = over_rows({"influence": per_row})
    means, halves = np.array([mean_interval(of_layer) for of_layer in per_row.T]).T
    summary["least influence"] = float(means.min()), float(halves[means.argmin()])
    curves = with_interval(np.stack([np.arange(len(means)), means, halves], 1))
    caption = f"1 - mean cosine of the stream before and after a block; {PLUS_MINUS}"
    chart = LineChart("Influence", caption, "layer", tuple(curves))
    columns = {"influence": means, "+-": halves}
    return Part(data, summary, (chart,), (table_of("Layers", chart.caption, "layer", range(len(means)), columns),))


@partial(jax.jit, static_argnums=(0, 1))
def _influence(model: ModelConfig, prefix: str, params: dict, rows: Sequences):
    """[B, N] of one batch. Only the streams of one layer are in memory at a time."""
    ends = [(each[0], each[-1]) for each in _layers(model, prefix)]
    names = [name for first, last in ends for name in (f"{first.path}.before", f"{last.path}.residual")]
    real_BL = rows.inputs.of(prefix).real_NL

    def turned(values: dict) -> dict:
        """{"influence": [B]} of the two values of a layer, {} of a layer of the other stack."""
        both = sorted(values, key=lambda site: site.endswith(".residual"))
        return {"influence": mean_of_tokens(angle(*(wide(values[site]) for site in both)), real_BL)} if both else {}

    captures = passed(model, params, rows.inputs, Request(request(model, names).record, summary=turned))[1].captures
    found = inside_blocks(captures)
    return jnp.stack([found[last.stack]["influence"][last.layer.index] for _, last in ends], 1)


def _layers(model: ModelConfig, prefix: str) -> list[list[Sublayer]]:
    """The sublayers of each layer of a stack, in the order of computation."""
    own = (each for each in model.sublayers() if each.prefix == prefix)
    return [list(of_layer) for _, of_layer in groupby(own, lambda each: each.layer)]


def angle(x_BLD, y_BLD):
    """[B, L]: 1 - the cosine of two vectors of each token; 1 if one of them is 0."""
    lengths = jnp.linalg.norm(x_BLD, axis=-1) * jnp.linalg.norm(y_BLD, axis=-1)
    return 1 - (x_BLD * y_BLD).sum(-1) / jnp.maximum(lengths, jnp.finfo(x_BLD.dtype).tiny)
