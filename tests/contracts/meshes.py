"""The mesh that a variant is tested on."""

import math

from xfresearch.models.model_config import ModelConfig, mixtures


def mesh_sizes(config: ModelConfig, devices: int) -> dict[str, int]:
    """Size 2 for every mesh axis that can shard the model; the data axis has the remaining devices."""
    options = [block.attention for block in config.blocks.values()]
    heads = [a.heads for a in options if hasattr(a, "heads")]
    heads += [n for n in (getattr(a, "kv_heads", 0) for a in options) if n > 1]  # a single one is on every device
    experts = [moe.experts for moe in mixtures(config)]
    sizes = {"fsdp": 2, "expert": math.gcd(2, *experts) if experts else 1, "tensor": math.gcd(2, *heads)}
    sizes["context"] = 2 if devices >= 32 else 1
    return {"data": devices // math.prod(sizes.values()), **sizes}
