"""The simplified parallel block of He & Hofmann 2023 without a norm anywhere: no skip, W_V, W_O or normalisation.

configs/normless.py         18 layers of width 768, the paper's size
configs/normless.py:3m      about 3 M parameters on WikiText-2
configs/normless.py:tiny    trains in seconds on a CPU
"""

from configs import simplified


def get_config(size: str = "full"):
    config = simplified.get_config(size)
    model = config.model
    model.final_norm = model.blocks.main.norm = model.blocks.first.norm = "none"
    return config
