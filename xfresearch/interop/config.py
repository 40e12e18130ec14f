"""A family's config.json as a config of ours, and back."""

import re

from xfresearch.config.reading import from_dict
from xfresearch.errors import UserError
from xfresearch.interop.family import Family, Refused
from xfresearch.interop.rope import read_rope, rope_names, write_rope
from xfresearch.models.layers import layers
from xfresearch.models.mixers.softmax.projections import logit_scale
from xfresearch.models.model_config import ModelConfig, resolve_model


def read_model(family: Family, config: dict, **more) -> ModelConfig:
    """The model that a `config` (config.json) of `family` describes; `more` are fields of ours besides. Refused where it
    has what our models do not have."""
    _refuse(family, config)
    changes = dict(family.fixed) | {key.ours: key.from_config(config) for key in family.keys}
    _checked(family, changes, [0])  # before anything is computed from them
    changes |= family.derived(config) | more
    if family.rope:
        changes |= read_rope(family.rope, config, changes)
    windows = family.windows.read(config) if family.windows else [0]
    model = _checked(family, changes, windows)
    try:
        return resolve_model(model)
    except UserError as error:
        raise Refused(_in_their_words(family, changes, error)) from None


def _refuse(family: Family, config: dict) -> None:
    for key, value in (family.needs | {key: config.get(other) for key, other in family.same.items()}).items():
        given = config.get(key)
        if given is not None and given != value:
            raise Refused(f"config.json: {key}={given!r} is not allowed: {family.name} is read with {value!r} only")
    if config.get("quantization_config"):
        raise Refused("config.json: quantization_config is not allowed: only unquantised checkpoints are read")


def _checked(family: Family, changes: dict, windows: list[int]) -> ModelConfig:
    """`changes` as a config whose values have the right types. Refused where one has not."""
    try:
        return from_dict(ModelConfig, _tree(changes, windows), "config.model")
    except UserError as error:
        raise Refused(_in_their_words(family, changes, error)) from None


def _in_their_words(family: Family, changes: dict, error: UserError) -> str:
    """What is wrong with a field of ours, said of the key that set it."""
    text, names = str(error), {key.ours: key.theirs for key in family.keys}
    if family.rope:
        names |= rope_names(family.rope, changes.get("*.attention.rope.scaling", "none"))
    for ours, theirs in names.items():
        pattern = ours.replace(".", r"\.").replace("*", r"blocks\.\w+")
        text = re.sub(rf"config\.model\.{pattern}(?==)", theirs, text)
    return f"config.json: {text}"


def _tree(changes: dict, windows: list[int]) -> dict:
    """The nested mapping that `from_dict` reads: a block for each window that layers have."""
    pattern = _period(windows)
    names = {
        window: "main" if len(set(pattern)) == 1 else f"window_{window}" if window else "full" for window in pattern
    }
    model = {name: value for name, value in changes.items() if not name.startswith("*.")}
    blocks = {}
    for window, name in names.items():
        block = blocks[name] = {}
        own = {"*.attention.window": window} if window else {}
        for path, value in ({k: v for k, v in changes.items() if k.startswith("*.")} | own).items():
            *groups, last = path.removeprefix("*.").split(".")
            here = block
            for group in groups:
                here = here.setdefault(group, {})
            here[last] = value
    return model | {"blocks": blocks, "pattern": [names[window] for window in pattern]}


def _period(values: list) -> list:
    """The shortest list whose repetition is `values`."""
    count = len(values)
    return next(values[:p] for p in range(1, count + 1) if count % p == 0 and values == values[:p] * (count // p))


def write_config(family: Family, model: ModelConfig) -> dict:
    """The config.json of `model` as one of `family`. What the family has no field or no name for is not in it: reading it
    back shows that (matching.py)."""
    blocks = [model.blocks[layer.block] for layer in layers(model)]
    found = {"model_type": family.name, "architectures": [family.architecture], **family.needs}
    found |= {key.theirs: key.to_config(value_at(model, key.ours)) for key in family.keys}
    found |= {key: found[other] for key, other in family.same.items()}
    if family.rope:
        found |= write_rope(family.rope, blocks[0].attention, model.max_length)
    if family.windows:
        found |= family.windows.write([block.attention.window for block in blocks])
    return found


def value_at(model: ModelConfig, path: str):
    """The value of a field of `model`; of '*.', its first block's, and a scale of attention as it is computed with."""
    here, names, first = model, path.split("."), model.blocks[layers(model)[0].block]
    if path == "*.attention.scale":
        return logit_scale(first.attention, model.width)
    if names[0] == "*":
        here, names = first, names[1:]
    for name in names:
        here = getattr(here, name)
    return here
