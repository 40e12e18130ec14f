"""The simplified parallel block without norms (He & Hofmann 2023): no skips, W_V, W_O or norms in the blocks.

normless         18 layers of width 768, the paper's size
normless:3m      about 3 M parameters on WikiText-2
normless:tiny    runs in less than a minute on two cores

As in the authors' code, two LayerNorms remain: one before the head, and one in the first layer, which scales the
residual stream to the size that attention expects.
"""

from xfresearch.configs import simplified


def get_config(size: str = "full"):
    config = simplified.get_config(size)
    blocks = config.model.blocks
    blocks.main.norm = "none"
    blocks.first.norm, blocks.first.norm_bias = "layer", True
    return config
