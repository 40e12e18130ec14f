"""The state of a long analysis in one file, so that a run after an interruption goes on from it."""

import hashlib
import time

import jax
import jax.numpy as jnp
import numpy as np
from etils import epath

from xfresearch.runtime.arrays import read_arrays, write_arrays
from xfresearch.runtime.errors import UserError

EVERY = 60.0  # seconds


class Unfinished:
    """The file `path` ('' for none), which is written at most once a minute. `of` is all that the state depends on: the
    model, text, arrays. The state of anything else is ignored."""

    def __init__(self, path, *of):
        self.path = epath.Path(path) if str(path) else None
        self.signature = np.frombuffer(_digest(of) if self.path else b"", np.uint8)
        self.written = time.monotonic()

    def load(self) -> dict[str, np.ndarray]:
        """The arrays of the last `save`; {} if there is none."""
        if self.path is None or not self.path.exists():
            return {}
        try:
            arrays = read_arrays(self.path)
        except UserError:
            return {}
        signature = arrays.pop("signature", None)
        return arrays if signature is not None and np.array_equal(signature, self.signature) else {}

    def save(self, arrays: dict, ended: bool = False) -> None:
        """Keeps the arrays if the last time was a minute ago, or if they are those of the end."""
        if self.path and (ended or time.monotonic() - self.written >= EVERY):
            on_host = {name: np.asarray(value) for name, value in arrays.items()}
            write_arrays(self.path, on_host | {"signature": self.signature})
            self.written = time.monotonic()


def digest_of(*values) -> str:
    """A name for all that a state depends on: trees of parameters, arrays and other values."""
    return _digest(values).hex()[:16]


def _digest(values) -> bytes:
    digest = hashlib.sha256()
    for value in values:
        for path, leaf in jax.tree.leaves_with_path(value):
            is_parameter = isinstance(leaf, jax.Array)
            digest.update(jax.tree_util.keystr(path).encode())
            digest.update(np.asarray(_checksum(leaf)).tobytes() if is_parameter else _bytes(leaf))
    return digest.digest()


def _bytes(leaf) -> bytes:
    return np.ascontiguousarray(leaf).tobytes() if isinstance(leaf, np.ndarray) else repr(leaf).encode()


@jax.jit
def _checksum(x):
    """Two sums of a parameter: they tell trained parameters of different steps apart."""
    x = x.astype(jnp.float32).ravel()
    return jnp.stack([x.sum(), (x * jnp.cos(jnp.arange(x.size, dtype=jnp.float32))).sum()])
