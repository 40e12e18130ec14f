"""OLMo 3 (Olmo Team 2025): OLMo 2 with sliding windows in three of four layers. Only the others scale RoPE."""

from dataclasses import replace

from xfresearch.interop import olmo2
from xfresearch.interop.by_layer import every, some_layers_with_rope
from xfresearch.interop.family import Rope

ROPE = Rope(theta_default=5e5, by_type=True, sliding_theta_default=5e5)

FAMILY = replace(
    olmo2.FAMILY,
    name="olmo3",
    architecture="Olmo3ForCausalLM",
    keys=tuple(key for key in olmo2.FAMILY.keys if key.theirs != "head_dim"),
    rope=ROPE,
    by_layer=some_layers_with_rope(every(4), default=4096, rope=ROPE),
)
