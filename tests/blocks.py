"""Makes blocks for tests from plain mappings."""

from xfresearch.models.block_config import BLOCKS, BlockConfig
from xfresearch.options.reading import from_dict


def block(layout: str = "pre_norm", **options) -> BlockConfig:
    """The options of a block. The options of its sublayers are mappings, for example attention={"heads": 2}."""
    return from_dict(BLOCKS[layout], {"layout": layout, **options}, "block")
