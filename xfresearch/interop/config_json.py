"""Translates a family's config.json to a ModelConfig, and back."""

import re

from xfresearch.interop.by_layer import period_of
from xfresearch.interop.family import ENCODER, MISSING, OF_ENCODER, REQUIRED, Family, Unsupported
from xfresearch.interop.rope import Rope, read_rope, rope_names, write_rope
from xfresearch.models.block_config import BlockConfig
from xfresearch.models.layers import layers
from xfresearch.models.mixers.softmax.config import SoftmaxConfig
from xfresearch.models.mixers.softmax.projections import logit_scale
from xfresearch.models.model_config import ModelConfig, resolve_model
from xfresearch.models.token_stack import TokenStackConfig
from xfresearch.options.reading import from_dict
from xfresearch.runtime.errors import UserError

DEQUANTIZE = (
    "MXFP4 is not read; save it in bfloat16 first, with "
    "from_pretrained(..., quantization_config=Mxfp4Config(dequantize=True)) of transformers and save_pretrained"
)
# The layer of a family whose layers are all alike: the name of its block, no fields of its own.
MAIN: tuple[str, dict] = ("main", {})


def read_model(family: Family, config: dict, **more) -> ModelConfig:
    """The model that `config` (a config.json of `family`) describes. `more` are further ModelConfig fields.

    Raises Unsupported if our models cannot express it.
    """
    _check_supported(family, config)
    changes = dict(family.fixed) | {key.ours: key.from_config(config) for key in family.keys}
    _validated(family, changes, [MAIN])  # checked first, because `derived` and `read_rope` compute with these values
    changes |= family.derived(config) | more
    if family.rope and not family.rope.by_type:
        changes |= read_rope(family.rope, config, changes)
    by_layer = family.by_layer.read(config, changes) if family.by_layer else [MAIN]
    model = _validated(family, changes, by_layer)
    try:
        return resolve_model(model)
    except UserError as error:
        raise Unsupported(_with_hf_names(family, changes, error)) from None


def _check_supported(family: Family, config: dict) -> None:
    for key, value in (family.needs | {key: config.get(other) for key, other in family.same.items()}).items():
        given = config.get(key)
        if given is not None and given != value:
            raise Unsupported(f"config.json: {key}={given!r} is not allowed: it must be {value!r} for {family.name}")
    causal = config.get("is_causal", True) if family.fixed.get("causal", True) else True
    if causal is not True:  # with null, too, `transformers` lets every position see all others
        raise Unsupported(f"config.json: is_causal={causal!r} is not allowed: it must be True, or missing")
    quantized = config.get("quantization_config")
    if quantized:
        method = quantized.get("quant_method") if isinstance(quantized, dict) else None
        if method == "mxfp4":
            raise Unsupported(f"config.json: quantization_config.quant_method={method!r} is not allowed: {DEQUANTIZE}")
        raise Unsupported("config.json: quantization_config is not allowed: the checkpoint must be unquantized")


def _validated(family: Family, changes: dict, by_layer: list[tuple[str, dict]]) -> ModelConfig:
    """`changes` as a ModelConfig. Raises Unsupported if a value has the wrong type."""
    try:
        return from_dict(ModelConfig, _nested(changes, by_layer), "config.model")
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


def _nested(changes: dict, by_layer: list[tuple[str, dict]]) -> dict:
    """The nested mapping that `from_dict` reads, with one block for each name in `by_layer`. The layers of an encoder are
    all alike."""
    of_encoder = {path: value for path, value in changes.items() if path.startswith(OF_ENCODER)}
    if of_encoder:
        changes = {path: value for path, value in changes.items() if path not in of_encoder}
        own = {path.removeprefix(OF_ENCODER): value for path, value in of_encoder.items()}
        return _nested(changes, by_layer) | {"stacks": {ENCODER: _nested(own, [MAIN])}}
    pattern = period_of([name for name, _ in by_layer])
    own = dict(by_layer)
    names = {name: name if len(own) > 1 else MAIN[0] for name in own}
    shared = {path: value for path, value in changes.items() if path.startswith("*.")}
    model = {path: value for path, value in changes.items() if not path.startswith("*.")}
    blocks = {names[name]: _nested_block(shared | fields) for name, fields in own.items()}
    return model | {"blocks": blocks, "pattern": [names[name] for name in pattern]}


def _nested_block(fields: dict) -> dict:
    """{'a': {'b': value}} of {'*.a.b': value}."""
    block: dict = {}
    for path, value in fields.items():
        if value is MISSING:
            continue
        *groups, last = path.removeprefix("*.").split(".")
        here = block
        for group in groups:
            here = here.setdefault(group, {})
        here[last] = value
    return block


def write_config(family: Family, model: ModelConfig) -> dict:
    """The config.json of `model` as one of `family`.

    Options that the family cannot express are left out; differences.py finds them by reading the result back.
    """
    blocks = [model.blocks[layer.block] for layer in layers(model)]
    written = {"model_type": family.name, "architectures": [family.architecture], **family.needs}
    for key in family.keys:
        value = value_at(model, key.ours)
        if value is not MISSING:
            written[key.theirs] = key.to_config(value)
        elif key.default is REQUIRED:
            written[key.theirs] = 1  # any size: the two models differ in their layout or kind
    written |= {key: written[other] for key, other in family.same.items() if other in written}
    if family.rope and _softmax(blocks[0]):
        written |= write_rope(family.rope, *_attention_by_type(family.rope, blocks))
    if family.by_layer:
        written |= family.by_layer.write(blocks)
    return written


def _softmax(block: BlockConfig) -> SoftmaxConfig | None:
    """The softmax attention of a block; None if its attention is of another kind."""
    attention = block.sublayers["attention"]
    return attention if isinstance(attention, SoftmaxConfig) else None


def _attention_by_type(rope: Rope, blocks: list[BlockConfig]) -> list[SoftmaxConfig]:
    """The attention of the first layer, or of the first layer with full attention and of the first with a window."""
    attention = [softmax for each in blocks if (softmax := _softmax(each))]
    if not rope.by_type:
        return attention[:1]
    full = next((each for each in attention if not each.window), attention[0])
    return [full, next((each for each in attention if each.window), full)]


def value_at(model: TokenStackConfig, path: str):
    """The value of a field of `model`; MISSING if its kinds do not have the field. '*.' is the block of the first layer
    that has the field. attention.scale is resolved."""
    if path.startswith(OF_ENCODER):
        encoder = getattr(model, ENCODER, None)
        return value_at(encoder, path.removeprefix(OF_ENCODER)) if encoder else MISSING
    if not path.startswith("*."):
        return _field(model, path)
    blocks = [model.blocks[layer.block] for layer in layers(model)]
    if path == "*.attention.scale" and (softmax := _softmax(blocks[0])):
        return logit_scale(softmax, model.width)
    values = (_field(block, path.removeprefix("*.")) for block in blocks)
    return next((value for value in values if value is not MISSING), MISSING)


def _field(config, path: str):
    for name in path.split("."):
        config = getattr(config, name, MISSING)
    return config
