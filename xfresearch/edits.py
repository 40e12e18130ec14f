"""What a model carries of the edits made to it: a record of each, and the arrays as they were before it.

A run's directory has them in edits/<number>/: record.json (request, method, layers, norm of the change, metrics before and
after) and before.npz. So the last edit can be undone, and the arrays are then equal bit for bit.
"""

import io
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from etils import epath

from xfresearch.errors import UserError
from xfresearch.files import exists, read_object, write_bytes, write_json
from xfresearch.models import layers
from xfresearch.models.model_config import ModelConfig

FOLDER = "edits"


class Applied(NamedTuple):
    """One edit of a model."""

    record: dict
    before: Mapping[str, np.ndarray]  # by the names of `arrays`: the bytes of those that the edit changed


def arrays(model: ModelConfig, params: dict) -> Iterator[tuple[str, np.ndarray]]:
    """The parameters by name, layer by layer: 'embed.table', 'blocks.3.feed_forward.down.kernel'."""
    for name, leaf in _leaves({key: tree for key, tree in params.items() if key != "blocks"}):
        yield name, leaf
    for number in range(model.depth):
        for name, leaf in _leaves(layers.get(model, params, number)):
            yield f"blocks.{number}.{name}", leaf


def _leaves(tree: dict) -> Iterator[tuple[str, np.ndarray]]:
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        yield ".".join(str(key.key) for key in path), np.asarray(leaf)


def changed(model: ModelConfig, before: dict, after: dict) -> dict[str, np.ndarray]:
    """{name: array before} of the parameters that differ by a bit."""
    pairs = zip(arrays(model, before), arrays(model, after), strict=True)
    return {name: old for (name, old), (_, new) in pairs if old.tobytes() != new.tobytes()}


def differences(a, b) -> dict[str, dict]:
    """{name: numbers, how many are different, norm of the difference relative to that of `a`, largest difference} of the
    arrays of two models that differ. Raises UserError for models with other arrays."""
    shapes = [{name: array.shape for name, array in arrays(lm.config, lm.params)} for lm in (a, b)]
    if shapes[0] != shapes[1]:
        name = next(name for name in {**shapes[0], **shapes[1]} if shapes[0].get(name) != shapes[1].get(name))
        each = " and ".join(str(of.get(name, "missing")) for of in shapes)
        raise UserError(f"the models have other arrays: {name} is {each}")
    found = {}
    for (name, old), (_, new) in zip(arrays(a.config, a.params), arrays(b.config, b.params), strict=True):
        if old.tobytes() != new.tobytes():
            change = new.astype(np.float64) - old.astype(np.float64)
            relative = float(np.linalg.norm(change) / (np.linalg.norm(old.astype(np.float64)) or np.nan))
            largest = float(np.abs(change).max())
            found[name] = dict(numbers=old.size, different=int((change != 0).sum()), relative=relative, largest=largest)
    return found


def applied(model: ModelConfig, before: dict, after: dict, record: dict) -> Applied:
    """The edit that made the parameters `after` of `before`."""
    found = changed(model, before, after)
    return Applied(record, {name: np.frombuffer(array.tobytes(), np.uint8) for name, array in found.items()})


def undone(model: ModelConfig, params: dict, edit: Applied) -> dict:
    """The parameters before the edit."""
    for name in edit.before:
        _, number, path = name.split(".", 2)
        of_layer = layers.get(model, params, int(number))
        params = layers.put(model, params, int(number), _restored(of_layer, path.split("."), edit.before[name]))
    return params


def _restored(tree: dict, path: list[str], content: np.ndarray) -> dict:
    """The tree with the array at `path` made of its bytes."""
    if len(path) > 1:
        return tree | {path[0]: _restored(tree[path[0]], path[1:], content)}
    leaf = tree[path[0]]
    return tree | {path[0]: jnp.asarray(np.frombuffer(content.tobytes(), leaf.dtype).reshape(leaf.shape))}


def save(directory, edits: tuple[Applied, ...]) -> None:
    """Writes the edits of a model beside it."""
    for number, edit in enumerate(edits):
        folder = epath.Path(directory) / FOLDER / str(number)
        folder.mkdir(parents=True, exist_ok=True)
        write_json(folder / "record.json", edit.record)
        buffer = io.BytesIO()
        np.savez(buffer, **edit.before)
        write_bytes(folder / "before.npz", buffer.getvalue())


def load(directory) -> tuple[Applied, ...]:
    """The edits of the model in a run's directory. The arrays are read when they are asked for. Raises UserError if a
    record cannot be read."""
    found: list[Applied] = []
    while exists(folder := epath.Path(directory) / FOLDER / str(len(found))):
        found.append(Applied(read_object(folder / "record.json"), _Stored(folder / "before.npz")))
    return tuple(found)


class _Stored(Mapping):
    """The arrays of a .npz file, which is opened for each of them."""

    def __init__(self, path):
        self.path = path

    def _opened(self):
        try:
            return np.load(io.BytesIO(self.path.read_bytes()))
        except (OSError, ValueError) as error:
            raise UserError(f"{self.path} cannot be read: {error}") from None

    def __getitem__(self, name):
        return self._opened()[name]

    def __iter__(self):
        return iter(self._opened().files)

    def __len__(self):
        return len(self._opened().files)
