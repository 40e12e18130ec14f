"""Converts our parameters to those of PyTorch libraries, and compares the logits of both models on the same tokens.

PyTorch matrices are [outputs, inputs], with heads and head size in one dimension; our kernels are
[inputs..., outputs...].
"""

import jax
import numpy as np

from tests.contracts.passes import forward
from tests.contracts.variants import BASE, in_float64, model, random_params, tokens_for
from tests.tolerances import relative_error

SIZES = {
    **{"width": 32, "depth": 2, "vocab_size": 64, "max_length": 16, "tie_embeddings": False},
    **{"blocks.main.attention.heads": 4, "blocks.main.feed_forward.hidden": 48},
}
HEADS = 4
WIDTH = 32
HIDDEN = 48
DEPTH = 2
LENGTH = 16
MISSING = "{} is not installed: `make parity` installs requirements/parity.txt"


def config_of(changes: dict, dtype: str):
    """A small model with `changes`. Their dotted paths start at the model or, if it has no such field, at its block."""
    paths = {k if hasattr(BASE, k.partition(".")[0]) else f"blocks.main.{k}": v for k, v in changes.items()}
    paths = SIZES | paths
    if changes.get("layout") == "all_attention":  # without a feed-forward layer
        paths = {path: value for path, value in paths.items() if ".feed_forward." not in path}
    config = model(paths)
    return in_float64(config) if dtype == "float64" else config


def difference(config, theirs, state: dict, run) -> float:
    """Relative error of our logits against those of `theirs`, a module whose parameters are `state(config, params)`.

    run: `run(module, tokens_BL)` are its logits.
    Raises AssertionError if the parameter names of `state` and `theirs` differ.
    """
    import torch

    params = random_params(config)
    tokens_BL = tokens_for(config, length=LENGTH)
    arrays = state(config, jax.tree.map(np.asarray, params))
    theirs = theirs.to(getattr(torch, config.dtype)).eval()
    tensors = {name: torch.from_numpy(np.array(array)) for name, array in arrays.items()}
    missing, unexpected = theirs.load_state_dict(tensors, strict=False)
    parameters = {name for name, _ in theirs.named_parameters()}
    assert not unexpected and not parameters & set(missing), (unexpected, missing)
    with torch.no_grad():
        expected = run(theirs, torch.from_numpy(tokens_BL).long())
    actual, _ = forward(config, params, tokens_BL)
    assert str(expected.dtype) == f"torch.{config.dtype}" and actual.dtype == config.dtype
    return relative_error(actual, expected.numpy())


def layers_of(params: dict) -> list[dict]:
    """The parameters of each layer, taken from the stack."""
    stack = params["blocks"]["main"]
    return [jax.tree.map(lambda leaf, i=i: leaf[i], stack) for i in range(DEPTH)]


def matrix(kernel, inputs: int = 1):
    """A kernel whose first `inputs` dimensions are inputs, as a matrix [outputs, inputs]."""
    return kernel.reshape(int(np.prod(kernel.shape[:inputs])), -1).T


def paired(kernel_DHK, fraction: float):
    """A query or key kernel for a library whose RoPE rotates dimension 2i with 2i + 1, where ours rotates i
    with i + k/2."""
    k = int(kernel_DHK.shape[-1] * fraction)
    rotated = kernel_DHK[..., :k]
    rest = kernel_DHK[..., k:]
    pairs = rotated.reshape(*rotated.shape[:-1], 2, k // 2).swapaxes(-1, -2).reshape(rotated.shape)
    return np.concatenate([pairs, rest], -1)
