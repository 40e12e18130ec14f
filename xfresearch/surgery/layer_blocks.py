"""The config of a stack whose layers each have a block of their own: patterns, segments and names of blocks."""

from collections.abc import Iterable
from dataclasses import dataclass, fields
from itertools import count
from typing import Any

from xfresearch.models import layers, token_stack
from xfresearch.models.block_config import BlockConfig
from xfresearch.models.model_config import ModelConfig, resolve_model
from xfresearch.models.token_stack import TokenStackConfig
from xfresearch.options.fields import with_values
from xfresearch.runtime.errors import UserError
from xfresearch.surgery.refused import Refused


@dataclass(frozen=True)
class LayerBlock:
    """The block of one layer: its name in model.blocks, and its options."""

    name: str
    block: BlockConfig


def with_layers(model: TokenStackConfig, blocks: tuple[LayerBlock, ...]) -> Any:
    """`model`, or its encoder, with these layers: in its own pattern or segments if they still fit, otherwise in the
    shortest pattern that repeats, or in segments of equal layers. Layers of one name that differ get names of their own."""
    names, options = _named(blocks)
    options = {name: each if name == names[0] else _with_read_norms(each) for name, each in options.items()}
    change = {"depth": len(names), "blocks": options}
    fits = len(names) == model.depth and names == [at.block for at in layers.layers(model)]
    if not fits:
        new = {name: _no_stack(name, options) for name in options}
        names, change["blocks"] = [new[name] for name in names], {new[name]: each for name, each in options.items()}
        change |= _arranged(names)
    try:
        return _resolved(with_values(model, change))
    except UserError as error:  # the variant with these options does not exist
        raise Refused(f"the result is not a model that this project has: {error}") from error


def _resolved(model: TokenStackConfig) -> TokenStackConfig:
    return resolve_model(model) if isinstance(model, ModelConfig) else token_stack.resolved(model)


def _no_stack(name: str, names: Iterable[str]) -> str:
    """A name that no stack has: if a block X is repeated, its stacks are X_0, X_1 and so on (models/layers.py)."""
    block, _, number = name.rpartition("_")
    if not number.isdigit() or block not in names:
        return name
    return next(new for n in count(int(number)) if (new := f"{block}_v{n}") not in names)


def _with_read_norms(block: BlockConfig) -> BlockConfig:
    """A block without norm options that nothing reads. The first block's are those of the norms outside the blocks, and a
    layer that gets a block of its own has to leave them behind if it has no norm."""
    sites = [getattr(block.norms, site.name) for site in fields(block.norms)]
    kinds = [site.kind or block.norm for site in sites]
    kinds += [kind for options in block.sublayers.values() for kind in options.norm_kinds]
    if any(kind != "none" for kind in kinds):
        return block
    inherits = {"norm"} if any(not site.kind for site in sites) else set()
    unread = [each for each in fields(BlockConfig) if each.name.startswith("norm") and each.name not in inherits]
    return with_values(block, {each.name: each.default for each in unread})


def _arranged(names: list[str]) -> dict:
    """Options `pattern` and `segments` for layers with these names."""
    total = len(names)
    period = next(p for p in range(1, total + 1) if total % p == 0 and names == names[:p] * (total // p))
    if period <= max(1, total // 2):
        return {"pattern": tuple(names[:period]), "segments": ()}
    runs: list[list] = []
    for name in names:
        if runs and runs[-1][0] == (name,):
            runs[-1][1] += 1
        else:
            runs.append([(name,), 1])
    pattern = ModelConfig.__dataclass_fields__["pattern"].default
    return {"pattern": pattern, "segments": tuple((name, repeats) for name, repeats in runs)}


def _named(blocks: tuple[LayerBlock, ...]) -> tuple[list[str], dict[str, BlockConfig]]:
    """The name of each layer's block, and the options by name."""
    options: dict[str, BlockConfig] = {}
    names = []
    for each in blocks:
        name, number = each.name, 2
        while name in options and options[name] != each.block:
            name, number = f"{each.name}_{number}", number + 1
        options[name] = each.block
        names.append(name)
    return names, options
