"""The tables whose names are values of options. Each entry has its formula and paper, and everything that is said of it
elsewhere is made of them: docs/models.md, configs/variants.py and what python -m xfresearch.configs show prints."""

from collections.abc import Mapping
from typing import Any

from xfresearch.models.kinds import CROSS, FEED_FORWARDS, MIXERS
from xfresearch.models.layouts import LAYOUTS
from xfresearch.models.norms import NORMS
from xfresearch.models.positions import AT_EMBEDDING, IN_ATTENTION

TABLES: dict[str, Mapping[str, Any]] = {
    "layout": LAYOUTS,
    "norm": NORMS,
    "position": AT_EMBEDDING,
    "attention.kind": MIXERS,
    "attention.position": IN_ATTENTION,
    "cross_attention.kind": CROSS,
    "feed_forward.kind": FEED_FORWARDS,
}
