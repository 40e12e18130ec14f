"""Whether two models compute the same function of their parameters, and in what they differ if not.

Fields that say how a model is drawn, trained or computed do not matter, nor those of what it does not have.
"""

import math
from typing import NamedTuple

from xfresearch.config.fields import leaves
from xfresearch.models.block_config import BlockConfig
from xfresearch.models.layers import layers
from xfresearch.models.layouts import LAYOUTS
from xfresearch.models.mixers.softmax.config import SoftmaxConfig, rotary_size
from xfresearch.models.mixers.softmax.projections import logit_scale
from xfresearch.models.model_config import ModelConfig, longest_sequence

ABSENT = "absent"
# Options that are compared by what they come to: layer by layer, or as `_computed` has them.
ELSEWHERE = {"pattern", "segments", "norm", "hidden_factor", "gated_hidden", "rope.fraction", "moe.balance"}
POSITIONS = {"max_length", "position_offset"}  # these matter where there is a table of positions


class Difference(NamedTuple):
    field: str  # 'attention.memory_slots'
    path: str  # 'layers.0.attention.memory_slots', the first layer where it differs
    ours: object
    theirs: object

    @property
    def follows(self) -> bool:
        """One of the two models has no such field, since they differ in another."""
        return ABSENT in (self.ours, self.theirs)

    def __str__(self) -> str:
        return f"{self.path}={self.ours!r} (there {self.theirs!r})"


def differences(model: ModelConfig, other: ModelConfig) -> list[Difference]:
    """What `model` has otherwise than `other`, each field once."""
    ours, theirs = meaning(model), meaning(other)
    found = {}
    for path in ours | theirs:
        a, b = ours.get(path, ABSENT), theirs.get(path, ABSENT)
        if not _equal(a, b):
            field = path.split(".", 2)[-1] if path.startswith("layers.") else path
            found.setdefault(field, Difference(field, path, a, b))
    return list(found.values())


def _equal(a, b) -> bool:
    both = isinstance(a, float) and isinstance(b, float)
    return math.isclose(a, b, rel_tol=1e-9) if both else a == b


def meaning(model: ModelConfig) -> dict:
    """{path: value} of every option that the model's function depends on, layer by layer."""
    plain = {path: value for path, value in _function(model).items() if not path.startswith("blocks.")}
    if not longest_sequence(model):
        plain = {path: value for path, value in plain.items() if path not in POSITIONS}
    for layer in layers(model):
        own = _block(model.blocks[layer.block], model)
        plain |= {f"layers.{layer.number}.{path}": value for path, value in own.items()}
    return plain


def _function(config, prefix: str = "") -> dict:
    """The options of a group that decide the function and that something reads."""
    read = (leaf for leaf in leaves(config) if leaf.decides == "function" and not leaf.unread)
    return {prefix + leaf.path: leaf.value for leaf in read if leaf.path not in ELSEWHERE}


def _block(block: BlockConfig, model: ModelConfig) -> dict:
    layout = LAYOUTS[block.layout]
    found = {path: value for path, value in _function(block).items() if "." not in path}
    found["layout"] = next(name for name, each in LAYOUTS.items() if each == layout)
    for site in layout.sites:
        spec, usual = block.norm_at(site), block.norm_spec()
        found[f"norms.{site}"] = spec.kind
        for name in ("gain", "bias", "epsilon"):
            if getattr(spec, name) != getattr(usual, name):
                found[f"norms.{site}.{name}"] = getattr(spec, name)
    for name, options in block.sublayers.items():
        found |= _function(options, f"{name}.") | _computed(options, model.width, f"{name}.")
    return found


def _computed(options, width: int, prefix: str) -> dict:
    """Options by the numbers that they come to."""
    found = {}
    if isinstance(options, SoftmaxConfig):
        found["scale"] = logit_scale(options, width)
        if options.position == "rope":
            found["rope.size"] = rotary_size(options.head_size, options.rope.fraction)
    if hasattr(options, "moe"):
        found["moe.bias"] = options.moe.balance == "bias"
    return {prefix + name: value for name, value in found.items()}
