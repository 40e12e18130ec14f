"""The simplified parallel block of He & Hofmann 2023 without norms in the blocks: no skip, W_V, W_O or normalisation.

configs/normless.py         18 layers of width 768, the paper's size
configs/normless.py:3m      about 3 M parameters on WikiText-2
configs/normless.py:tiny    trains in seconds on a CPU

Two LayerNorms are left, as in the authors' code: in the first layer, which makes the stream as large as attention expects,
and before the head.
"""

from configs import simplified


def get_config(size: str = "full"):
    config = simplified.get_config(size)
    blocks = config.model.blocks
    blocks.main.norm = "none"
    blocks.first.norm, blocks.first.norm_bias = "layer", True
    return config
