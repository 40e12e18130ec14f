"""Translates a family's config.json to a ModelConfig, and back."""

import re

from xfresearch.config.reading import from_dict
from xfresearch.errors import UserError
from xfresearch.interop.family import REQUIRED, Family, Unsupported
from xfresearch.interop.rope import read_rope, rope_names, write_rope
from xfresearch.models.layers import layers
from xfresearch.models.mixers.softmax.config import SoftmaxConfig
from xfresearch.models.mixers.softmax.projections import logit_scale
from xfresearch.models.model_config import ModelConfig, resolve_model

MISSING = object()  # the value of a field that a model does not have


def read_model(family: Family, config: dict, **more) -> ModelConfig:
    """The model that `config` (a config.json of `family`) describes. `more` are further ModelConfig fields.

    Raises Unsupported if our models cannot express it.
    """
    _check_supported(family, config)
    changes = dict(family.fixed) | {key.ours: key.from_config(config) for key in family.keys}
    _validated(family, changes, [0])  # checked first, because `derived` and `read_rope` compute with these values
    changes |= family.derived(config) | more
    if family.rope:
        changes |= read_rope(family.rope, config, changes)
    windows = family.windows.read(config) if family.windows else [0]
    model = _validated(family, changes, windows)
    try:
        return resolve_model(model)
    except UserError as error:
        raise Unsupported(_with_hf_names(family, changes, error)) from None


def _check_supported(family: Family, config: dict) -> None:
    for key, value in (family.needs | {key: config.get(other) for key, other in family.same.items()}).items():
        given = config.get(key)
        if given is not None and given != value:
            raise Unsupported(f"config.json: {key}={given!r} is not allowed: it must be {value!r} for {family.name}")
    causal = config.get("is_causal", True)
    if causal is not True:  # with null, too, `transformers` lets every position see all others
        raise Unsupported(f"config.json: is_causal={causal!r} is not allowed: it must be True, or missing")
    if config.get("quantization_config"):
        raise Unsupported("config.json: quantization_config is not allowed: the checkpoint must be unquantized")


def _validated(family: Family, changes: dict, windows: list[int]) -> ModelConfig:
    """`changes` as a ModelConfig. Raises Unsupported if a value has the wrong type."""
    try:
        return from_dict(ModelConfig, _nested(changes, windows), "config.model")
    except UserError as error:
        raise Unsupported(_with_hf_names(family, changes, error)) from None


def _with_hf_names(family: Family, changes: dict, error: UserError) -> str:
    """The text of `error`, with our field names replaced by the config.json keys that set them."""
    text = str(error)
    names = {key.ours: key.theirs for key in family.keys}
    if family.rope:
        names |= rope_names(family.rope, changes.get("*.attention.rope.scaling", "none"))
    for ours, theirs in names.items():
        pattern = ours.replace(".", r"\.").replace("*", r"blocks\.\w+")
        text = re.sub(rf"config\.model\.{pattern}(?==)", theirs, text)
    return f"config.json: {text}"


def _nested(changes: dict, windows: list[int]) -> dict:
    """The nested mapping that `from_dict` reads, with one block for each distinct window."""
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
    """The shortest list that gives `values` when repeated."""
    count = len(values)
    return next(values[:p] for p in range(1, count + 1) if count % p == 0 and values == values[:p] * (count // p))


def write_config(family: Family, model: ModelConfig) -> dict:
    """The config.json of `model` as one of `family`.

    Options that the family cannot express are left out; matching.py finds them by reading the result back.
    """
    blocks = [model.blocks[layer.block] for layer in layers(model)]
    found = {"model_type": family.name, "architectures": [family.architecture], **family.needs}
    for key in family.keys:
        value = value_at(model, key.ours)
        if value is not MISSING:
            found[key.theirs] = key.to_config(value)
        elif key.default is REQUIRED:
            found[key.theirs] = 1  # any size: the two models differ in their layout or kind
    found |= {key: found[other] for key, other in family.same.items() if other in found}
    if family.rope and isinstance(blocks[0].attention, SoftmaxConfig):
        found |= write_rope(family.rope, blocks[0].attention, model.max_length)
    if family.windows:
        found |= family.windows.write([getattr(block.attention, "window", 0) for block in blocks])
    return found


def value_at(model: ModelConfig, path: str):
    """The value of a field of `model`; MISSING if its kinds do not have the field. '*.' is the block of the first layer.
    attention.scale is resolved."""
    first = model.blocks[layers(model)[0].block]
    if path == "*.attention.scale" and isinstance(first.attention, SoftmaxConfig):
        return logit_scale(first.attention, model.width)
    here = model
    names = path.split(".")
    if names[0] == "*":
        here = first
        names = names[1:]
    for name in names:
        here = getattr(here, name, MISSING)
    return here
