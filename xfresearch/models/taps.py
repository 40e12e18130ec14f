"""Taps: named values inside the model that a pass can record or change.

The name of a tap is `blocks.<layer>.<site>`, such as blocks.3.feed_forward.hidden, or `embed` or `final`. Names of an
encoder's taps begin with `encoder.`, and names of its stacks with `encoder/`. Layers that share a scan share its compiled
body: there a tap is a site, and the layer is a number. Recorded values leave the scan as outputs with the layers in front.
Changes are data too: a `Patch` has a function, arrays that are its arguments, and the layer that it is for. One compiled
program therefore serves all layers, and jax.vmap over patches runs many of them at a time.
"""

from collections.abc import Callable, Collection, Container, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from xfresearch.models import layers
from xfresearch.runtime.errors import UserError

OUTSIDE = ""  # instead of the name of a stack: values outside of the blocks
ENCODER = "encoder"


@partial(jax.tree_util.register_dataclass, data_fields=["arguments", "where", "active"], meta_fields=["function"])
@dataclass(frozen=True)
class Patch:
    """A change of the value x of a tap: to function(x, *arguments), of the shape of x, where `where` is true.

    function: pure. Passes with equal functions, and arguments and masks of equal shapes, share a compiled program.
    arguments: arrays, or trees of arrays. By default the function is `put`, whose one argument is the new value.
    where: booleans of the shape of x or of its first dimensions, each of which may be 1; None for everywhere.
    """

    function: Callable[..., Any] = field(default_factory=lambda: put)
    arguments: tuple[Any, ...] = ()
    where: Any = None
    active: Any = True  # whether it is for this layer: a boolean, traced where layers share a compiled body

    def apply(self, site: str, x: jax.Array) -> jax.Array:
        """The new value of the tap `site`. Raises UserError if the function returns another shape."""
        if isinstance(self.active, jax.core.Tracer):
            changed: jax.Array = jax.lax.cond(self.active, partial(self._changed, site), lambda x: x, x)
            return changed
        return self._changed(site, x) if self.active else x

    def _changed(self, site: str, x: jax.Array) -> jax.Array:
        returned = self.function(x, *self.arguments)
        if getattr(returned, "shape", None) != x.shape:
            raise UserError(f"replace[{site!r}] returned shape {getattr(returned, 'shape', None)}: it must be {x.shape}")
        new: jax.Array = returned.astype(x.dtype)
        if self.where is None:
            return new
        where = jnp.asarray(self.where, bool)
        if any(size not in (1, of_x) for size, of_x in zip(where.shape, x.shape, strict=False)) or where.ndim > x.ndim:
            allowed = f"{x.shape} or the first of these sizes, each of which may be 1"
            raise UserError(f"replace[{site!r}] has a mask of shape {where.shape}: it must be {allowed}")
        return jnp.where(where.reshape(where.shape + (1,) * (x.ndim - where.ndim)), new, x)


def put(x: jax.Array, value: Any) -> jax.Array:
    """`value`, in the shape of x if it can be broadcast to it. The default function of a Patch."""
    fits = value.ndim <= x.ndim and all(a in (1, b) for a, b in zip(value.shape[::-1], x.shape[::-1], strict=False))
    return jnp.broadcast_to(value, x.shape) if fits else value


class Taps:
    """Records and changes the values of one layer, or those outside of the blocks. It is made and read in one trace.

    record: sites. patches: {site: patches, applied in order}. summary: as in Request. values: {site: recorded value}, in the
    order of computation. sites: the names of the values that `leaving` has returned, in this order.
    """

    def __init__(
        self,
        record: Container[str] = (),
        patches: Mapping[str, Any] | None = None,
        summary: Callable[..., Any] | None = None,
    ):
        self.record = record
        self.patches = patches or {}
        self.summary = summary
        self.values: dict[str, Any] = {}
        self.sites: list[str] = []

    def wants(self, site: str) -> bool:
        """Whether the value of the site is recorded or changed. If not, the layer need not compute it."""
        return site in self.record or site in self.patches

    def __call__(self, site: str, value: jax.Array) -> jax.Array:
        for patch in self.patches.get(site, ()):
            value = patch.apply(site, value)
        if site in self.record:
            self.values[site] = value
        return value

    def leaving(self) -> dict[str, Any]:
        """The recorded values of the layer, or their summary."""
        values = self.summary(self.values) if self.summary else self.values
        self.sites = list(values)
        return values


@partial(jax.tree_util.register_dataclass, data_fields=["patch", "slots_R"], meta_fields=[])
@dataclass(frozen=True)
class Stacked:
    """The patches of a site in the R layers of a stack: one function, P sets of arguments and masks.

    patch: its arguments and its mask have the dimension P in front. slots_R: the set of each layer, -1 for none.
    """

    patch: Patch
    slots_R: Any

    def at(self, index: Any) -> Patch:
        """The patch of layer `index` of the stack, which may be traced."""
        slot = jnp.asarray(self.slots_R)[index]
        data = (self.patch.arguments, self.patch.where)
        arguments, where = jax.tree.map(lambda leaf: leaf[jnp.maximum(slot, 0)], data)
        return Patch(self.patch.function, arguments, where, slot >= 0)


@partial(jax.tree_util.register_dataclass, data_fields=["patches"], meta_fields=["record", "summary"])
@dataclass(frozen=True)
class Request:
    """The values that a pass records and changes.

    record: (stack, site) pairs, or EVERYTHING. patches: {stack: {site: patches}}, `Stacked` ones; outside of the blocks,
    where the name of the stack is OUTSIDE, plain ones.
    summary: a function of the recorded values of a layer, {site: value}. Its results, {name: value}, leave the layer
    instead of the values, so that no more than one layer's values are in memory.
    """

    record: Container[tuple[str, str]] = frozenset()
    patches: dict[str, Any] = field(default_factory=dict)
    summary: Callable[[dict[str, Any]], dict[str, Any]] | None = None

    def outside(self) -> Taps:
        """The taps outside of the blocks."""
        return Taps(self._sites(OUTSIDE), self.patches.get(OUTSIDE))

    def within(self, name: str) -> "Request":
        """The part of the request that is for the stacks inside of `name`, by their names there."""
        inside = f"{name}/"
        patches = {stack.removeprefix(inside): each for stack, each in self.patches.items() if stack.startswith(inside)}
        record: Any = self.record
        if record is not EVERYTHING:
            record = frozenset((stack.removeprefix(inside), site) for stack, site in record if stack.startswith(inside))
        return replace(self, record=record, patches=patches)

    def layer(self, stack: str, index: Any) -> Taps:
        """The taps of layer `index` of a stack."""
        patches = self.patches.get(stack, {})
        of_layer = {site: [each.at(index) for each in stacked] for site, stacked in patches.items()}
        return Taps(self._sites(stack), of_layer, self.summary)

    def _sites(self, stack: str) -> Container[str]:
        record: Any = self.record  # EVERYTHING, or a set of pairs
        return EVERYTHING if record is EVERYTHING else {site for name, site in record if name == stack}


class _Everything:
    """Contains every name."""

    def __contains__(self, name: object) -> bool:
        return True


EVERYTHING = _Everything()
NO_TAPS = Request()


def of_encoder(name: str) -> bool:
    """Whether a tap, a sublayer or a parameter with this name is the encoder's."""
    return name.startswith(f"{ENCODER}.")


def in_stack(name: str) -> str:
    """The name in its stack: 'blocks.3.attention.out' of 'encoder.blocks.3.attention.out'."""
    return name.removeprefix(f"{ENCODER}.")


def address(model: Any, name: str) -> tuple[str, int, str]:
    """(stack, index in the stack, site) of the tap `name`. The index is 0 outside of the blocks."""
    if of_encoder(name):
        stack, index, site = address(model.encoder, in_stack(name))
        return f"{ENCODER}/{stack}", index, site
    if not name.startswith("blocks."):
        return OUTSIDE, 0, name
    _, number, site = name.split(".", 2)
    at = layers.layer(model, int(number))
    return at.stack, at.index, site


def outside_of_blocks(stack: str) -> bool:
    """Whether `stack` is no stack, but stands for the values outside of the blocks of the decoder or the encoder."""
    return stack in (OUTSIDE, f"{ENCODER}/")


def request(model: Any, record: Collection[str] = (), patches: Mapping[str, Patch] | None = None) -> Request:
    """The Request to record the taps `record` and to change those in `patches`, {name: patch}.

    Patches of a site with the same function, and with arguments and masks of the same shapes, are stacked, so that a
    program does not depend on the layers that they are for."""
    sites = frozenset((stack, site) for stack, _, site in (address(model, name) for name in record))
    groups: dict[tuple[Any, ...], dict[int, Patch]] = {}
    for name, patch in (patches or {}).items():
        stack, index, site = address(model, name)
        groups.setdefault((stack, site, _form(patch)), {})[index] = patch
    repeats = {place.name: place.repeats for place in layers.stacks(model)}
    if getattr(model, ENCODER, None):
        repeats |= {f"{ENCODER}/{place.name}": place.repeats for place in layers.stacks(model.encoder)}
    stacked: dict[str, dict[str, tuple[Any, ...]]] = {}
    for (stack, site, _), members in groups.items():
        new = members[0] if outside_of_blocks(stack) else _stacked(members, repeats[stack])
        of_stack = stacked.setdefault(stack, {})
        of_stack[site] = (*of_stack.get(site, ()), new)
    return Request(sites, stacked)


def _form(patch: Patch) -> tuple[Any, ...]:
    """Patches with equal forms are stacked: their function, and the structure and the shapes of their arrays."""
    leaves, structure = jax.tree.flatten((patch.arguments, patch.where))
    return patch.function, structure, tuple((jnp.shape(leaf), jnp.result_type(leaf)) for leaf in leaves)


def _stacked(members: dict[int, Patch], repeats: int) -> Stacked:
    data = layers.stack([(patch.arguments, patch.where) for patch in members.values()])
    slot_of = {index: slot for slot, index in enumerate(members)}
    slots_R = np.array([slot_of.get(index, -1) for index in range(repeats)], np.int32)
    first = next(iter(members.values()))
    return Stacked(replace(first, arguments=data[0], where=data[1]), slots_R)


def captured(model: Any, captures: dict[str, Any], names: Collection[str]) -> dict[str, Any]:
    """{name: value} of the taps `names`, from the `captures` of a pass, {stack: {site: [R, ...]}}."""
    values = {}
    for name in names:
        stack, index, site = address(model, name)
        value = captures[stack][site]
        values[name] = value if outside_of_blocks(stack) else value[index]
    return values
