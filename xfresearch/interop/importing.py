"""Imports a Hugging Face folder.

Each tensor is read once, by itself, and the shards of this host's devices are copied from it into arrays that already
have the sharded layout. Peak memory is the host's shards of the model plus one tensor.
"""

import re
import sys
from collections.abc import Set
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np

from xfresearch.data.tokenizers import Tokenizer, has_tokenizer, load_tokenizer
from xfresearch.interop import folder as folders
from xfresearch.interop.config_json import DEQUANTIZE, read_model
from xfresearch.interop.copying import bounds_of, copy, overlap
from xfresearch.interop.families import family_of
from xfresearch.interop.family import Family, Unsupported
from xfresearch.interop.mapping import TensorMapping, is_ignored, mappings
from xfresearch.interop.source import Source, small_files
from xfresearch.interop.tensor_files import StoredTensor, count_nonfinite
from xfresearch.interop.unread import warn_of_unread
from xfresearch.models.model_config import ModelConfig, with_dtype
from xfresearch.models.transformer import abstract_params
from xfresearch.options.objectives import Masked, Seq2Seq
from xfresearch.options.run_options import DataConfig
from xfresearch.run_config.config import Config
from xfresearch.runtime.errors import UserError, nearest
from xfresearch.runtime.files import files_in
from xfresearch.runtime.terminal import bar as progress_bar
from xfresearch.runtime.trees import path_name
from xfresearch.sharding.capacity import require_room_for

CLASSES = r"(score|classifier|classification_head|multiple_choice_head|qa_outputs)\..*"  # tensors of heads for classes
ALIGNMENT = 64  # bytes; JAX on CPU uses NumPy memory without a copy if it is aligned to this


class Imported(NamedTuple):
    """A model that another library wrote. The fields are arguments of LanguageModel."""

    config: ModelConfig
    params: dict
    tokenizer: Tokenizer | None
    run: Config  # with defaults for the options that the other library does not have
    source: Source | None = None


class Header(NamedTuple):
    """A Hugging Face folder without its parameters and its tokenizer."""

    config: dict  # config.json
    family: Family
    stored: dict[str, StoredTensor]  # by name
    dtype: str  # of most tensors
    model: ModelConfig


def load(folder: Path, mesh=None, dtype: str = "", allow_nonfinite: bool = False) -> Imported:
    """The model in a Hugging Face folder, on the first device or sharded over `mesh`. Raises as `read_header` and
    `read_params` do.

    It computes in `dtype`; by default, in the dtype of its files: bfloat16 files in bfloat16 with float32 parameters,
    float16 files in float32.
    """
    header = read_header(folder)
    model = with_dtype(header.model, dtype)
    if model.param_dtype == "float64":
        jax.config.update("jax_enable_x64", True)
    params = read_params(folder, header, abstract_params(model, mesh), allow_nonfinite)
    tokenizer = read_tokenizer(folder)
    data = DataConfig(tokenizer=str(folder)) if tokenizer else DataConfig()
    if model.encoder:
        data = replace(data, objective=Seq2Seq(), corpus=("translation",))  # pairs that need no files
    elif not model.causal:
        data = replace(data, objective=Masked())
    run = Config(model=model, sequence_length=model.max_length, source_length=model.source_length, data=data)
    return Imported(model, params, tokenizer, run, source_of(folder, header, tokenizer))


def source_of(folder: Path, header: Header, tokenizer: Tokenizer | None) -> Source:
    """What the folder has beside the model's config and parameters, with which an export reproduces it."""
    other_dtypes = {name: tensor.dtype for name, tensor in header.stored.items() if tensor.dtype != header.dtype}
    digest = tokenizer.digest if tokenizer else ""
    return Source(header.config, header.dtype, other_dtypes, is_bare(header), digest, small_files(folder))


def is_bare(header: Header) -> bool:
    """Whether the folder's tensor names lack the family's prefix."""
    prefix = header.family.prefix
    return bool(prefix) and not any(name.startswith(prefix) for name in header.stored)


def read_header(folder: Path) -> Header:
    """The header of a Hugging Face folder. Raises UserError if our models cannot express the family or config.json."""
    files_in(folder)  # no link in it leads out
    folders.check_adapter(folder)
    config = folders.read_config(folder)
    try:
        family = family_of(config, lambda: folders.stored_tensors(folder))
        stored = {family.present_name(name): tensor for name, tensor in folders.stored_tensors(folder).items()}
        dtype = folders.common_dtype(stored)
        check_counts(family, config, len(stored))
        warn_of_unread(config, family.reads)
        more = dtypes_of(dtype, stored) | {field: value(stored) for field, value in family.of_tensors.items()}
        return Header(config, family, stored, dtype, read_model(family, config, **more))
    except Unsupported as error:
        raise UserError(f"{folder}: {error}") from None


def check_counts(family: Family, config: dict, tensors: int) -> None:
    """Raises Unsupported if config.json has more layers than the files have tensors, or more experts where each has its own,
    before anything is built or listed."""
    listed = ("depth", "moe.experts") if any("{expert}" in row.theirs for row in family.rows) else ("depth",)
    for key in (key for key in family.keys if key.ours.endswith(listed)):
        for name in filter(None, (key.theirs, key.alias)):
            count = config.get(name)
            if isinstance(count, int) and count > tensors:
                raise Unsupported(f"config.json: {name}={count} is more than the files have tensors, {tensors}")


def dtypes_of(file_dtype: str, stored: dict) -> dict:
    """Our dtype fields for `stored` tensors, most of which have `file_dtype`. The parameters lose no precision."""
    computed = {"float16": "float32"}.get(file_dtype, file_dtype)
    wide = any(tensor.dtype == "float64" for tensor in stored.values())
    return {"dtype": computed, "param_dtype": "float64" if wide else "float32"}


def read_tokenizer(folder: Path):
    """The folder's tokenizer, or None."""
    return load_tokenizer(folder) if has_tokenizer(folder) else None


def read_params(folder: Path, header: Header, abstract: dict, allow_nonfinite: bool = False) -> dict:
    """The parameters, with the shardings of `abstract`.

    Shows a progress bar in bytes. Raises UserError if our model cannot express the tensors; nothing is dropped silently.
    Raises UserError, too, for a value that is NaN or infinite; with `allow_nonfinite` that is a warning.
    """
    _, family, stored, _, model = header
    with_paths, structure = jax.tree_util.tree_flatten_with_path(abstract)
    leaves = {path_name(path): leaf for path, leaf in with_paths}
    shapes = {path: leaf.shape for path, leaf in leaves.items()}
    expected = {mapping.name: mapping for mapping in mappings(family, model, shapes)}
    if is_bare(header):
        expected = {name.removeprefix(family.prefix): mapping for name, mapping in expected.items()}
    copies = copies_of(family, model, expected)
    stored = with_originals(stored, copies)
    check(folder, family, leaves.keys(), expected, copies, stored)
    say_left_out(folder, family, stored)
    require_room_for(abstract, folder)
    shards = {path: Shards(leaf) for path, leaf in leaves.items()}
    total = sum(stored[name].bytes for name in expected)
    with progress_bar(desc="import", total=total, unit="B", unit_scale=True, disable=None, leave=False) as bar:
        for name, mapping in expected.items():
            tensor = stored[name].read()
            check_finite(stored[name], tensor, allow_nonfinite)
            fill(shards, mapping, tensor)
            bar.update(stored[name].bytes)
    read: dict = jax.tree.unflatten(structure, [shards.pop(path).array() for path in leaves])
    return read


def check(
    folder: Path,
    family: Family,
    paths: Set,
    expected: dict[str, TensorMapping],
    copies: dict[str, str],
    stored: dict,
) -> None:
    """Raises UserError if a tensor is missing, unexpected, of an unsupported dtype, or of another shape than
    config.json requires, or if one of `copies` is none. `paths` are those of the model's parameters."""
    covered = {part.path for mapping in expected.values() for part in mapping.parts}
    uncovered = paths - covered
    if uncovered:
        raise UserError(
            f"{folder}: {family.name} has no tensor for {sorted(uncovered)[0]}, which its config.json requires"
        )
    classes = [name for name in stored if re.fullmatch(CLASSES, name)]
    if classes:
        what = "the head of a classifier, whose outputs are no tokens"
        raise UserError(f"{folder}: tensor {classes[0]} is {what}: give the language model that it was made from")
    packed = [name for name in stored if name not in expected and name.removesuffix("_blocks") + "_scales" in stored]
    if packed:
        raise UserError(f"{folder}: tensor {packed[0]}, with its scales, is packed: {DEQUANTIZE}")
    missing = [name for name in expected if name not in stored]
    if missing:
        more = f" (and {len(missing) - 1} more)" if missing[1:] else ""
        raise UserError(
            f"{folder}: tensor {missing[0]} is missing{more}{nearest(missing[0], stored.keys() - expected)}"
        )
    _check_copies(folder, family, expected, copies, stored)
    known = {*expected, *copies, *family.zeros}
    extra = [name for name in stored if name not in known and not is_ignored(family, name)]
    if extra:
        more = f" (and {len(extra) - 1} more)" if extra[1:] else ""
        raise UserError(
            f"{folder}: tensor {extra[0]} is unexpected{more}: the {family.name} model of config.json does not have it"
        )
    for name, mapping in expected.items():
        stored[name].require_dtype()
        if stored[name].shape != mapping.shape:
            shapes = f"{list(stored[name].shape)}: config.json requires {list(mapping.shape)}"
            raise UserError(f"{folder}: tensor {name} has shape {shapes}")


def say_left_out(folder: Path, family: Family, stored: dict) -> None:
    """Prints a warning for each part of the folder that is left out."""
    for pattern, what in family.left_out.items():
        names = [name for name in stored if re.fullmatch(pattern, name)]
        if names:
            print(f"warning: {folder}: {what} is left out: {', '.join(sorted(names))}", file=sys.stderr)


def check_finite(stored: StoredTensor, tensor: np.ndarray, allowed: bool) -> None:
    """Raises UserError, or warns if it is `allowed`, if a value is NaN or infinite: a damaged or diverged model."""
    count = count_nonfinite(tensor)
    if not count:
        return
    text = f"{stored.file}: tensor {stored.name} has {count:,} values that are NaN or infinite"
    if not allowed:
        goes_on = "convert import --allow-nonfinite, or xf.load(..., allow_nonfinite=True), reads it all the same"
        raise UserError(f"{text}; {goes_on}")
    print(f"warning: {text}", file=sys.stderr)


def copies_of(family: Family, model: ModelConfig, expected: dict[str, TensorMapping]) -> dict[str, str]:
    """{a tensor that a folder may have as a copy: its original}: a tied head, and the copies of the family."""
    embedding = _embedding(expected)
    heads = {row.theirs: embedding for row in family.rows if row.ours == ("head/table",) and model.tie_embeddings}
    prefix, same = family.prefix, family.same_tensors
    bare = {copied.removeprefix(prefix): name.removeprefix(prefix) for copied, name in same.items()}
    return {copied: name for copied, name in {**same, **bare, **heads}.items() if name in expected}


def _embedding(expected: dict[str, TensorMapping]) -> str:
    return next(name for name, mapping in expected.items() if mapping.row.ours == ("embed/table",))


def with_originals(stored: dict[str, StoredTensor], copies: dict[str, str]) -> dict[str, StoredTensor]:
    """`stored`, with the first copy of each original that a folder lacks in its place, as `transformers` ties them."""
    return {name: stored[copied] for copied, name in reversed(copies.items()) if copied in stored} | stored


def _check_copies(folder: Path, family: Family, expected: dict, copies: dict[str, str], stored: dict) -> None:
    """Raises UserError if a copy differs from its original."""
    for copied, name in copies.items():
        original = stored[name]
        if copied in stored and stored[copied] is not original and not stored[copied].equals(original):
            why = f"{family.name} has one of them"
            if name == _embedding(expected):
                of_head = any(row.theirs == copied for row in family.rows)
                tied = "tie_word_embeddings in config.json must be false"
                why = tied if of_head else "a stack with a table of its own is not supported"
            raise UserError(f"{folder}: tensors {copied} and {original.name} differ: {why}")


def fill(shards: dict[str, "Shards"], mapping: TensorMapping, tensor: np.ndarray) -> None:
    """Copies the parts of `tensor` to the parameters that they belong to."""
    for part, view, order in mapping.views(tensor):
        shards[part.path].write(part.index, view, order)


class Shards:
    """The shards of one array on this host's devices, in memory that the array then uses."""

    def __init__(self, leaf: jax.ShapeDtypeStruct):
        self.leaf = leaf
        indices = leaf.sharding.addressable_devices_indices_map(leaf.shape).values()
        self.buffers = {
            bounds: _aligned([stop - start for start, stop in bounds], leaf.dtype)
            for bounds in dict.fromkeys(bounds_of(index, leaf.shape) for index in indices)
        }

    def write(self, index: tuple[int, ...], values: np.ndarray, order) -> None:
        """Writes `values`, their last dimension taken in `order`, to array[index]."""
        values = values if isinstance(order, slice) else values[..., order]
        for bounds, buffer in self.buffers.items():
            if shared := overlap(bounds, index):
                local, slices = shared
                copy(buffer[*local, ...], values[slices])

    def array(self) -> jax.Array:
        leaf = self.leaf
        return jax.make_array_from_callback(
            leaf.shape, leaf.sharding, lambda index: self.buffers[bounds_of(index or (), leaf.shape)]
        )


def _aligned(shape: list[int], dtype) -> np.ndarray:
    """Uninitialized memory, aligned so that JAX uses it without a copy."""
    size = int(np.prod(shape)) * np.dtype(dtype).itemsize
    raw = np.empty(size + ALIGNMENT, np.uint8)
    start = -raw.ctypes.data % ALIGNMENT
    return raw[start : start + size].view(dtype).reshape(shape)
