"""From a LanguageModel to a Hugging Face folder, of the family that has all that the model has."""

import json
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np

from xfresearch.errors import UserError
from xfresearch.files import new_directory
from xfresearch.interop import folder as folders
from xfresearch.interop.config import read_model, write_config
from xfresearch.interop.copying import Bounds, bounds_of, copy, within
from xfresearch.interop.families import all_families, family
from xfresearch.interop.family import Family, Refused
from xfresearch.interop.matching import Difference, differences
from xfresearch.interop.places import Place, places
from xfresearch.interop.source import Source
from xfresearch.interop.tensor_files import DTYPES, Outgoing
from xfresearch.models.model_config import ModelConfig
from xfresearch.trees import path_name


def export(lm, folder: Path, family_name: str, dtype: str, shard_bytes: int) -> Family:
    """Writes config.json, safetensors and the tokenizer's files to `folder`, which appears whole or not at all.

    The family is the one given, that of the folder which the model came from, or the first that can express it. Tensors
    have the `dtype` given, the one they were imported in, or that of the parameters.
    UserError where the folder holds something already, Refused where no family can express the model.
    """
    if dtype and dtype not in DTYPES.values():
        raise UserError(f"dtype={dtype!r} is not allowed: it must be one of {', '.join(DTYPES.values())}")
    if not all(leaf.is_fully_addressable for leaf in jax.tree.leaves(lm.params)):
        raise UserError("a model whose parameters are cut over several processes is not exported: load it in one")
    with new_directory(folder, "export") as directory:
        source = lm.source or Source({}, lm.config.param_dtype, {}, False, "", {})
        kind = choose(lm.config, family_name, source.config.get("model_type", ""))
        if kind.name != source.config.get("model_type"):
            source = replace(source, config={}, dtypes={}, bare=False)  # they speak of another family's keys and names
        held, others = dtype or source.dtype, {} if dtype else source.dtypes
        _write(directory, outgoing(kind, lm.config, lm.params, held, others, source.bare), shard_bytes)
        config = _config(kind, lm, held, source)
        (directory / "config.json").write_text(json.dumps(config, indent=2) + "\n")
        _write_others(directory, lm.tokenizer, source)
    return kind


def _config(kind: Family, lm, dtype: str, source: Source) -> dict:
    """config.json, with the keys of the source that say nothing of the function."""
    name = "dtype" if "dtype" in source.config else "torch_dtype"
    config = source.config | write_config(kind, lm.config) | {name: dtype}
    if not source.config or _has_another(lm.tokenizer, source):
        config |= _special_ids(lm)
    config.pop("rope_parameters", None)  # written as rope_theta and rope_scaling, which every release reads
    return config


def _special_ids(lm) -> dict:
    """What begins and ends a text. A key left out would be the family's own: a text would end at what is any word here."""
    ids = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
    if lm.tokenizer is not None:
        ids |= {"bos_token_id": lm.tokenizer.begin_of_text, "eos_token_id": lm.tokenizer.end_of_text}
    return ids


def _has_another(tokenizer, source: Source) -> bool:
    """Whether a model has another tokenizer than the folder that it came from."""
    return tokenizer is not None and tokenizer.digest != source.tokenizer


def _write_others(folder: Path, tokenizer, source: Source) -> None:
    """The source's own files, byte for byte, where the tokenizer is still theirs; otherwise the tokenizer's."""
    if not _has_another(tokenizer, source):
        for name, content in source.files.items():
            (folder / name).write_bytes(content)
        return
    tokenizer.save(folder)
    if "tokenizer.json" in tokenizer.files and "tokenizer_config.json" not in tokenizer.files:
        (folder / "tokenizer_config.json").write_text(json.dumps(_tokenizer_config(tokenizer), indent=2) + "\n")


def _tokenizer_config(tokenizer) -> dict:
    """What has `transformers` read tokenizer.json as it is: without a class it splits words as the model's family does."""
    added = json.loads(tokenizer.files["tokenizer.json"]).get("added_tokens", [])
    names = {token["id"]: token["content"] for token in added}
    special = {"bos_token": names.get(tokenizer.begin_of_text), "eos_token": names.get(tokenizer.end_of_text)}
    return {"tokenizer_class": "PreTrainedTokenizerFast"} | {key: name for key, name in special.items() if name}


def _write(folder: Path, tensors: list[Outgoing], shard_bytes: int) -> None:
    from tqdm import tqdm

    total = sum(tensor.bytes for tensor in tensors)
    with tqdm(desc="export", total=total, unit="B", unit_scale=True, disable=None, leave=False, file=sys.stderr) as bar:
        folders.write_tensors(folder, tensors, shard_bytes, bar.update)


def choose(model: ModelConfig, name: str = "", own: str = "") -> Family:
    """The family named, or its `own`, or the first that can express `model`; Refused with what the nearest one lacks."""
    if name:
        kinds = [family(name)]
    else:
        kinds = sorted(all_families(), key=lambda kind: kind.name != own)
    lacks, broken = {}, {}
    for kind in kinds:
        try:
            lacks[kind.name] = missing(kind, model)
        except UserError as error:
            broken[kind.name] = error
            continue
        if not lacks[kind.name]:
            return kind
    subject = f"{name} cannot express this model" if name else "no family can express this model"
    raise Refused(f"{subject}: {_reason(lacks) if lacks else next(iter(broken.values()))}")


def missing(kind: Family, model: ModelConfig) -> list[Difference]:
    """What `kind` cannot express of `model`: what is different once its config.json has been written and read again.
    UserError where sizes leave nothing to be read."""
    return differences(model, read_model(kind, write_config(kind, model)))


def _reason(lacks: dict[str, list[Difference]]) -> str:
    """In what a model differs from the nearest family, first in what it differs from most of them."""
    nearest = min(lacks, key=lambda kind: len(lacks[kind]))
    told = {kind: [lack for lack in found if not lack.follows] for kind, found in lacks.items()}
    lacking = Counter(lack.field for found in told.values() for lack in found)
    first, *others = sorted(told[nearest], key=lambda lack: -lacking[lack.field])
    more = f" and in {', '.join(lack.field for lack in others)}" if others else ""
    return f"it differs from {nearest} in {first}{more}"


def outgoing(kind: Family, model: ModelConfig, params: dict, dtype: str, dtypes: dict, bare: bool) -> list:
    """The family's tensors of `params`, each made when it is written."""
    leaves = {path_name(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(params)}
    found = []
    for place in places(kind, model, {path: leaf.shape for path, leaf in leaves.items()}):
        name = place.name.removeprefix(kind.prefix) if bare else place.name
        own = dtypes.get(name, dtype)
        found.append(Outgoing(name, place.shape, own, lambda place=place, own=own: gather(place, leaves, own)))
    return found


def gather(place: Place, leaves: dict, dtype: str) -> np.ndarray:
    """A tensor of theirs from the pieces of our parameters that it holds."""
    tensor = np.empty(place.shape, dtype)
    try:
        with np.errstate(over="raise"):
            for part, view, order in place.views(tensor):
                for bounds, piece in pieces(leaves[part.path]).items():
                    if held := within(bounds, part.index):
                        at, cut = held
                        _put(view, cut, order, np.asarray(piece[at]))
    except FloatingPointError:
        raise UserError(f"tensor {place.name} has values beyond what {dtype} holds") from None
    return tensor


def pieces(leaf: jax.Array) -> dict[Bounds, jax.Array]:
    """What devices hold of an array, copies left out."""
    return {bounds_of(shard.index, leaf.shape): shard.data for shard in leaf.addressable_shards}


def _put(view: np.ndarray, cut: tuple, order: np.ndarray | slice, values: np.ndarray) -> None:
    """Writes `values` to the `cut` of `view`, whose last dimension is taken in `order`."""
    if isinstance(order, slice):
        copy(view[cut], values)
    else:
        view[*cut[:-1], order[cut[-1]]] = values
