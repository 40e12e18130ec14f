"""The configs that `python -m xfresearch.bench gpu` compares attention with biases to: configs/variants.py with RoPE.

:rope        one stream of tokens
:documents   packed documents, which do not see each other
"""

from xfresearch.runtime.errors import UserError

NAMES = ("rope", "documents")


def get_config(name: str = "rope"):
    from configs import variants

    if name not in NAMES:
        raise UserError(f"there is no config {name!r} (allowed: {', '.join(NAMES)})")
    config = variants.get_config()
    config.model.position, config.model.blocks.main.attention.position = "none", "rope"
    config.data.packing = "documents" if name == "documents" else "stream"
    return config
