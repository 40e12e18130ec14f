"""Exports a LanguageModel as a Hugging Face folder of a family that can express the model."""

import json
from collections import Counter
from dataclasses import replace
from functools import partial
from pathlib import Path

import jax
import numpy as np

from xfresearch.interop import folder as folders
from xfresearch.interop.config_json import read_model, value_at, write_config
from xfresearch.interop.copying import Bounds, bounds_of, copy, overlap
from xfresearch.interop.differences import Difference, differences
from xfresearch.interop.families import all_families, get_family
from xfresearch.interop.family import Family, Unsupported
from xfresearch.interop.mapping import TensorMapping, mappings
from xfresearch.interop.source import Source
from xfresearch.interop.tensor_files import DTYPES, PendingTensor
from xfresearch.models.model_config import ModelConfig
from xfresearch.runtime.errors import UserError
from xfresearch.runtime.files import new_directory, write_bytes, write_text
from xfresearch.runtime.terminal import bar as progress_bar
from xfresearch.runtime.trees import path_name

NAMED = 4  # options that an error names beside the first one


def export(lm, folder: Path, family_name: str, dtype: str, shard_bytes: int) -> Family:
    """Writes config.json, safetensors and tokenizer files to `folder`, which appears complete or not at all.

    The family is `family_name`, or that of the folder that the model was imported from, or the first that can express
    it. Tensors have `dtype`, or the dtype they were imported in, or that of the parameters.
    Raises UserError if `folder` already holds something, and Unsupported if no family can express the model.
    """
    if dtype and dtype not in DTYPES.values():
        raise UserError(f"dtype={dtype!r} is not allowed: it must be one of {', '.join(DTYPES.values())}")
    if not all(leaf.is_fully_addressable for leaf in jax.tree.leaves(lm.params)):
        raise UserError("the parameters are sharded over several processes: load the model in one process to export it")
    with new_directory(folder, "export") as directory:
        source = lm.source or Source({}, lm.config.param_dtype, {}, False, "", {})
        family = choose(lm.config, family_name, source.config.get("model_type", ""))
        if family.name != source.config.get("model_type"):
            # These use the keys and tensor names of another family.
            source = replace(source, config={}, dtypes={}, bare=False)
        default_dtype = dtype or source.dtype
        dtypes = {} if dtype else source.dtypes
        tensors = pending_tensors(family, lm.config, lm.params, default_dtype, dtypes, source.bare)
        _write(directory, tensors, shard_bytes)
        config = _config(family, lm, default_dtype, source)
        write_text(directory / "config.json", json.dumps(config, indent=2) + "\n")
        _write_others(directory, lm.tokenizer, source)
    return family


def _config(family: Family, lm, dtype: str, source: Source) -> dict:
    """config.json, including the source's keys that do not affect the model's function."""
    name = "dtype" if "dtype" in source.config else "torch_dtype"
    written = write_config(family, lm.config)
    config = source.config | written | {name: dtype}
    if not source.config or _tokenizer_changed(lm.tokenizer, source):
        config |= {key: value for key, value in _special_ids(lm).items() if key not in family.needs}
    replaced = {key.alias for key in family.keys}
    # RoPE is written as rope_theta and rope_scaling, which every release reads, where they can express it.
    replaced |= {"rope_parameters"} - written.keys()
    return {key: value for key, value in config.items() if key not in replaced}


def _special_ids(lm) -> dict:
    """The ids of the special tokens. If a key were missing, `transformers` would use the family's default id, which is
    an ordinary token in this vocabulary."""
    ids = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
    if lm.tokenizer is not None:
        ids |= {"bos_token_id": lm.tokenizer.begin_of_text, "eos_token_id": lm.tokenizer.end_of_text}
    if lm.config.encoder:
        start = lm.tokenizer.decoder_start if lm.tokenizer else None
        ids |= {"decoder_start_token_id": start, "forced_bos_token_id": None, "forced_eos_token_id": None}
    return ids


def _tokenizer_changed(tokenizer, source: Source) -> bool:
    """Whether the model's tokenizer differs from that of the folder it was imported from."""
    return tokenizer is not None and tokenizer.digest != source.tokenizer


def _write_others(folder: Path, tokenizer, source: Source) -> None:
    """Writes the source's other files byte for byte, or only the tokenizer's files if the tokenizer was replaced."""
    if not _tokenizer_changed(tokenizer, source):
        for name, content in source.files.items():
            write_bytes(folder / name, content)
        return
    tokenizer.save(folder)
    if "tokenizer.json" in tokenizer.files and "tokenizer_config.json" not in tokenizer.files:
        write_text(folder / "tokenizer_config.json", json.dumps(_tokenizer_config(tokenizer), indent=2) + "\n")


def _tokenizer_config(tokenizer) -> dict:
    """A tokenizer_config.json that makes `transformers` use tokenizer.json as it is. Without a tokenizer class it would
    use the family's own pre-tokenizer."""
    added = json.loads(tokenizer.files["tokenizer.json"]).get("added_tokens", [])
    names = {token["id"]: token["content"] for token in added}
    special = {"bos_token": names.get(tokenizer.begin_of_text), "eos_token": names.get(tokenizer.end_of_text)}
    return {"tokenizer_class": "PreTrainedTokenizerFast"} | {key: name for key, name in special.items() if name}


def _write(folder: Path, tensors: list[PendingTensor], shard_bytes: int) -> None:
    total = sum(tensor.bytes for tensor in tensors)
    with progress_bar(desc="export", total=total, unit="B", unit_scale=True, disable=None, leave=False) as bar:
        folders.write_tensors(folder, tensors, shard_bytes, bar.update)


def choose(model: ModelConfig, name: str = "", own: str = "") -> Family:
    """The family called `name`; without a name, the first that can express `model`, trying the family `own` first.

    Raises Unsupported with the options that the nearest family cannot express.
    """
    if name:
        candidates = [get_family(name)]
    else:
        fitting = [family for family in all_families() if family.two_stacks == bool(model.encoder)]
        candidates = sorted(fitting, key=lambda family: family.name != own)
    reasons = {}
    errors = {}
    for family in candidates:
        try:
            reasons[family.name] = missing(family, model)
        except UserError as error:
            errors[family.name] = error
            continue
        if not reasons[family.name]:
            return family
    subject = f"{name} cannot express this model" if name else "no family can express this model"
    raise Unsupported(f"{subject}: {reason(reasons) if reasons else next(iter(errors.values()))}")


def missing(family: Family, model: ModelConfig) -> list[Difference]:
    """The options of `model` that `family` cannot express: the differences after its config.json is written and read back.

    Raises UserError if the config.json cannot be read back.
    """
    of_tensors = {field: value_at(model, field) for field in family.of_tensors}
    return differences(model, read_model(family, write_config(family, model), **of_tensors))


def reason(missing_of: dict[str, list[Difference]]) -> str:
    """How a model differs from the nearest family. The first difference is the one that most families share."""
    nearest = min(missing_of, key=lambda name: len(missing_of[name]))
    own = {name: [difference for difference in each if not difference.follows] for name, each in missing_of.items()}
    families_with = Counter(difference.field for each in own.values() for difference in each)
    first, *others = sorted(own[nearest], key=lambda difference: -families_with[difference.field])
    named, left = [difference.field for difference in others[:NAMED]], len(others) - NAMED
    more = f" and in {', '.join(named)}" if named else ""
    return f"it differs from {nearest} in {first}{more}{f' and {left} more' if left > 0 else ''}"


def pending_tensors(family: Family, model: ModelConfig, params: dict, dtype: str, dtypes: dict, bare: bool) -> list:
    """The family's tensors of `params`; each is built when it is written."""
    leaves = {path_name(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(params)}
    tensors = []
    for mapping in mappings(family, model, {path: leaf.shape for path, leaf in leaves.items()}):
        name = mapping.name.removeprefix(family.prefix) if bare else mapping.name
        own = dtypes.get(name, dtype)
        tensors.append(PendingTensor(name, mapping.shape, own, partial(gather, mapping, leaves, own)))
    written = {tensor.name for tensor in tensors}
    for name, shape_of in family.zeros.items():
        if name not in written and not bare:
            shape, own = shape_of(model), dtypes.get(name, dtype)
            tensors.append(PendingTensor(name, shape, own, partial(np.zeros, shape, own)))
    return tensors


def gather(mapping: TensorMapping, leaves: dict, dtype: str) -> np.ndarray:
    """Builds a Hugging Face tensor from the shards of the parameters that it holds."""
    tensor = np.empty(mapping.shape, dtype)
    try:
        with np.errstate(over="raise"):
            for part, view, order in mapping.views(tensor):
                for bounds, shard in shards_of(leaves[part.path]).items():
                    if shared := overlap(bounds, part.index):
                        local, slices = shared
                        _put(view, slices, order, np.asarray(shard[local]))
    except FloatingPointError:
        raise UserError(f"tensor {mapping.name} has values outside the range of {dtype}") from None
    return tensor


def shards_of(leaf: jax.Array) -> dict[Bounds, jax.Array]:
    """The shards of an array, without replicas."""
    return {bounds_of(shard.index, leaf.shape): shard.data for shard in leaf.addressable_shards}


def _put(view: np.ndarray, slices: tuple, order: np.ndarray | slice, values: np.ndarray) -> None:
    """Writes `values` to view[slices], with the last dimension of `view` taken in `order`."""
    if isinstance(order, slice):
        copy(view[slices], values)
    else:
        view[*slices[:-1], order[slices[-1]]] = values
