"""Which parts of a model make the next token's logit: sublayers, heads, and single keys and values (Elhage et al. 2021).

A part's attribution is its product with the next token's vector in the output head minus the mean vector, so it is relative
to the mean logit of the vocabulary. The parts are those of contributions.py.
"""

from functools import partial

import jax
import numpy as np

from xfresearch.analysis import coefficients
from xfresearch.analysis.contributions import Pass, directions, parts, passed
from xfresearch.kernels.dtypes import wide_dtype
from xfresearch.models.memories import memory as memory_of
from xfresearch.models.model_config import ModelConfig


@partial(jax.jit, static_argnums=0)
def attributed(model: ModelConfig, params: dict, tokens_BL) -> tuple[dict, dict]:
    """{part: [B]}: the attribution of each part, as the mean over tokens; and the same {memory: [B, K]} of each key."""
    wanted = [name for memory in coefficients.memory_names(model) for name in coefficients.sites(model, memory)]
    forward_pass = passed(model, params, tokens_BL[:, :-1], tuple(wanted))
    head = forward_pass.lm.logit_head()
    wide = wide_dtype(head.table_VD)
    table_VD = head.scale * head.table_VD.astype(wide)
    towards_BLD = table_VD[tokens_BL[:, 1:]] - table_VD.mean(0)
    written = parts(forward_pass, True)
    of_parts = {name: (value.astype(wide) * towards_BLD).sum(-1).mean(1) for name, value in written.items()}
    if head.bias_V is not None:
        of_parts["head_bias"] = (head.bias_V[tokens_BL[:, 1:]] - head.bias_V.mean()).mean(1)
    return of_parts, _of_keys(forward_pass, params, towards_BLD)


def _of_keys(forward_pass: Pass, params: dict, towards_BLD) -> dict[str, jax.Array]:
    """{memory: [B, K]}: m_i v_i . d of each key, with the direction d in which its sublayer adds to `towards`."""
    model, of_keys = forward_pass.config, {}
    towards = directions(forward_pass, towards_BLD)
    for memory in coefficients.memory_names(model):
        by_head = forward_pass.values[f"{memory}.coefficients"].ndim == 4 and f"{memory}.chosen" not in forward_pass.values
        if coefficients.written_by(memory) not in towards or by_head and f"{memory}.gate" in forward_pass.values:
            continue  # another sublayer reads it, or a gate changes the values of the slots
        writes_KD = memory_of(model, params, *coefficients.where(memory)).writes.reshape(-1, model.width)
        m_BLK = coefficients.of_keys(model, memory, forward_pass.values, gated=True).astype(towards_BLD.dtype)
        direction_BLD = towards[coefficients.written_by(memory)].astype(towards_BLD.dtype)
        of_keys[memory] = (m_BLK * (direction_BLD @ writes_KD.astype(towards_BLD.dtype).T)).mean(1)
    return of_keys


def grids(model: ModelConfig, attribution: dict[str, float]) -> dict[str, np.ndarray]:
    """by_sublayer [N, sublayers], their names in `sublayers`, and by_head [N, H] of {part: attribution}."""
    names = list(dict.fromkeys(name for block in model.blocks.values() for name in block.sublayers))
    of_sublayer = np.full((model.depth, len(names)), np.nan)
    of_heads: dict[int, dict[int, float]] = {}
    for part, value in attribution.items():
        if part.startswith("blocks."):
            _, number, sublayer, *rest = part.split(".")
            at = int(number), names.index(sublayer)
            of_sublayer[at] = np.nan_to_num(of_sublayer[at]) + value
            if rest and rest[0].isdigit():
                of_heads.setdefault(int(number), {})[int(rest[0])] = value
    arrays = {"by_sublayer": of_sublayer, "sublayers": np.array(names)}
    if of_heads:
        by_head = np.full((model.depth, 1 + max(max(heads) for heads in of_heads.values())), np.nan)
        for layer, heads in of_heads.items():
            by_head[layer, list(heads)] = list(heads.values())
        arrays["by_head"] = by_head
    return arrays
