"""What the backward pass computes again instead of keeping it, whatever `training.remat` is."""

import jax


def recomputed(function, *arguments):
    """function(*arguments), for a function without matrix products: the backward pass keeps the arguments alone and
    computes all values between them and the result again.

    By default JAX keeps each of them that a derivative needs: six arrays of GELU (tanh) and three of LayerNorm, in float32.
    Scanned layers write all into stacks and read them again, which takes longer than to compute them. The result is kept
    if the next operation needs it. `prevent_cse` is for unrolled layers, for which the compiler chooses better itself.
    """
    return jax.checkpoint(function, prevent_cse=False)(*arguments)
