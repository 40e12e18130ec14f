"""Whether two models compute the same function of their parameters, and in what they differ if not.

Fields that say how a model is drawn, trained or computed do not matter, nor those of what it does not have.
"""

import math
from typing import NamedTuple

from xfresearch.config import BlockConfig, ModelConfig
from xfresearch.interop.config import paths_of
from xfresearch.models.layouts import LAYOUTS, norm_kind
from xfresearch.models.options import unread
from xfresearch.models.sizes import logit_scale, longest_sequence, rotary_size

ABSENT = "absent"
# Drawing, training and rounding.
MODEL = {"init", "init_std", "embedding_std", "dtype", "param_dtype", "dropout", "pattern", "blocks"}
MODEL |= {"max_length", "position_offset"}  # these two matter where there is a table of positions (`meaning`)
BLOCK = {"dropout", "branch_gain", "norm_alpha", "norm_alpha_attention", "norm", "norm_cast"}
ATTENTION = {"kernel", "dropout", "trimmed", "span_loss", "rope.fraction"}
FEED_FORWARD = {"hidden_factor", "gated_hidden"}
MOE = {"kernel", "jitter", "balance_loss", "z_loss", "bias_speed", "balance"}


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
    """{path: value} of every field that the model's function depends on, layer by layer."""
    plain = {name: value for name, value in vars(model).items() if name not in MODEL}
    if longest_sequence(model):
        plain |= {name: value for name, value in vars(model).items() if name in ("max_length", "position_offset")}
    for layer in range(model.depth):
        block = model.blocks[model.pattern[layer % len(model.pattern)]]
        plain |= {f"layers.{layer}.{path}": value for path, value in _block(block, model).items()}
    return plain


def _block(block: BlockConfig, model: ModelConfig) -> dict:
    idle = unread(block, model)
    own = {name: value for name, value in paths_of(block).items() if name not in idle}
    found = {name: value for name, value in own.items() if "." not in name and name not in BLOCK}
    found["layout"] = next(name for name, layout in LAYOUTS.items() if layout == LAYOUTS[block.layout])
    for sublayer in LAYOUTS[block.layout].sublayers:
        for place in sublayer.norms:
            found[f"norms.{sublayer.name}_{place}"] = norm_kind(block, sublayer.name, place)
    unused = {f"attention.{name}" for name in ATTENTION} | {f"feed_forward.{name}" for name in FEED_FORWARD}
    unused |= {f"feed_forward.moe.{name}" for name in MOE}
    groups = ("attention.", "feed_forward.")
    found |= {path: value for path, value in own.items() if path.startswith(groups) and path not in unused}
    return found | _computed(block, model.width)


def _computed(block: BlockConfig, width: int) -> dict:
    """Options by the numbers that they come to."""
    a, f, found = block.attention, block.feed_forward, {}
    if a.kind == "softmax":
        found["attention.scale"] = logit_scale(a, width)
    if a.position == "rope":
        found["attention.rope.size"] = rotary_size(a.head_size, a.rope.fraction)
    return found | ({"feed_forward.moe.bias": f.moe.balance == "bias"} if f.kind == "moe" else {})
