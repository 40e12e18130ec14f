"""Compares two model configs: do they compute the same function of their parameters, and if not, where do they differ?

Options of initialization, training and execution are ignored, and so are options that nothing in the model reads.
"""

import math
import re
from typing import NamedTuple

from xfresearch.interop.family import OF_ENCODER
from xfresearch.models.block_config import BlockConfig
from xfresearch.models.layers import layers
from xfresearch.models.layouts import LAYOUTS
from xfresearch.models.mixers.softmax.config import SoftmaxConfig, rotary_size
from xfresearch.models.mixers.softmax.projections import logit_scale
from xfresearch.models.model_config import ModelConfig
from xfresearch.models.token_stack import TokenStackConfig
from xfresearch.options.fields import leaves

ABSENT = "absent"
# Options that are compared by their effect: per layer, or by the values that `_computed` derives.
COMPARED_BY_EFFECT = {"pattern", "segments", "norm", "hidden_factor", "gated_hidden", "rope.fraction", "moe.balance"}
POSITIONS = {"max_length", "position_offset"}  # compared only if the model has a position table


class Difference(NamedTuple):
    field: str  # 'attention.memory_slots'
    path: str  # 'layers.0.attention.memory_slots', the first layer where it differs
    ours: object
    theirs: object

    @property
    def follows(self) -> bool:
        """Whether one of the models lacks the field, which follows from a difference in another field."""
        return ABSENT in (self.ours, self.theirs)

    def __str__(self) -> str:
        return f"{self.path}={self.ours!r} (the family has {self.theirs!r})"


def differences(model: ModelConfig, other: ModelConfig) -> list[Difference]:
    """The fields in which `model` differs from `other`, each once."""
    ours = function_options(model)
    theirs = function_options(other)
    different: dict = {}
    for path in ours | theirs:
        a, b = ours.get(path, ABSENT), theirs.get(path, ABSENT)
        if not _equal(a, b):
            field = re.sub(r"layers\.\d+\.", "", path)
            different.setdefault(field, Difference(field, path, a, b))
    return list(different.values())


def _equal(a, b) -> bool:
    if isinstance(a, str) and isinstance(b, str) and {a, b} <= {*LAYOUTS}:  # two of them have two names
        return LAYOUTS[a] == LAYOUTS[b]
    both = isinstance(a, float) and isinstance(b, float)
    return math.isclose(a, b, rel_tol=1e-9) if both else a == b


def function_options(model: ModelConfig) -> dict:
    """{path: value} of every option that the model's function depends on, for each layer."""
    options_of = {"stacks": tuple(model.stacks)} | _stack(model)
    if model.encoder:
        options_of |= {OF_ENCODER + path: value for path, value in _stack(model.encoder).items()}
    return options_of


def _stack(model: TokenStackConfig) -> dict:
    """The options of the model without its encoder, or of the encoder."""
    plain = {path: value for path, value in _function(model).items() if not path.startswith(("blocks.", "stacks."))}
    if not model.longest:
        plain = {path: value for path, value in plain.items() if path not in POSITIONS}
    for layer in layers(model):
        own = _block(model.blocks[layer.block], model)
        plain |= {f"layers.{layer.number}.{path}": value for path, value in own.items()}
    return plain


def _function(config, prefix: str = "") -> dict:
    """The options of a group that decide the model's function and are read."""
    read = (leaf for leaf in leaves(config) if leaf.decides == "function" and not leaf.unread)
    return {prefix + leaf.path: leaf.value for leaf in read if leaf.path not in COMPARED_BY_EFFECT}


def _block(block: BlockConfig, model: TokenStackConfig) -> dict:
    layout = LAYOUTS[block.layout]
    options_of = {path: value for path, value in _function(block).items() if "." not in path}
    if not block.norm_gain:
        del options_of["norm_offset"]  # of a gain
    for site in layout.sites:
        spec = block.norm_at(site)
        usual = block.norm_spec()
        options_of[f"norms.{site}"] = spec.kind
        for name in ("gain", "bias", "epsilon"):
            if getattr(spec, name) != getattr(usual, name):
                options_of[f"norms.{site}.{name}"] = getattr(spec, name)
    for name, options in block.sublayers.items():
        options_of |= _function(options, f"{name}.") | _computed(options, model.width, f"{name}.")
    return options_of


def _computed(options, width: int, prefix: str) -> dict:
    """Values derived from options: different options with the same values compute the same function."""
    computed = {}
    if isinstance(options, SoftmaxConfig):
        computed["scale"] = logit_scale(options, width)
        if options.position == "rope":
            computed["rope.size"] = rotary_size(options.head_size, options.rope.fraction)
    if hasattr(options, "moe"):
        computed["moe.router_bias"] = options.moe.balance == "bias"
    return {prefix + name: value for name, value in computed.items()}
