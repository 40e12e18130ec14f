"""The families that folders may be of: model_type in config.json, and where its table is. A new one is a file and a line."""

from xfresearch.errors import nearest
from xfresearch.interop.family import Family, Refused
from xfresearch.models.variants import load

NAMES = (
    *("gpt2", "gptj", "gpt_neox", "opt", "phi"),
    *("llama", "mistral", "mixtral", "qwen2", "qwen3", "olmo", "olmo2", "olmoe", "gemma", "gemma2"),
)
FAMILIES = {name: f"xfresearch.interop.{name}:FAMILY" for name in NAMES}


def family(name: str) -> Family:
    """The family of that model_type; Refused where there is none."""
    if not isinstance(name, str) or name not in FAMILIES:
        known = ", ".join(FAMILIES)
        raise Refused(f"model_type={name!r} is not allowed: it must be one of {known}{nearest(str(name), FAMILIES)}")
    return load(FAMILIES[name])


def all_families() -> list[Family]:
    return [load(place) for place in FAMILIES.values()]
