"""Values that the backward pass computes again instead of keeping them, whatever `training.remat` is."""

import jax


def recomputed(function, *arguments):
    """function(*arguments), for a function without matrix products: the backward pass keeps only the arguments, and computes
    the intermediate values again.

    By default JAX keeps all intermediate values that a derivative needs: six arrays of GELU (tanh) and three of LayerNorm,
    in float32. Scanned layers would write them into stacks and read them again, which takes longer than computing them. The
    result is kept if the next operation needs it. prevent_cse=True would only matter for unrolled layers, and there the
    compiler chooses better itself which values to keep.
    """
    return jax.checkpoint(function, prevent_cse=False)(*arguments)
