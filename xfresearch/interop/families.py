"""The supported families by model_type. To add a family, add its file and list it in MODULES."""

from collections.abc import Callable, Iterable

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


def family_of(config: dict, tensors: Callable[[], Iterable[str]] = tuple) -> Family:
    """The family of a config.json. Raises Unsupported if there is none. The families exist in many variants, so the
    message proposes none: it names the keys that no family reads. Without a model_type, as in files of 2019, it names the
    family whose names `tensors()` have."""
    name = config.get("model_type")
    if name is None:
        raise Unsupported(f"config.json: model_type is missing, as in files of 2019: {_fitting(config, list(tensors()))}")
    if isinstance(name, str) and name in FAMILIES:
        return FAMILIES[name]
    unread = unread_keys(config, set().union(*(family.reads for family in FAMILIES.values())))
    keys = f"; no family reads the keys {', '.join(unread)}" if unread else ""
    raise Unsupported(f"config.json: model_type={name!r} is not supported: the families are {', '.join(FAMILIES)}{keys}")


def _fitting(config: dict, tensors: list[str]) -> str:
    """Which families these names of tensors are of; of several, those that read most keys of config.json."""
    fits = {}
    for name, family in FAMILIES.items():
        of_names, of_rows = family.shares(tensors)
        fits[name] = of_names, -len(unread_keys(config, family.reads)), of_rows
    best = max(fits.values())
    names = [name for name, fit in fits.items() if fit == best]
    if best[0] < 0.5:
        return f"it must be one of {', '.join(FAMILIES)}"
    value = f'"{names[0]}"' if len(names) == 1 else "and which of them it is"
    return f'its tensors have the names of {" or ".join(names)}: add "model_type": {value}'


def all_families() -> list[Family]:
    return list(FAMILIES.values())
