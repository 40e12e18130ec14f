"""Starts a run from a trained model (config.start.path): with its config, its tokenizer and its parameters.

The optimizer state is new and the step is 0. Options of the command line may change how the model is trained and
computed (dropout, kernels, dtype), and may add rows to its tables of tokens and positions; these rows are drawn as for
new parameters. Any other option that decides the function of the model is refused.

A run that resumes has its model, tokenizer and parameters in its own directory, and does not read the path again.
"""

import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from xfresearch.checkpoints import manifest, store
from xfresearch.checkpoints.digests import digests
from xfresearch.data.cache import digest
from xfresearch.data.labels import trains_on_labels
from xfresearch.data.tokenizers import load_tokenizer, tokenizer_for
from xfresearch.models import transformer
from xfresearch.models.model_config import ModelConfig
from xfresearch.models.transformer import abstract_params
from xfresearch.options.comparing import flat
from xfresearch.options.fields import leaves
from xfresearch.run_config import config_files
from xfresearch.run_config.config import Config
from xfresearch.runtime import distributed
from xfresearch.runtime.errors import require
from xfresearch.runtime.trees import by_path, join, nested, path_name, split
from xfresearch.training.step import init_params
from xfresearch.training.workdir import Origin, lineage, saved_config

if TYPE_CHECKING:
    from xfresearch.loading.loading import Stored

ADD_ROWS = ("vocab_size", "max_length")  # options of the model that may be larger than those of the trained model
FIXED = {
    "function": "its parameters were trained for the function that this option decides",
    "initialisation": "its parameters are not drawn again",
}
TABLES = ("embed/table", "head/table", "head_bias/bias", "position/table", "shared/relative_key")  # rows come first


def parse(arguments: Sequence[config_files.Source], workdir: str = "") -> Config:
    """`files.parse`; with config.start.path, the model and the tokenizer are those of the trained model, or of the run
    in `workdir` that resumes. Raises UserError if an option changes them in a way that is not allowed."""
    path = config_files.start_path(arguments)
    if not path:
        config = config_files.parse(arguments)
        allowed = "'none' without config.start.path: an adapter needs a trained model that it changes"
        require(config.model.adapter.kind == "none", "model.adapter.kind", config.model.adapter.kind, allowed)
        return config
    saved = saved_config(workdir) if workdir and store.steps(workdir) else None
    if saved and saved.start.path == path:
        config = config_files.parse(arguments, saved.model, saved.data.tokenizer)
        same = config.data.tokenizer == saved.data.tokenizer  # and no more given than before (data/given.py)
        return replace(config, data=replace(config.data, tokenizer=saved.data.tokenizer)) if same else config
    stored = _stored(path)
    config = config_files.parse(arguments, stored.model, stored.tokenizer)
    check_options(stored.model, config)
    check_tokenizer(stored.tokenizer, config)
    return config


def _stored(path: str) -> "Stored":
    """The trained model at `path`, whose parameters have not been read."""
    from xfresearch.loading import loading  # with the formats of other libraries: most runs start from no model

    return loading.stored(path)


def check_options(model: ModelConfig, config: Config) -> None:
    """Raises UserError if an option of config.model differs from that of `model`, the trained one, and may not."""
    old = flat(model)
    for leaf in leaves(config.model):
        value = old.get(leaf.path, leaf.value)  # options that only one of the models has follow from another one
        if leaf.value == value:
            continue
        may_differ, allowed, reason = leaf.decides not in FIXED, repr(value), FIXED.get(leaf.decides)
        may_differ |= leaf.path == "adapter.kind" and value == "none"
        if leaf.path in ADD_ROWS:
            may_differ, allowed, reason = leaf.value > value, f"at least {value}", "only rows can be added to its tables"
        if leaf.path == "param_dtype":
            may_differ, reason = False, "its parameters keep their dtype"
        require(may_differ, f"model.{leaf.path}", leaf.value, f"{allowed} to start from {config.start.path}: {reason}")


def check_tokenizer(path: str, config: Config) -> None:
    """Raises UserError if config.data.tokenizer is another tokenizer than the trained model's, at `path`. A BPE, which would
    have to be trained first, always counts as another one."""
    data = config.data
    if path and data.tokenizer != path and not trains_on_labels(data):
        allowed = f"left out to start from {config.start.path}: its parameters were trained for its own tokenizer"
        same = data.tokenizer != "bpe" and tokenizer_for(data).digest == load_tokenizer(path).digest
        require(same, "data.tokenizer", data.tokenizer, allowed)


def load(config: Config, mesh: Mesh) -> tuple[dict, Origin]:
    """The parameters at config.start.path, sharded over `mesh`, and the run's origin. Its lineage is a record of the trained
    model, and those of the models that it started from.

    Every process calls this. Lists added rows on standard error. Raises UserError as `parse` does, or if there is no
    intact checkpoint, or if the processes read different parameters.
    """
    path = config.start.path
    stored = _stored(path)
    check_options(stored.model, config)
    target = abstract_params(config.model, mesh)
    step, params = stored.read(_as_stored(stored.model, target, config))
    record = {"path": path, "kind": stored.kind, "step": step, "digest": digest(digests({"params": params}))}
    manifest.require_same_everywhere({"parameters to start from": str(record["digest"])})
    params, added = _with_new_parameters(params, target, config)
    if distributed.first():
        at = "" if step is None else f", step {step}"
        print(f"starts from the parameters of {path} ({stored.kind}{at})", file=sys.stderr)
        for name, (old, new) in added.items():
            print(f"{name}: rows {old} to {new - 1} are new, drawn with seed {config.seed}", file=sys.stderr)
    earlier = lineage(stored.path) if stored.kind == "run" else []
    return params, Origin([record, *earlier], stored.source())


def _as_stored(model: ModelConfig, target: dict, config: Config) -> dict:
    """`target` with the shapes of the trained model's parameters, and without new adapters. A table with fewer rows is not
    sharded by row: the mesh may not divide them. Raises UserError if another parameter has another shape."""
    old = by_path(transformer.abstract(model))

    def shaped(path, leaf):
        name = path_name(path)
        if old[name].shape == leaf.shape:
            return leaf
        allowed = f"{model.max_length} to start from {config.start.path}: {name} is not a table that can get more rows"
        require(name in TABLES, "model.max_length", config.model.max_length, allowed)
        sharding = NamedSharding(leaf.sharding.mesh, PartitionSpec(None, *leaf.sharding.spec[1:]))
        return jax.ShapeDtypeStruct(old[name].shape, leaf.dtype, sharding=sharding)

    return jax.tree_util.tree_map_with_path(shaped, split(target, lambda path: path in old)[0])


def _with_new_parameters(params: dict, target: dict, config: Config) -> tuple[dict, dict[str, tuple[int, int]]]:
    """The parameters with the shapes and shardings of `target`, and {name: (old rows, new rows)} of the tables that got
    rows. The new rows and adapters are those that new parameters with the config's seed would have."""
    old, new = by_path(params), by_path(target)
    added = {name: (len(old[name]), new[name].shape[0]) for name in old if old[name].shape != new[name].shape}
    drawn = split(target, lambda path: path in added or path not in old)[0]
    if not drawn:
        return params, added

    def extend(tables: dict, seed) -> dict:
        fresh = by_path(init_params(config, seed))
        rows = {path: jnp.concatenate([leaf, fresh[path][len(leaf) :]]) for path, leaf in tables.items()}
        return nested({path: rows.get(path, fresh[path]) for path in by_path(drawn)})

    shardings = jax.tree.map(lambda leaf: leaf.sharding, drawn)
    tables = {path: old[path] for path in added}
    return join(params, jax.jit(extend, out_shardings=shardings)(tables, config.seed)), added
