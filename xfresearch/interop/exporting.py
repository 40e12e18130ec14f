"""From a LanguageModel to a Hugging Face folder, of the family that has all that the model has."""

import json
import os
import shutil
import sys
from collections import Counter
from pathlib import Path

import jax
import numpy as np

from xfresearch.config import ModelConfig
from xfresearch.errors import UserError
from xfresearch.interop import folder as folders
from xfresearch.interop.config import read_model, write_config
from xfresearch.interop.families import all_families, family
from xfresearch.interop.family import Family, Refused
from xfresearch.interop.matching import Difference, differences
from xfresearch.interop.places import Place, places
from xfresearch.models.axes import path_name

SHARD_BYTES = 5 * 10**9


def export(lm, folder: Path, family_name: str = "", dtype: str = "", shard_bytes: int = SHARD_BYTES) -> Family:
    """Writes config.json, safetensors and the tokenizer's files to `folder`, which appears whole or not at all.

    The family is the one given, that of the folder which the model came from, or the first that can express it. Tensors
    have the `dtype` given, the one they were imported in, or that of the parameters.
    UserError where the folder holds something already, Refused where no family can express the model.
    """
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UserError(f"{folder} already exists: export to a new directory")
    source = lm.source or {}
    kind = choose(lm.config, family_name, source)
    dtype, dtypes = dtype or source.get("dtype") or lm.config.param_dtype, {} if dtype else source.get("dtypes", {})
    temporary = folder.parent / f".{folder.name}.{os.getpid()}.tmp"
    try:
        temporary.mkdir(parents=True)
        tensors = outgoing(kind, lm.config, lm.params, dtype, dtypes, bool(source.get("bare")))
        _write(temporary, tensors, shard_bytes)
        config = source.get("config", {}) | write_config(kind, lm.config) | {"torch_dtype": dtype}
        config.pop("rope_parameters", None)  # written as rope_theta and rope_scaling, which every release reads
        (temporary / "config.json").write_text(json.dumps(config, indent=2) + "\n")
        if lm.tokenizer is not None:
            lm.tokenizer.save(temporary)
        temporary.replace(folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return kind


def _write(folder: Path, tensors: list[folders.Outgoing], shard_bytes: int) -> None:
    from tqdm import tqdm

    total = sum(tensor.bytes for tensor in tensors)
    with tqdm(desc="export", total=total, unit="B", unit_scale=True, disable=None, leave=False, file=sys.stderr) as bar:
        folders.write_tensors(folder, tensors, shard_bytes, bar.update)


def choose(model: ModelConfig, name: str = "", source: dict | None = None) -> Family:
    """The family named, or the source's, or the first that can express `model`; Refused with what the nearest one lacks."""
    own = (source or {}).get("config", {}).get("model_type")
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
        found.append(folders.Outgoing(name, place.shape, own, lambda place=place, own=own: gather(place, leaves, own)))
    return found


def gather(place: Place, leaves: dict, dtype: str) -> np.ndarray:
    """A tensor of theirs from the pieces of our parameters that it holds."""
    tensor = np.empty(place.shape, dtype)
    for part, view, order in place.views(tensor):
        view[..., order] = np.asarray(leaves[part.path][part.index])
    return tensor
