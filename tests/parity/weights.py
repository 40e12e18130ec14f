"""Our parameters as PyTorch libraries keep them, and the logits of both models on the same tokens.

PyTorch's matrices are [outputs, inputs], with heads and their size one dimension; our kernels are [inputs..., outputs...].
"""

import jax
import numpy as np

from tests.contracts.variants import BASE, forward, in_float64, model, random_params, tokens_for
from tests.tolerances import relative_error

SIZES = {
    **{"width": 32, "depth": 2, "vocab_size": 64, "max_length": 16, "tie_embeddings": False},
    **{"blocks.main.attention.heads": 4, "blocks.main.feed_forward.hidden": 48},
}
HEADS, SIZE, WIDTH, HIDDEN, DEPTH, LENGTH = 4, 8, 32, 48, 2, 16
MISSING = "{} is not installed: requirements-parity.txt has what `make parity` compares with"


def config_of(changes: dict, dtype: str):
    """A small model with `changes`, dotted paths from the model, or from its block where the model has no such field."""
    paths = {k if hasattr(BASE, k.partition(".")[0]) else f"blocks.main.{k}": v for k, v in changes.items()}
    config = model(SIZES | paths)
    return in_float64(config) if dtype == "float64" else config


def difference(config, theirs, state: dict, run) -> float:
    """Relative error of our logits against those of `theirs`, a module whose parameters all come from `state(params)`.

    `run(module, tokens_BL)` is its logits. AssertionError where `state` names a parameter that `theirs` lacks, or the
    other way round.
    """
    import torch

    params, tokens_BL = random_params(config), tokens_for(config, length=LENGTH)
    arrays = state(config, jax.tree.map(np.asarray, params))
    theirs = theirs.to(getattr(torch, config.dtype)).eval()
    tensors = {name: torch.from_numpy(np.array(array)) for name, array in arrays.items()}
    missing, unexpected = theirs.load_state_dict(tensors, strict=False)
    parameters = {name for name, _ in theirs.named_parameters()}
    assert not unexpected and not parameters & set(missing), (unexpected, missing)
    with torch.no_grad():
        expected = run(theirs, torch.from_numpy(tokens_BL).long())
    found, _ = forward(config, params, tokens_BL)
    assert str(expected.dtype) == f"torch.{config.dtype}" and found.dtype == config.dtype
    return relative_error(found, expected.numpy())


def layers_of(params: dict) -> list[dict]:
    """The parameters of each layer, without the stack."""
    stack = params["blocks"]["main"]
    return [jax.tree.map(lambda leaf, i=i: leaf[i], stack) for i in range(DEPTH)]


def matrix(kernel, inputs: int = 1):
    """A kernel whose first `inputs` dimensions are read, as [outputs, inputs]."""
    return kernel.reshape(int(np.prod(kernel.shape[:inputs])), -1).T


def paired(kernel_DHK, fraction: float):
    """Queries' or keys' kernel for a library that rotates dimension 2i with 2i + 1, where we rotate i with i + k/2."""
    k = int(kernel_DHK.shape[-1] * fraction)
    turned, rest = kernel_DHK[..., :k], kernel_DHK[..., k:]
    pairs = turned.reshape(*turned.shape[:-1], 2, k // 2).swapaxes(-1, -2).reshape(turned.shape)
    return np.concatenate([pairs, rest], -1)
