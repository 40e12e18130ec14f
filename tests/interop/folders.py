"""Helpers for tests of Hugging Face folders."""

import numpy as np
from safetensors import safe_open

from xfresearch.interop.folder import stored_tensors
from xfresearch.models import decoding
from xfresearch.models.sampling import Sampling


def tensors(folder) -> dict[str, np.ndarray]:
    """The tensors of a folder, read by the safetensors library."""
    by_name = {}
    for name, stored in stored_tensors(folder).items():
        with safe_open(stored.file, "np") as file:
            by_name[name] = file.get_tensor(name)
    return by_name


def assert_same_tensors(folder, expected) -> None:
    """Checks that names, dtypes, shapes and bits are equal."""
    result = tensors(folder)
    expected = tensors(expected)
    assert sorted(result) == sorted(expected)
    for name, tensor in expected.items():
        assert result[name].dtype == tensor.dtype and result[name].shape == tensor.shape, name
        assert result[name].tobytes() == tensor.tobytes(), f"{name} differs"


def greedy(lm, prompts_BP: np.ndarray, count: int) -> np.ndarray:
    """`count` tokens of greedy decoding after each prompt."""
    chunks = decoding.generate(lm.config, lm.params, prompts_BP.tolist(), count, Sampling(temperature=0))
    return np.array([sum(chunk, []) for chunk in zip(*chunks, strict=True)])


def choices(lm, tokens_BL: np.ndarray, k: int) -> np.ndarray:
    """The k experts of each token, in ascending order of their logits, for each layer with experts: [layers, B, L, k]."""
    names = [name for name in lm.tap_names() if name.endswith(".feed_forward.router_logits")]
    captured = lm.capture(tokens_BL, names)
    return np.stack([highest(captured[name], k) for name in names])


def highest(logits_BLE, k: int) -> np.ndarray:
    return np.argsort(logits_BLE, -1)[..., -k:]
