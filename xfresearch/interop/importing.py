"""From a Hugging Face folder to a LanguageModel.

Each tensor is read once, by itself, and what this host's devices hold of it is copied to its place in arrays that already
have the sharded layout: besides the model's share of the host there is never more in memory than one tensor.
"""

import sys
from collections.abc import Set
from pathlib import Path

import jax
import numpy as np

from xfresearch.config.run import Config, DataConfig
from xfresearch.errors import UserError, nearest
from xfresearch.interop import folder as folders
from xfresearch.interop.config import read_model
from xfresearch.interop.copying import bounds_of, copy, within
from xfresearch.interop.families import family
from xfresearch.interop.family import Family, Refused
from xfresearch.interop.places import Place, is_ignored, places
from xfresearch.interop.source import Source, small_files
from xfresearch.language_model import LanguageModel, layout_of, with_dtype
from xfresearch.models.model_config import ModelConfig
from xfresearch.trees import path_name

ALIGNMENT = 64  # bytes; where JAX on CPU takes NumPy's memory as it is


def load(folder: Path, mesh=None, dtype: str = "") -> LanguageModel:
    """The model in a Hugging Face folder, in the dtype of its files: bfloat16 ones are computed in bfloat16 with float32
    parameters, float16 ones in float32; `dtype` is that of the computation where it is to be another. On the first device,
    or cut over `mesh`.

    UserError where the folder's family, config.json or tensors are not what our models have: nothing is left out quietly.
    """
    config = folders.read_config(folder)
    try:
        kind = family(config.get("model_type"))
        stored = folders.stored_tensors(folder)
        held = folders.common_dtype(stored)
        model = with_dtype(read_model(kind, config, **dtypes_of(held, stored)), dtype)
    except Refused as error:
        raise UserError(f"{folder}: {error}") from None
    if model.param_dtype == "float64":
        jax.config.update("jax_enable_x64", True)
    params, bare = read_params(folder, kind, model, stored, mesh)
    tokenizer = read_tokenizer(folder)
    data = DataConfig(tokenizer=str(folder)) if tokenizer else DataConfig()
    run = Config(model=model, sequence_length=model.max_length, data=data)
    others = {name: tensor.dtype for name, tensor in stored.items() if tensor.dtype != held}
    digest = tokenizer.digest if tokenizer else ""
    source = Source(config, held, others, bare, digest, small_files(folder))
    return LanguageModel(model, params, tokenizer, run, source=source)


def dtypes_of(held: str, stored: dict) -> dict:
    """Our fields for `stored` tensors, of which most are `held` in that dtype: parameters lose nothing of any."""
    computed = {"float16": "float32"}.get(held, held)
    wide = any(tensor.dtype == "float64" for tensor in stored.values())
    return {"dtype": computed, "param_dtype": "float64" if wide else "float32"}


def read_tokenizer(folder: Path):
    """The folder's tokenizer; None where it has none."""
    from xfresearch.data.tokenizers import has_tokenizer, load_tokenizer

    return load_tokenizer(folder) if has_tokenizer(folder) else None


def read_params(folder: Path, kind: Family, model: ModelConfig, stored: dict, mesh=None) -> tuple[dict, bool]:
    """The parameters, and whether the folder's names lack the family's prefix. Shows its progress in bytes."""
    from tqdm import tqdm

    abstract = layout_of(model, mesh)
    leaves, structure = jax.tree_util.tree_flatten_with_path(abstract)
    leaves = {path_name(path): leaf for path, leaf in leaves}
    expected = {place.name: place for place in places(kind, model, {path: leaf.shape for path, leaf in leaves.items()})}
    bare = bool(kind.prefix) and not any(name.startswith(kind.prefix) for name in stored)
    if bare:
        expected = {name.removeprefix(kind.prefix): place for name, place in expected.items()}
    check(folder, kind, model, leaves.keys(), expected, stored)
    shards = {path: Shards(leaf) for path, leaf in leaves.items()}
    total = sum(stored[name].bytes for name in expected)
    with tqdm(desc="import", total=total, unit="B", unit_scale=True, disable=None, leave=False, file=sys.stderr) as bar:
        for name, place in expected.items():
            fill(shards, place, stored[name].read())
            bar.update(stored[name].bytes)
    return structure.unflatten([shards.pop(path).array() for path in leaves]), bare


def check(folder: Path, kind: Family, model: ModelConfig, paths: Set, expected: dict[str, Place], stored: dict) -> None:
    """UserError for a tensor that is missing, in excess, of no dtype of weights, or of another shape than config.json
    makes it; `paths` are those of the model's parameters."""
    covered = {part.path for place in expected.values() for part in place.parts}
    uncovered = paths - covered
    if uncovered:
        raise UserError(
            f"{folder}: {kind.name} has no tensor for {sorted(uncovered)[0]}, which its config.json asks for"
        )
    missing = [name for name in expected if name not in stored]
    if missing:
        more = f" (and {len(missing) - 1} more)" if missing[1:] else ""
        raise UserError(
            f"{folder}: tensor {missing[0]} is missing{more}{nearest(missing[0], stored.keys() - expected)}"
        )
    tied = _tied_head(folder, kind, expected, stored) if model.tie_embeddings else set()
    extra = [name for name in stored if name not in expected and name not in tied and not is_ignored(kind, name)]
    if extra:
        more = f" (and {len(extra) - 1} more)" if extra[1:] else ""
        raise UserError(f"{folder}: tensor {extra[0]} is not one that config.json's {kind.name} has{more}")
    for name, place in expected.items():
        stored[name].require_dtype()
        if stored[name].shape != place.shape:
            shapes = f"{list(stored[name].shape)}: config.json makes it {list(place.shape)}"
            raise UserError(f"{folder}: tensor {name} has the shape {shapes}")


def _tied_head(folder: Path, kind: Family, expected: dict[str, Place], stored: dict) -> set[str]:
    """Names under which a folder may hold the embedding again. UserError where that is another matrix than the first."""
    embedding = next(name for name, place in expected.items() if place.row.ours == ("embed/table",))
    names = {row.theirs for row in kind.rows if row.ours == ("head/table",)}
    for name in names & stored.keys():
        if not stored[name].equals(stored[embedding]):
            both = f"tensors {name} and {embedding} are not the same"
            raise UserError(f"{folder}: {both}: config.json's tie_word_embeddings must be false")
    return names


def fill(shards: dict[str, "Shards"], place: Place, tensor: np.ndarray) -> None:
    """Copies `tensor` to where its parts belong."""
    for part, view, order in place.views(tensor):
        shards[part.path].write(part.index, view, order)


class Shards:
    """What this host's devices hold of one array, in memory that becomes theirs."""

    def __init__(self, leaf: jax.ShapeDtypeStruct):
        self.leaf = leaf
        indices = leaf.sharding.addressable_devices_indices_map(leaf.shape).values()
        self.buffers = {bounds_of(index, leaf.shape): None for index in indices}
        for bounds in self.buffers:
            self.buffers[bounds] = _aligned([stop - start for start, stop in bounds], leaf.dtype)

    def write(self, index: tuple[int, ...], values: np.ndarray, order) -> None:
        """Writes `values`, what stands at `index` in the first dimensions, its last dimension taken in `order`."""
        values = values if isinstance(order, slice) else values[..., order]
        for bounds, buffer in self.buffers.items():
            if held := within(bounds, index):
                at, cut = held
                copy(buffer[*at, ...], values[cut])

    def array(self) -> jax.Array:
        leaf = self.leaf
        return jax.make_array_from_callback(
            leaf.shape, leaf.sharding, lambda index: self.buffers[bounds_of(index, leaf.shape)]
        )


def _aligned(shape: list[int], dtype) -> np.ndarray:
    """Uninitialised memory of that shape that starts where JAX asks for it: its array is then this memory, not a copy."""
    size = int(np.prod(shape)) * np.dtype(dtype).itemsize
    raw = np.empty(size + ALIGNMENT, np.uint8)
    start = -raw.ctypes.data % ALIGNMENT
    return raw[start : start + size].view(dtype).reshape(shape)
