"""What tests of Hugging Face folders share."""

import numpy as np
from safetensors import safe_open

from xfresearch.interop.folder import stored_tensors
from xfresearch.models import decoding


def tensors(folder) -> dict[str, np.ndarray]:
    """As the format's own library reads them."""
    found = {}
    for name, stored in stored_tensors(folder).items():
        with safe_open(stored.file, "np") as file:
            found[name] = file.get_tensor(name)
    return found


def assert_same_tensors(folder, expected) -> None:
    """The same names, dtypes and bits."""
    found, expected = tensors(folder), tensors(expected)
    assert sorted(found) == sorted(expected)
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype and found[name].shape == tensor.shape, name
        assert found[name].tobytes() == tensor.tobytes(), f"{name} has other bits"


def greedy(lm, prompts_BP: np.ndarray, count: int) -> np.ndarray:
    """The `count` likeliest tokens after each prompt, one by one."""
    chunks = decoding.generate(lm.config, lm.params, prompts_BP.tolist(), count, decoding.Sampling(temperature=0))
    return np.array([sum(chunk, []) for chunk in zip(*chunks, strict=True)])


def choices(lm, tokens_BL: np.ndarray, k: int) -> np.ndarray:
    """The k experts of each token, from the least to the most liked: [layers, B, L, k]."""
    names = [f"blocks.{layer}.feed_forward.router_logits" for layer in range(lm.config.depth)]
    captured = lm.capture(tokens_BL, names)
    return np.stack([highest(captured[name], k) for name in names])


def highest(logits_BLE, k: int) -> np.ndarray:
    return np.argsort(logits_BLE, -1)[..., -k:]
