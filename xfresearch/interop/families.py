"""The supported families by model_type. To add a family, add its file and list it in MODULES."""

from xfresearch.interop import (
    bart,
    bert,
    gemma,
    gemma2,
    gemma3,
    gpt2,
    gpt_neo,
    gpt_neox,
    gpt_oss,
    gptj,
    llama,
    mistral,
    mixtral,
    olmo,
    olmo2,
    olmo3,
    olmoe,
    opt,
    phi,
    phi3,
    qwen2,
    qwen3,
    qwen3_moe,
    roberta,
    t5,
)
from xfresearch.interop.family import Family, Unsupported
from xfresearch.interop.unread import unread_keys
from xfresearch.runtime.errors import nearest

MODULES = (
    gpt2,
    gpt_neo,
    gptj,
    gpt_neox,
    opt,
    phi,
    llama,
    mistral,
    mixtral,
    qwen2,
    qwen3,
    qwen3_moe,
    phi3,
    olmo,
    olmo2,
    olmo3,
    olmoe,
    gemma,
    gemma2,
    gemma3,
    gpt_oss,
    t5,
    bart,
    bert,
    roberta,
)
FAMILIES = {module.FAMILY.name: module.FAMILY for module in MODULES}


def get_family(name: str) -> Family:
    """The family with this model_type. Raises Unsupported if there is none."""
    if not isinstance(name, str) or name not in FAMILIES:
        known = ", ".join(FAMILIES)
        raise Unsupported(
            f"model_type={name!r} is not allowed: it must be one of {known}{nearest(str(name), FAMILIES)}"
        )
    return FAMILIES[name]


def family_of(config: dict) -> Family:
    """The family of a config.json. Raises Unsupported if there is none. The families exist in many variants, so the
    message proposes none: it names the keys that no family reads."""
    name = config.get("model_type")
    if isinstance(name, str) and name in FAMILIES:
        return FAMILIES[name]
    unread = unread_keys(config, set().union(*(family.reads for family in FAMILIES.values())))
    keys = f"; no family reads the keys {', '.join(unread)}" if unread else ""
    raise Unsupported(f"config.json: model_type={name!r} is not supported: the families are {', '.join(FAMILIES)}{keys}")


def all_families() -> list[Family]:
    return list(FAMILIES.values())
