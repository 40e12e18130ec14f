"""Which parts of a model make the next token's logit: sublayers, heads, and single keys and values (Elhage et al. 2021).

A part's attribution is its product with the next token's vector in the output head minus the mean vector, so it is relative
to the mean logit of the vocabulary. The parts are those of contributions.py.
"""

from collections import Counter
from functools import partial

import jax
import numpy as np

from xfresearch.analysis import coefficients
from xfresearch.analysis.contributions import Pass, directions, parts, recorded
from xfresearch.analysis.sequences import Sequences, mean_of_tokens
from xfresearch.kernels.dtypes import wide_dtype
from xfresearch.models.memories import memory_of
from xfresearch.models.model_config import ModelConfig
from xfresearch.models.taps import of_encoder


@partial(jax.jit, static_argnums=0)
def attributed(model: ModelConfig, params: dict, rows: Sequences) -> tuple[dict, dict]:
    """{part: [B]}: the attribution of each part, as the mean over tokens that are no padding; and the same {memory: [B, K]}
    of each key."""
    wanted = [name for memory in read_memories(model) for name in coefficients.sites(model, memory)]
    forward_pass = recorded(model, params, rows.without_last(), tuple(wanted))
    next_BL, real_BL = rows.tokens_NL[:, 1:], rows.real_NL[:, 1:]
    head = forward_pass.lm.logit_head()
    wide = wide_dtype(head.table_VD)
    table_VD = head.scale * head.table_VD.astype(wide)
    towards_BLD = table_VD[next_BL] - table_VD.mean(0)

    def mean(x_BL):
        return mean_of_tokens(x_BL, real_BL)

    of_parts = {name: mean((value.astype(wide) * towards_BLD).sum(-1)) for name, value in parts(forward_pass, True).items()}
    if head.bias_V is not None:
        of_parts["head_bias"] = mean(head.bias_V[next_BL] - head.bias_V.mean())
    return of_parts, {name: mean(value) for name, value in _of_keys(forward_pass, params, towards_BLD).items()}


def read_memories(model: ModelConfig) -> list[str]:
    """The memories that write to the stream which the head reads."""
    return [memory for memory in coefficients.memory_names(model) if not of_encoder(memory)]


def _of_keys(forward_pass: Pass, params: dict, towards_BLD) -> dict[str, jax.Array]:
    """{memory: [B, L, K]}: m_i v_i . d of each key, with the direction d in which its sublayer adds to `towards`."""
    model, of_keys = forward_pass.config, {}
    towards = directions(forward_pass, towards_BLD)
    for memory in read_memories(model):
        by_head = forward_pass.values[f"{memory}.coefficients"].ndim == 4 and f"{memory}.chosen" not in forward_pass.values
        if coefficients.written_by(memory) not in towards or by_head and f"{memory}.gate" in forward_pass.values:
            continue  # another sublayer reads it, or a gate changes the values of the slots
        writes_KD = memory_of(model, params, memory).writes.reshape(-1, model.width)
        m_BLK = coefficients.of_keys(model, memory, forward_pass.values, gated=True).astype(towards_BLD.dtype)
        direction_BLD = towards[coefficients.written_by(memory)].astype(towards_BLD.dtype)
        of_keys[memory] = m_BLK * (direction_BLD @ writes_KD.astype(towards_BLD.dtype).T)
    return of_keys


def grids(model: ModelConfig, attribution: dict[str, float]) -> dict[str, np.ndarray]:
    """by_sublayer [N, sublayers], their names in `sublayers`, and by_head [N, H] of {part: attribution}; where a layer has
    several mixers, by_head/<sublayer> [N, H] of each."""
    names = list(dict.fromkeys(name for block in model.blocks.values() for name in block.sublayers))
    of_sublayer = np.full((model.depth, len(names)), np.nan)
    of_heads: dict[str, dict[tuple[int, int], float]] = {}
    for part, value in attribution.items():
        if part.startswith("blocks."):
            _, number, sublayer, *rest = part.split(".")
            at = int(number), names.index(sublayer)
            of_sublayer[at] = np.nan_to_num(of_sublayer[at]) + value
            if rest and rest[0].isdigit():
                of_heads.setdefault(sublayer, {})[int(number), int(rest[0])] = value
    arrays = {"by_sublayer": of_sublayer, "sublayers": np.array(names)}
    mixers = Counter(layer for heads in of_heads.values() for layer in {layer for layer, _ in heads})
    several = max(mixers.values(), default=0) > 1  # in a layer
    most = 1 + max((head for heads in of_heads.values() for _, head in heads), default=0)
    for sublayer, heads in of_heads.items():
        name = f"by_head/{sublayer}" if several else "by_head"
        grid = arrays.setdefault(name, np.full((model.depth, most), np.nan))
        grid[tuple(np.array(list(heads)).T)] = list(heads.values())
    return arrays
