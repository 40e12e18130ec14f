"""The table of conversions, and chains of them."""

from typing import Any

from xfresearch.runtime.errors import UserError, nearest
from xfresearch.surgery.absorb_value_output import ABSORB_VALUE_OUTPUT
from xfresearch.surgery.centre import CENTRE
from xfresearch.surgery.conversion import Conversion, Where
from xfresearch.surgery.converting import Step
from xfresearch.surgery.drop import DROP_KEY, DROP_OUTPUT, DROP_QUERY, DROP_VALUE
from xfresearch.surgery.feed_forward_to_memory import FEED_FORWARD_TO_MEMORY
from xfresearch.surgery.fold_norm import FOLD_NORM
from xfresearch.surgery.fuse_output import FUSE_OUTPUT
from xfresearch.surgery.key_value_groups import EXPAND_GROUPS, POOL_GROUPS
from xfresearch.surgery.memory_to_feed_forward import MEMORY_TO_FEED_FORWARD
from xfresearch.surgery.query_key import FACTOR_QUERY_KEY, MERGE_QUERY_KEY
from xfresearch.surgery.sinks import SINK_TO_SLOT, SLOT_TO_SINK
from xfresearch.surgery.stacking import STACK, UNSTACK
from xfresearch.surgery.untie import UNTIE
from xfresearch.surgery.upcycle import UPCYCLE
from xfresearch.surgery.widen import WIDEN

CONVERSIONS: dict[str, Conversion] = {
    each.name: each
    for each in (
        ABSORB_VALUE_OUTPUT,
        CENTRE,
        DROP_KEY,
        DROP_OUTPUT,
        DROP_QUERY,
        DROP_VALUE,
        EXPAND_GROUPS,
        FACTOR_QUERY_KEY,
        FEED_FORWARD_TO_MEMORY,
        FOLD_NORM,
        FUSE_OUTPUT,
        MEMORY_TO_FEED_FORWARD,
        MERGE_QUERY_KEY,
        POOL_GROUPS,
        SINK_TO_SLOT,
        SLOT_TO_SINK,
        STACK,
        UNSTACK,
        UNTIE,
        UPCYCLE,
        WIDEN,
    )
}


def chain(
    names: str,
    layers: tuple[int, ...] | None = None,
    options: dict[str, Any] | None = None,
    stack: str = "",
    role: str = "",
) -> list[Step]:
    """The steps of 'fold_norm,centre', in these layers, of this stack and role. Each takes those of the `options` that it
    has. Raises UserError for a name that is no conversion, and for an option that none of them has."""
    steps = []
    left = dict(options or {})
    for name in names.split(","):
        if name not in CONVERSIONS:
            raise UserError(f"{name} is not a conversion{nearest(name, CONVERSIONS)} (convert --list shows them)")
        conversion = CONVERSIONS[name]
        own = {key: value for key, value in (options or {}).items() if key in conversion.options}
        left = {key: value for key, value in left.items() if key not in own}
        steps.append(Step(conversion, Where(layers, stack, role), own))
    for key in left:
        raise UserError(f"{key}={left[key]!r} is not allowed: {names} has no such option")
    return steps
