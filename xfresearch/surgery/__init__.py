"""Exact conversions between variants: each is (lm, layers=None, ...) -> (lm, certificate).

    lm2, certificate = surgery.merge_query_key(lm)

A conversion raises Refused where the result would not compute the same function, and names the term in the way.
docs/surgery.md has a table of them.
"""

from xfresearch.surgery.absorb_value_output import absorb_value_output as absorb_value_output
from xfresearch.surgery.centre import centre as centre
from xfresearch.surgery.converting import convert as convert
from xfresearch.surgery.drop import drop_key as drop_key
from xfresearch.surgery.drop import drop_output as drop_output
from xfresearch.surgery.drop import drop_query as drop_query
from xfresearch.surgery.drop import drop_value as drop_value
from xfresearch.surgery.feed_forward_to_memory import feed_forward_to_memory as feed_forward_to_memory
from xfresearch.surgery.fold_norm import fold_norm as fold_norm
from xfresearch.surgery.fuse_output import fuse_output as fuse_output
from xfresearch.surgery.key_value_groups import expand_groups as expand_groups
from xfresearch.surgery.key_value_groups import pool_groups as pool_groups
from xfresearch.surgery.memory_to_feed_forward import memory_to_feed_forward as memory_to_feed_forward
from xfresearch.surgery.merge_adapter import merge_adapter as merge_adapter
from xfresearch.surgery.query_key import factor_query_key as factor_query_key
from xfresearch.surgery.query_key import merge_query_key as merge_query_key
from xfresearch.surgery.refused import Refused as Refused
from xfresearch.surgery.registry import CONVERSIONS as CONVERSIONS
from xfresearch.surgery.registry import chain as chain
from xfresearch.surgery.sinks import sink_to_slot as sink_to_slot
from xfresearch.surgery.sinks import slot_to_sink as slot_to_sink
from xfresearch.surgery.stacking import stack as stack
from xfresearch.surgery.stacking import unstack as unstack
from xfresearch.surgery.untie import untie as untie
from xfresearch.surgery.upcycle import upcycle as upcycle
from xfresearch.surgery.widen import widen as widen

for _name in sorted(CONVERSIONS):
    CONVERSIONS[_name] = CONVERSIONS.pop(_name)  # in the order of their names
