"""The supported families by model_type. To add a family, add its file, of the same name, and list it in NAMES.

The file of a family is imported when its folder is read or written.
"""

from collections.abc import Callable, Iterable
from pkgutil import resolve_name

from xfresearch.interop.family import Family, Unsupported
from xfresearch.interop.unread import unread_keys
from xfresearch.runtime.errors import nearest

NAMES = (
    "gpt2",
    "gpt_neo",
    "gptj",
    "gpt_neox",
    "opt",
    "phi",
    "llama",
    "mistral",
    "mixtral",
    "qwen2",
    "qwen3",
    "qwen3_moe",
    "phi3",
    "olmo",
    "olmo2",
    "olmo3",
    "olmoe",
    "gemma",
    "gemma2",
    "gemma3_text",
    "gpt_oss",
    "t5",
    "bart",
    "bert",
    "roberta",
)


def get_family(name: str) -> Family:
    """The family with this model_type. Raises Unsupported if there is none."""
    if name not in NAMES:
        known = ", ".join(NAMES)
        raise Unsupported(f"model_type={name!r} is not allowed: it must be one of {known}{nearest(str(name), NAMES)}")
    return resolve_name(f"xfresearch.interop.{name}:FAMILY")


def family_of(config: dict, tensors: Callable[[], Iterable[str]] = tuple) -> Family:
    """The family of a config.json. Raises Unsupported if there is none. The families exist in many variants, so the
    message proposes none: it names the keys that no family reads. Without a model_type, as in files of 2019, it names the
    family whose names `tensors()` have."""
    name = config.get("model_type")
    if name is None:
        raise Unsupported(f"config.json: model_type is missing, as in files of 2019: {_fitting(config, list(tensors()))}")
    if name in NAMES:
        return get_family(name)
    unread = unread_keys(config, set().union(*(family.reads for family in all_families())))
    keys = f"; no family reads the keys {', '.join(unread)}" if unread else ""
    raise Unsupported(f"config.json: model_type={name!r} is not supported: the families are {', '.join(NAMES)}{keys}")


def _fitting(config: dict, tensors: list[str]) -> str:
    """Which families these names of tensors are of; of several, those that read most keys of config.json."""
    fits = {}
    for family in all_families():
        of_names, of_rows = family.shares(tensors)
        fits[family.name] = of_names, -len(unread_keys(config, family.reads)), of_rows
    best = max(fits.values())
    names = [name for name, fit in fits.items() if fit == best]
    if best[0] < 0.5:
        return f"it must be one of {', '.join(NAMES)}"
    value = f'"{names[0]}"' if len(names) == 1 else "and which of them it is"
    return f'its tensors have the names of {" or ".join(names)}: add "model_type": {value}'


def all_families() -> list[Family]:
    """Every family, in the order in which an export tries them."""
    return list(map(get_family, NAMES))
