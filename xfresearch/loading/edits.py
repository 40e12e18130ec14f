"""The edits of a model that are stored with it: a record of each edit, and the arrays before it.

A run's directory has them in edits/<number>/: record.json (request, method, layers, norm of the change, metrics before and
after) and before.npz. So the last edit can be undone, and the arrays are then equal bit for bit. The command adds its
report. All files of an edit go with the model when it is saved again.
"""

from collections.abc import Iterator, Mapping
from functools import cached_property
from typing import NamedTuple

import jax
import numpy as np

from xfresearch.models import layers
from xfresearch.models.model_config import ModelConfig
from xfresearch.models.stack import StackConfig
from xfresearch.models.taps import ENCODER, in_stack, of_encoder
from xfresearch.runtime.arrays import read_arrays, write_arrays
from xfresearch.runtime.errors import UserError
from xfresearch.runtime.files import exists, files_in, inside, read_bytes, read_object, write_bytes, write_json
from xfresearch.runtime.schema import check

FOLDER = "edits"
RECORD = "record.json"
BEFORE = "before.npz"


class Applied(NamedTuple):
    """One edit of a model."""

    record: dict
    before: Mapping[str, np.ndarray]  # {name as in `pairs`: the bytes before the edit} of the arrays that it changed
    folder: tuple = ()  # the arguments of files.inside for the directory that the edit was read from


def pairs(model: StackConfig, a: dict, b: dict) -> Iterator[tuple[str, np.ndarray, np.ndarray]]:
    """(name, array of a, array of b) of two trees of parameters, layer by layer: 'embed.table',
    'blocks.3.feed_forward.down.kernel'. Those of an encoder begin with 'encoder.'. Arrays that are the same object in both
    are left out."""
    if encoder := getattr(model, ENCODER, None):
        for name, old, new in pairs(encoder, a[ENCODER], b[ENCODER]):
            yield f"{ENCODER}.{name}", old, new
    top = [{key: tree for key, tree in params.items() if key not in ("blocks", ENCODER)} for params in (a, b)]
    for name, old, new in _leaves(*top):
        yield name, np.asarray(old), np.asarray(new)
    for layer in layers.layers(model):
        for name, old, new in _leaves(*(params["blocks"][layer.stack] for params in (a, b))):
            yield f"blocks.{layer.number}.{name}", np.asarray(old[layer.index]), np.asarray(new[layer.index])


def _leaves(a: dict, b: dict) -> Iterator[tuple]:
    for (path, old), new in zip(jax.tree_util.tree_leaves_with_path(a), jax.tree.leaves(b), strict=True):
        if old is not new:
            yield ".".join(str(key.key) for key in path), old, new


def differences(a, b) -> dict[str, dict]:
    """{name: numbers, how many are different, norm of the difference relative to that of `a`, largest difference} of the
    arrays of two models that differ. Raises UserError for models with other arrays."""
    shapes = [
        {jax.tree_util.keystr(path, simple=True, separator="."): leaf.shape for path, leaf in leaves}
        for leaves in (jax.tree_util.tree_leaves_with_path(lm.params) for lm in (a, b))
    ]
    if shapes[0] != shapes[1]:
        name = next(name for name in {**shapes[0], **shapes[1]} if shapes[0].get(name) != shapes[1].get(name))
        each = " and ".join(str(of.get(name, "missing")) for of in shapes)
        raise UserError(f"the models have other arrays: {name} is {each}")
    changes = {}
    for name, old, new in pairs(a.config, a.params, b.params):
        if old.tobytes() != new.tobytes():
            change = new.astype(np.float64) - old.astype(np.float64)
            relative = float(np.linalg.norm(change) / (np.linalg.norm(old.astype(np.float64)) or np.nan))
            largest = float(np.abs(change).max())
            changes[name] = dict(numbers=old.size, different=int((change != 0).sum()), relative=relative, largest=largest)
    return changes


def applied(model: ModelConfig, before: dict, after: dict, record: dict) -> Applied:
    """The edit that made the parameters `after` of `before`."""
    both = {name: (old.tobytes(), new.tobytes()) for name, old, new in pairs(model, before, after)}
    return Applied(record, {name: np.frombuffer(old, np.uint8) for name, (old, new) in both.items() if old != new})


def undone(model: ModelConfig, params: dict, edit: Applied) -> dict:
    """The parameters before the edit."""
    for name in edit.before:
        leaf = leaf_of(model, params, name)
        params = with_leaf(model, params, name, np.frombuffer(edit.before[name].tobytes(), leaf.dtype).reshape(leaf.shape))
    return params


def leaf_of(model: StackConfig, params: dict, name: str) -> jax.Array:
    """The parameter of a layer by its name in `pairs`."""
    if of_encoder(name):
        return leaf_of(_encoder(model), params[ENCODER], in_stack(name))
    _, number, *path = name.split(".")
    leaf: jax.Array = layers.get_leaf(model, params, int(number), tuple(path))
    return leaf


def with_leaf(model: StackConfig, params: dict, name: str, value) -> dict:
    """`params` with the parameter of a layer replaced. All other arrays are those of `params`, not copies."""
    if of_encoder(name):
        return params | {ENCODER: with_leaf(_encoder(model), params[ENCODER], in_stack(name), value)}
    _, number, *path = name.split(".")
    return layers.put_leaf(model, params, int(number), tuple(path), value)


def _encoder(model) -> StackConfig:
    encoder: StackConfig = model.encoder
    return encoder


def save(directory, edits: tuple[Applied, ...]) -> None:
    """Writes the edits of a model beside it, and copies the other files of those that were read: reports."""
    for number, edit in enumerate(edits):
        folder = inside(directory, FOLDER, str(number))
        for path in files_in(*edit.folder) if edit.folder else ():
            if path.name not in (RECORD, BEFORE):
                write_bytes(folder / path.name, read_bytes(path))
        write_json(folder / RECORD, edit.record)
        write_arrays(folder / BEFORE, edit.before)


def load(directory) -> tuple[Applied, ...]:
    """The edits of the model in a run's directory. The arrays are read when they are asked for. Raises UserError if a
    record cannot be read."""
    edits: list[Applied] = []
    while exists(inside(*(folder := (directory, FOLDER, str(len(edits)))))):
        file = inside(*folder, RECORD)
        record = check(read_object(file), {"method": str, "requests": list}, file)
        edits.append(Applied(record, _Stored(inside(*folder, BEFORE)), folder))
    return tuple(edits)


class _Stored(Mapping):
    """The arrays of a file, which are read when they are first asked for."""

    def __init__(self, path):
        self.path = path

    @cached_property
    def _arrays(self) -> dict[str, np.ndarray]:
        return read_arrays(self.path)

    def __getitem__(self, name):
        return self._arrays[name]

    def __iter__(self):
        return iter(self._arrays)

    def __len__(self):
        return len(self._arrays)
