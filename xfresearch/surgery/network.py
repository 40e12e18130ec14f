"""A model as a list of layers, for surgery: every layer has its own block and its own parameters.

A conversion maps a Network to a Network. The parameters of a layer are computed when somebody asks for them, so that a
large model is converted layer by layer. Arrays are NumPy arrays in float64; {path: array} maps 'attention/query/kernel'
to the parameter of one layer.

The encoder of a model with two stacks is a second network. It always has a table of tokens: the decoder's, as long as no
conversion changes one of the two. Its `end` holds the linear map by which conversions have changed its output.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cache, cached_property
from typing import Any, Generic, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from xfresearch.models import layers, transformer
from xfresearch.models.block import abstract_block
from xfresearch.models.block_config import BLOCKS, BlockConfig
from xfresearch.models.encoder import NAME, options_of_stack
from xfresearch.models.layouts import LAYOUTS
from xfresearch.models.linear_terms import LinearTerm, linear_terms
from xfresearch.models.model_config import ModelConfig
from xfresearch.models.norms import NormSpec
from xfresearch.models.sublayer import SublayerConfig
from xfresearch.models.token_stack import TokenStackConfig
from xfresearch.options.fields import with_values
from xfresearch.runtime.errors import UserError
from xfresearch.runtime.trees import by_path, path_name
from xfresearch.sharding.letters import Axes
from xfresearch.surgery.layer_blocks import LayerBlock, with_layers
from xfresearch.surgery.refused import refuse_unless

O = TypeVar("O", bound=SublayerConfig)
Params = dict[str, np.ndarray]  # {path: array} of one layer, of one sublayer, or of what is outside the blocks
ROLE_WORDS = {"mixer": "mixer", "cross": "cross-attention", "feed_forward": "feed-forward layer"}  # in messages
ATTENDING = ("mixer", "cross")  # roles of sublayers that read other tokens
TABLE = "embed/table"


class Target(NamedTuple, Generic[O]):
    """A sublayer of one layer: where it is, and its options, of the class O."""

    number: int  # of the layer
    index: int  # type: ignore[assignment]  # among the sublayers of its role in the layer
    name: str
    role: str
    options: O
    where: str  # for messages: the layer, and the sublayer's name if it is not the only one of its kind there
    width: int  # D of its input
    read_width: int  # of the input of its keys and values: D, or W of a source
    stack: str  # '' for the stack that makes the logits, or 'encoder'

    def random(self, seed: int) -> np.random.Generator:
        """Random numbers of this sublayer alone."""
        other = f"{self.stack}.{self.role}" if self.stack or self.role == "cross" else ""
        return np.random.default_rng((seed, self.number, self.index, *other.encode()))


class End(NamedTuple):
    """A map of a stack's output y: its readers read y M + b."""

    matrix_ED: np.ndarray
    bias_D: np.ndarray


@dataclass(frozen=True)
class Network:
    # Options outside the blocks, of a model or of its encoder; blocks, pattern and segments are those before surgery.
    model: Any
    outside: Params  # embed, position, norms, head, shared tables
    layers: tuple[LayerBlock, ...]
    params: Callable[[int], Params]  # of a layer
    figures: dict[str, float] = field(default_factory=dict)  # for the certificate, such as condition numbers
    undropped: frozenset[str] = frozenset()  # whose dropout was set to 0, in words
    encoder: "Network | None" = None
    end: End | None = None  # of an encoder, until cross-attention reads it so (source_readers.py)

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

    def targets(self, roles: tuple[str, ...], chosen: Iterable[int]) -> list[Target]:
        """The sublayers of these roles in the `chosen` layers. Raises Refused for a layer without one."""
        targets = []
        read = self.encoder.model.width if self.encoder else 0
        for number in chosen:
            block = self.layers[number].block
            branches = [each for each in LAYOUTS[block.layout].branches if each.role in roles]
            refuse_unless(bool(branches), f"layer {number}: layout={block.layout!r} has no {ROLE_WORDS[roles[0]]}")
            for name, role in ((each.name, each.role) for each in branches):
                of_role = names_of(block, role)
                alone = len(of_role) == 1 and not (role in ATTENDING and names_of(block, "cross"))
                where = f"layer {number}" + ("" if alone else f", {name}")
                widths = self.model.width, read if role == "cross" else self.model.width
                at = number, of_role.index(name), name, role
                targets.append(Target(*at, getattr(block, name), where, *widths, self.stack))
        return targets

    def again(self, targets: Iterable[Target]) -> list[Target]:
        """The same sublayers with their options in this network."""
        return [each._replace(options=getattr(self.layers[each.number].block, each.name)) for each in targets]

    def only(self, role: str, number: int) -> Target:
        """The sublayer of this role in a layer. Raises Refused if there is none, or more than one."""
        targets = self.targets((role,), [number])
        where = f"layer {number}: {', '.join(each.name for each in targets)}"
        refuse_unless(len(targets) == 1, f"{where}: this conversion is for one {ROLE_WORDS[role]} in a layer")
        return targets[0]

    def inside(self, target: Target) -> Params:
        """The parameters of a sublayer."""
        return inside(self.params(target.number), target.name)

    def change_each(
        self,
        targets: Iterable[Target[O]],
        options: Callable[[Target[O]], SublayerConfig],
        params: Callable[[Target[O], Params], Params],
    ) -> "Network":
        """The network with options(target) and params(target, old parameters) for each of these sublayers."""
        of_layer: dict[int, list[Target[O]]] = {}
        for target in targets:
            of_layer.setdefault(target.number, []).append(target)

        def block(number: int, old: BlockConfig) -> BlockConfig:
            return with_values(old, {each.name: options(each) for each in of_layer.get(number, ())})

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

    @property
    def stack(self) -> str:
        """'encoder', or '' for the stack that makes the logits."""
        return "" if isinstance(self.model, ModelConfig) else NAME

    @cached_property
    def resolved(self) -> Any:
        """The config of the whole network. Raises Refused if there is no such model."""
        if self.encoder is None:
            return with_layers(self.model, self.layers)
        embedding = "shared" if self.shares_table else "own"
        encoder = with_values(options_of_stack(self.encoder.resolved), {"embedding": embedding})
        return with_layers(replace(self.model, stacks={NAME: encoder}), self.layers)

    @property
    def shares_table(self) -> bool:
        """Whether the encoder's table of tokens is the decoder's."""
        if self.encoder is None or self.encoder.model.embedding == "own":
            return False
        ours, theirs = self.outside[TABLE], self.encoder.outside[TABLE]
        return ours is theirs or np.array_equal(ours, theirs)

    def fresh(self) -> "Network":
        """The network without the figures and dropouts that earlier conversions have recorded."""
        encoder = self.encoder and self.encoder.fresh()
        return replace(self, figures={}, undropped=frozenset(), encoder=encoder)

    @property
    def told(self) -> tuple[dict[str, float], frozenset[str]]:
        """The figures, and the values that lost their dropout, of all stacks. A layer's figures exist once its parameters
        do."""
        figures = {f"encoder, {name}": each for name, each in self.encoder.figures.items()} if self.encoder else {}
        return figures | self.figures, self.undropped | (self.encoder.undropped if self.encoder else frozenset())

    @property
    def stacks(self) -> list["Network"]:
        """The encoder, if there is one, and this network."""
        return [self.encoder, self] if self.encoder else [self]

    def axes(self, number: int) -> dict[str, Axes]:
        """The letters of the parameters of a layer, by path."""
        model = self.resolved
        _, state = split_block(model, layers.layers(model)[number].block)
        return {"/".join(map(str, path)): each.axes for path, each in nnx.to_flat_state(state)}

    def terms(self, number: int, *sublayers: str) -> list[LinearTerm]:
        """The linear terms of sublayers of a layer, with the paths of the layer's parameters."""
        axes, block = self.axes(number), self.layers[number].block
        return [
            term.inside(name) for name in sublayers for term in linear_terms(getattr(block, name), inside(axes, name))
        ]

    def norm(self, kind: str) -> NormSpec:
        """A norm outside the blocks: it has the norm options of the first block."""
        return self.layers[0].block.norm_spec(kind)


def split_block(model: TokenStackConfig, name: str) -> Any:
    """The graph and the abstract state of a block of a model or of its encoder."""
    return _split(model, name, jax.config.jax_enable_x64)  # type: ignore[attr-defined]  # JAX adds its settings later


@cache
def _split(model: TokenStackConfig, name: str, x64: bool) -> Any:
    return nnx.split(abstract_block(model, name))


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
    check(model, by_path(params))
    network = _taken_apart(model, params)
    if model.encoder is None:
        return network
    encoder = _taken_apart(model.encoder, params[NAME])
    encoder.outside.setdefault(TABLE, network.outside[TABLE])
    return replace(network, encoder=encoder)


def _taken_apart(model: Any, params: dict) -> Network:
    """The network of one stack."""
    places = layers.layers(model)

    def of(number: int) -> Params:
        at = places[number]
        stack = by_path(params["blocks"][at.stack])
        return {path: np.asarray(leaf[at.index], np.float64) for path, leaf in stack.items()}

    outside = {name: tree for name, tree in params.items() if name not in ("blocks", NAME)}
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


def outside_of(network: Network) -> Params:
    """The parameters outside of the blocks of both stacks, with the paths that they have in a model."""
    if network.encoder is None:
        return network.outside
    shared = {TABLE} if network.shares_table else set()
    own = {f"{NAME}/{path}": leaf for path, leaf in network.encoder.outside.items() if path not in shared}
    return network.outside | own


def assemble(network: Network, dtype: str) -> tuple[ModelConfig, dict]:
    """The resolved config of a network, and its parameters in `dtype`. A stack is filled layer by layer, so the memory
    is that of the result, of one layer in float64 and of the largest stack."""
    model = network.resolved
    params: Params = {path: leaf.astype(dtype) for path, leaf in outside_of(network).items()}
    for each in network.stacks:
        prefix = f"{each.stack}/" if each.stack else ""
        counts = {place.name: place.repeats for place in layers.stacks(each.resolved)}
        for at in layers.layers(each.resolved):
            for path, leaf in each.params(at.number).items():
                stack = f"{prefix}blocks/{at.stack}/{path}"
                if stack not in params:
                    params[stack] = np.empty((counts[at.stack], *leaf.shape), dtype)
                params[stack][at.index] = leaf
    check(model, params)
    expected = transformer.abstract(model)
    return model, jax.tree_util.tree_map_with_path(lambda path, _: jnp.asarray(params.pop(path_name(path))), expected)


def in_layout(block: BlockConfig, layout: str, **changes) -> BlockConfig:
    """`block` with another layout. It keeps the options that both layouts have, and those of the norms that both have."""
    cls = BLOCKS[layout]
    names = {each.name for each in fields(cls)} & {each.name for each in fields(block)} - {"layout", "norms"}
    norms = cls().norms
    kept = {site.name: getattr(block.norms, site.name) for site in fields(norms) if hasattr(block.norms, site.name)}
    options = {name: getattr(block, name) for name in names} | {"norms": replace(norms, **kept)}
    return cls(layout=layout, **options | changes)
