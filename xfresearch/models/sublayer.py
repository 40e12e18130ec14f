"""The interface of a kind of sublayer: a mixer of positions, or a feed-forward layer.

A kind is a class of options and a module. The options derive from `SublayerConfig`; `resolved` fills in and checks
them. The module derives from `SublayerModule` and is called as fn(x_BLD, ctx, cache) -> (y_BLD, cache, Aux). The rest
of the code uses only the methods here; their defaults suit a kind without the feature. kinds.py has the tables of
kinds.
"""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import jax
from flax import nnx

from xfresearch.models.context import Context
from xfresearch.models.costs import Costs
from xfresearch.models.place import Place, Rows
from xfresearch.models.stream import Carried
from xfresearch.options.fields import changed

F = TypeVar("F", bound=Callable[..., Any])


@dataclass(frozen=True)
class SublayerConfig:
    """Options of one kind of sublayer. They include `kind`."""

    @property
    def kind(self) -> str:
        """The kind, which is an option of every class that derives from this one."""
        raise NotImplementedError

    def resolved(self, place: Place, key: str) -> "SublayerConfig":
        """The options with derived sizes filled in. `key` is their path in the config. Raises UserError if options
        contradict each other or the model's options."""
        return self

    @property
    def random(self) -> bool:
        """Whether the sublayer uses random numbers in training."""
        return False

    @property
    def words(self) -> str:
        """The resolved options in a few words, for people: '4 heads of 32 with RoPE'."""
        return ", ".join([self.kind, *changed(self, "kind")])

    @property
    def norm_kinds(self) -> tuple[str, ...]:
        """Kinds of the norms inside the sublayer. Their other options are those of the block's norm."""
        return ()

    # Capabilities: what code outside of models/ asks a sublayer for (sublayers.py).

    @property
    def memory_parts(self) -> dict[str, "MemoryPart"]:
        """Its memories (SublayerModule.memories) by name, and where their values are: '' is the sublayer itself."""
        return {}

    @property
    def slots(self) -> int:
        """The number of its persistent slots. A sink alone is none."""
        return 0

    @property
    def attends(self) -> bool:
        """Whether it compares queries with the keys of tokens."""
        return False

    @property
    def sinks(self) -> bool:
        """Whether its weights have one more entry, of a sink."""
        return False

    @property
    def without_prefix(self) -> str:
        """Why it cannot have tokens that see later ones, those of a prefix; '' if it can, or if it mixes no tokens."""
        return ""

    @property
    def numbered(self) -> bool:
        """Whether it depends on the number of its layer."""
        return False

    @property
    def mixture(self) -> Any:
        """The options of its mixture of experts (MoeConfig); None without."""
        return None

    # Inner values without a matrix, and biases (linear_terms.py has the matrices).

    @property
    def identities(self) -> dict[str, str]:
        """{inner value without a matrix: the option that decides this}: 'query' and others that are the input or contain it,
        and 'output' if the heads are the output. No linear map can be folded into these."""
        return {}

    @property
    def both_sides(self) -> tuple[str, ...]:
        """Parts whose matrix compares the inputs of two tokens: its first and its last dimension are both inputs."""
        return ()

    @property
    def of_source(self) -> tuple[str, ...]:
        """The inner values that are of a source, the output of another stack, and not of the sublayer's input."""
        return ()

    @property
    def bias_places(self) -> tuple[str, ...]:
        """The parts of linear maps that can have a bias."""
        return ()

    def with_biases(self, parts: set[str]) -> "SublayerConfig":
        """The options with biases on these parts, which are among `bias_places`."""
        return self


def reads(*groups: type) -> Callable[[F], F]:
    """Marks a step (a method) of a module: it reads the options that these classes declare.

    A config inherits options from such classes. `unread` finds those that no step reads, and kinds.py refuses the kind.
    """

    def mark(step: F) -> F:
        setattr(step, "reads", groups)  # noqa: B010 - a function, to which Python lets one add attributes
        return step

    return mark


def unread(options: type[SublayerConfig], module: type) -> list[str]:
    """The options that a config class inherits and that the module does not read, as 'Class.option'.

    A step that replaces an inherited one reads only the classes of its own mark. All steps that read a class have to:
    slots, for example, are in the softmax of one step or in the output of another. The options that `options` declares
    itself belong to its kind, and need no mark.
    """
    marked, replaced = set(), set()
    for name in dir(module):
        marks = [getattr(vars(cls)[name], "reads", ()) for cls in module.__mro__ if name in vars(cls)]
        marked |= {*marks[0]} if marks else set()
        replaced |= {group for mark in marks[1:] for group in mark if group not in marks[0]}
    own = {"kind", *inspect.get_annotations(options)}
    inherited = [cls for cls in options.__mro__[1:] if cls not in marked - replaced]
    return [f"{cls.__name__}.{name}" for cls in inherited for name in inspect.get_annotations(cls) if name not in own]


class SharedTable(NamedTuple):
    """A trained table that all layers share, initially 0 or `drawn` from N(0, 1). Blocks that share it need the same
    shape. If it `grows`, only the number of rows may differ, and the table has the largest."""

    letters: str
    shape: tuple[int, int]
    drawn: bool
    grows: bool


class Traffic(NamedTuple):
    """The numbers per token that devices send in one direction."""

    routed: int = 0  # to the experts of the token, over mesh.expert
    context: int = 0  # keys and values, over mesh.context


class MemoryPart(NamedTuple):
    """Where the values of a memory are among the parameters of its sublayer."""

    path: str  # 'down/kernel', 'experts/down', 'memory/value'
    gain: float = 1.0  # the values are the parameter times this
    heads: int = 0  # of values that heads write: slots in the softmax; 0 for values of the model's width
    through: str = ""  # the path of the matrix W_O [H, V, D] through which heads write; '' if the heads are the output


class Memory(NamedTuple):
    """Keys and values of a feed-forward layer, of experts or of slots.

    keys, values: [F, D] of a feed-forward layer, [E, F, D] of experts, [M, D] of slots of the model's width, [G, M, K]
    of slots in the softmax (in the space of a head's queries and values; G is 1 if all heads share the slots).

    multipliers: vectors u_i of gated kinds, whose coefficients are f(x . k_i + b_i) m(x . u_i + b'_i); like the keys.
    biases, multiplier_biases: b and b' [F], [E, F], [M]; None without. bias: [D], added to the sum of the values, or [E, D]
    to that of each expert; None without. writes: the vector that a coefficient of 1 adds to the sublayer's output. It is the
    value, except for slots in the softmax: each of the H heads writes its values through its part of W_O, [H, M, D]. Without
    W_O, D is the size of all heads together.
    """

    keys: jax.Array
    values: jax.Array
    writes: jax.Array
    multipliers: jax.Array | None = None
    biases: jax.Array | None = None
    multiplier_biases: jax.Array | None = None
    bias: jax.Array | None = None


class SublayerModule(nnx.Module):
    """The module of a kind of sublayer."""

    def __init__(self, place: Place, rngs: Any) -> None:
        raise NotImplementedError

    def init_cache(self, batch: int, length: int) -> dict[str, Any]:
        """An empty cache for `length` tokens of each of `batch` sequences; {} for a sublayer without a cache."""
        return {}

    def source_cache(self, ctx: Context) -> dict[str, Any]:
        """The part of the cache that is computed once from the source of `ctx`; {} for a sublayer that does not read it."""
        return {}

    def memories(self, dtype: Any) -> dict[str, Memory]:
        """The memories of a single layer, {part: memory}. The part '' is the sublayer itself."""
        return {}

    @staticmethod
    def costs(place: Place, length: int) -> Costs:
        """Costs for sequences of `length` tokens."""
        raise NotImplementedError

    @staticmethod
    def output_width(place: Place) -> int:
        """The width of the sublayer's output."""
        return place.width

    @staticmethod
    def shared_tables(place: Place) -> dict[str, SharedTable]:
        """Tables that all layers share, by name."""
        return {}

    @staticmethod
    def carried(place: Place) -> dict[str, Carried]:
        """Values that travel from layer to layer, by name. The module reads them in ctx.carried, and returns new ones in
        Aux.carried."""
        return {}

    @staticmethod
    def longest_input(place: Place) -> int:
        """The longest sequence that its tables of positions, or the capacity of its experts, support; 0 without."""
        return 0

    @staticmethod
    def traffic(place: Place) -> Traffic:
        return Traffic()

    @staticmethod
    def kernel(place: Place, length: int, rows: Rows, execution: Any, mesh: Any) -> Any:
        """The kernels.choice.KernelChoice for training on sequences of `length` tokens; None if there is only one
        implementation. Raises UserError if the requested one does not support the sublayer."""
        return None

    @staticmethod
    def after_update(
        params: dict[str, Any], options: SublayerConfig, statistics: dict[str, Any]
    ) -> dict[str, Any]:
        """The sublayer's stacked parameters after an update. `statistics` are those of its forward pass."""
        return params
