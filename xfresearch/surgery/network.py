"""A model as a list of layers, for surgery: every layer has its own block and its own parameters.

A conversion maps a Network to a Network. The parameters of a layer are computed when somebody asks for them, so that a
large model is converted layer by layer. Arrays are NumPy arrays in float64; {path: array} maps 'attention/query/kernel'
to the parameter of one layer.

`take_apart` and `assemble` are the only code here that knows patterns, segments and stacks (models/layers.py).
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from itertools import count
from typing import Generic, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from xfresearch.config.fields import with_values
from xfresearch.models import layers, transformer
from xfresearch.models.block_config import BLOCKS, BlockConfig
from xfresearch.models.layouts import LAYOUTS
from xfresearch.models.linear_terms import LinearTerm, linear_terms
from xfresearch.models.model_config import ModelConfig, resolve_model, second_stack
from xfresearch.models.norms import NormSpec
from xfresearch.models.sublayer import SublayerConfig
from xfresearch.runtime.errors import UserError
from xfresearch.runtime.trees import by_path, path_name
from xfresearch.sharding.letters import Axes
from xfresearch.surgery.refused import Refused, refuse_unless

O = TypeVar("O", bound=SublayerConfig)
Params = dict[str, np.ndarray]  # {path: array} of one layer, of one sublayer, or of what is outside the blocks
ROLE_WORDS = {"mixer": "mixer", "feed_forward": "feed-forward layer"}  # in messages


@dataclass(frozen=True)
class LayerBlock:
    """The block of one layer: its name in model.blocks, and its options."""

    name: str
    block: BlockConfig


class Target(NamedTuple, Generic[O]):
    """A sublayer of one layer: where it is, and its options, of the class O."""

    number: int  # of the layer
    index: int  # type: ignore[assignment]  # among the sublayers of its role in the layer
    name: str
    options: O
    where: str  # for messages: the layer, and the sublayer's name if it is not the only one of its role there

    def random(self, seed: int) -> np.random.Generator:
        """Random numbers of this sublayer alone."""
        return np.random.default_rng((seed, self.number, self.index))


@dataclass(frozen=True)
class Network:
    model: ModelConfig  # options outside the blocks; its blocks, pattern and segments are those before surgery
    outside: Params  # embed, position, norms, head, shared tables
    layers: tuple[LayerBlock, ...]
    params: Callable[[int], Params]  # of a layer
    figures: dict[str, float] = field(default_factory=dict)  # for the certificate, such as condition numbers
    undropped: frozenset[str] = frozenset()  # whose dropout was set to 0, in words

    def change(
        self,
        chosen: Iterable[int],
        block: Callable[[BlockConfig], BlockConfig],
        params: Callable[[int, BlockConfig, Params], Params],
    ) -> "Network":
        """The network with block(old) and params(number, old block, old parameters) for each of the `chosen` layers."""
        chosen = set(chosen)
        old = self.layers
        new = [replace(at, block=block(at.block)) if number in chosen else at for number, at in enumerate(old)]

        def of(number: int) -> Params:
            arrays = self.params(number)
            return params(number, old[number].block, arrays) if number in chosen else arrays

        return replace(self, layers=tuple(new), params=of)

    def targets(self, role: str, chosen: Iterable[int]) -> list[Target]:
        """The sublayers of this role in the `chosen` layers. Raises Refused for a layer without one."""
        targets = []
        for number in chosen:
            block = self.layers[number].block
            names = names_of(block, role)
            refuse_unless(bool(names), f"layer {number}: layout={block.layout!r} has no {ROLE_WORDS[role]}")
            for index, name in enumerate(names):
                where = f"layer {number}" + (f", {name}" if len(names) > 1 else "")
                targets.append(Target(number, index, name, getattr(block, name), where))
        return targets

    def only(self, role: str, number: int) -> Target:
        """The sublayer of this role in a layer. Raises Refused if there is none, or more than one."""
        targets = self.targets(role, [number])
        where = f"layer {number}: {', '.join(each.name for each in targets)}"
        refuse_unless(len(targets) == 1, f"{where}: this conversion is for one {ROLE_WORDS[role]} in a layer")
        return targets[0]

    def inside(self, target: Target) -> Params:
        """The parameters of a sublayer."""
        return inside(self.params(target.number), target.name)

    def change_each(
        self,
        targets: Iterable[Target[O]],
        options: Callable[[O], SublayerConfig],
        params: Callable[[Target[O], Params], Params],
    ) -> "Network":
        """The network with options(old) and params(target, old parameters) for each of these sublayers."""
        of_layer: dict[int, list[Target[O]]] = {}
        for target in targets:
            of_layer.setdefault(target.number, []).append(target)

        def block(number: int, old: BlockConfig) -> BlockConfig:
            return with_values(old, {each.name: options(each.options) for each in of_layer.get(number, ())})

        def of(number: int) -> Params:
            arrays = self.params(number)
            for each in of_layer.get(number, ()):
                arrays = put(arrays, each.name, params(each, inside(arrays, each.name)))
            return arrays

        new = [replace(at, block=block(number, at.block)) for number, at in enumerate(self.layers)]
        return replace(self, layers=tuple(new), params=of)

    def without_dropout(self, chosen: Iterable[int], embedding: bool = False) -> "Network":
        """The network without dropout of sublayers' outputs in the `chosen` layers, or of the embedding, where training
        would drop other values than before. The certificate says so."""
        chosen = {number for number in chosen if self.layers[number].block.dropout}
        embedding &= self.model.dropout > 0
        undropped = {"the outputs of sublayers"} if chosen else set()
        undropped |= {"the embedding"} if embedding else set()
        layers = [
            replace(at, block=replace(at.block, dropout=0.0)) if number in chosen else at
            for number, at in enumerate(self.layers)
        ]
        model = replace(self.model, dropout=0.0) if embedding else self.model
        return replace(self, model=model, layers=tuple(layers), undropped=self.undropped | undropped)

    def with_outside(self, params: Mapping[str, np.ndarray | None], **options) -> "Network":
        """The network with these parameters outside the blocks (None removes one), and other options of the model."""
        outside = {path: value for path, value in {**self.outside, **params}.items() if value is not None}
        return replace(self, model=replace(self.model, **options), outside=outside)

    @cached_property
    def resolved(self) -> ModelConfig:
        """The config of the whole network. Raises Refused if there is no such model."""
        return with_layers(self.model, self.layers)

    def axes(self, number: int) -> dict[str, Axes]:
        """The letters of the parameters of a layer, by path."""
        model = self.resolved
        stack = transformer.axes(model)["blocks"][layers.layers(model)[number].stack]
        return {path: replace(each, letters=each.letters.removeprefix("N")) for path, each in by_path(stack).items()}

    def terms(self, number: int, *sublayers: str) -> list[LinearTerm]:
        """The linear terms of sublayers of a layer, with the paths of the layer's parameters."""
        axes, block = self.axes(number), self.layers[number].block
        return [
            term.inside(name) for name in sublayers for term in linear_terms(getattr(block, name), inside(axes, name))
        ]

    def norm(self, kind: str) -> NormSpec:
        """A norm outside the blocks: it has the norm options of the first block."""
        return self.layers[0].block.norm_spec(kind)


def names_of(block: BlockConfig, role: str) -> list[str]:
    """The names of the sublayers of a role, in order."""
    return [branch.name for branch in LAYOUTS[block.layout].branches if branch.role == role]


def options_of(block: BlockConfig, name: str, kind: type[O]) -> O:
    """The options of a sublayer, which is known to be of this class."""
    options = block.sublayers[name]
    assert isinstance(options, kind), f"{name}: {type(options).__name__}"
    return options


def inside(tree: Mapping[str, object], name: str) -> dict:
    """The entries of a sublayer in {path: entry} of a layer. Their paths begin inside the sublayer."""
    return {path.removeprefix(f"{name}/"): each for path, each in tree.items() if path.startswith(f"{name}/")}


def put(params: Params, name: str, new: Params) -> Params:
    """The parameters of a layer with those of one sublayer replaced."""
    others = {path: value for path, value in params.items() if not path.startswith(f"{name}/")}
    return others | {f"{name}/{path}": value for path, value in new.items()}


def take_apart(model: ModelConfig, params: dict) -> Network:
    """The layers of a resolved model. Raises UserError if the parameters do not match the config."""
    refuse_unless(not second_stack(model), f"conversions do not apply to this model: {second_stack(model)}")
    check(model, by_path(params))
    places = layers.layers(model)

    def of(number: int) -> Params:
        at = places[number]
        stack = by_path(params["blocks"][at.stack])
        return {path: np.asarray(leaf[at.index], np.float64) for path, leaf in stack.items()}

    outside = {name: tree for name, tree in params.items() if name != "blocks"}
    wide = {path: np.asarray(leaf, np.float64) for path, leaf in by_path(outside).items()}
    return Network(model, wide, tuple(LayerBlock(at.block, model.blocks[at.block]) for at in places), of)


def check(model: ModelConfig, params: Mapping) -> None:
    """Raises UserError if {path: array} has not the paths and the shapes of the config's parameters."""
    expected = by_path(transformer.abstract(model))
    for path in sorted(expected.keys() | params.keys()):
        shapes = [leaves[path].shape if path in leaves else None for leaves in (params, expected)]
        if shapes[0] != shapes[1]:
            has, needs = ("nothing" if shape is None else f"an array {shape}" for shape in shapes)
            raise UserError(f"params: {path!r} is {has}, and the config needs {needs}")


def assemble(network: Network, dtype: str) -> tuple[ModelConfig, dict]:
    """The resolved config of a network, and its parameters in `dtype`. A stack is filled layer by layer, so the memory
    is that of the result, of one layer in float64 and of the largest stack."""
    model = network.resolved
    counts = {place.name: place.repeats for place in layers.stacks(model)}
    params: Params = {path: leaf.astype(dtype) for path, leaf in network.outside.items()}
    for at in layers.layers(model):
        for path, leaf in network.params(at.number).items():
            stack = f"blocks/{at.stack}/{path}"
            if stack not in params:
                params[stack] = np.empty((counts[at.stack], *leaf.shape), dtype)
            params[stack][at.index] = leaf
    check(model, params)
    expected = transformer.abstract(model)
    return model, jax.tree_util.tree_map_with_path(lambda path, _: jnp.asarray(params.pop(path_name(path))), expected)


def with_layers(model: ModelConfig, blocks: tuple[LayerBlock, ...]) -> ModelConfig:
    """`model` with these layers: in its own pattern or segments if they still fit, otherwise in the shortest pattern
    that repeats, or in segments of equal layers. Layers of one name that differ get names of their own."""
    names, options = _named(blocks)
    options = {name: each if name == names[0] else _with_read_norms(each) for name, each in options.items()}
    change = {"depth": len(names), "blocks": options}
    fits = len(names) == model.depth and names == [at.block for at in layers.layers(model)]
    if not fits:
        new = {name: _no_stack(name, options) for name in options}
        names, change["blocks"] = [new[name] for name in names], {new[name]: each for name, each in options.items()}
        change |= _arranged(names)
    try:
        return resolve_model(with_values(model, change))
    except UserError as error:  # the variant with these options does not exist
        raise Refused(f"the result is not a model that this project has: {error}") from error


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


def in_layout(block: BlockConfig, layout: str, **changes) -> BlockConfig:
    """`block` with another layout. It keeps the options that both layouts have, and those of the norms that both have."""
    cls = BLOCKS[layout]
    names = {each.name for each in fields(cls)} & {each.name for each in fields(block)} - {"layout", "norms"}
    norms = cls().norms
    kept = {site.name: getattr(block.norms, site.name) for site in fields(norms) if hasattr(block.norms, site.name)}
    options = {name: getattr(block, name) for name in names} | {"norms": replace(norms, **kept)}
    return cls(layout=layout, **options | changes)
