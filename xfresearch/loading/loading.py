"""Loads a model from a run's directory, one of its checkpoints, a Hugging Face folder, or a llama2.c file."""

from collections.abc import Callable
from functools import partial
from os import PathLike
from pathlib import Path
from typing import NamedTuple

import jax
from etils import epath
from jax.sharding import Mesh

from xfresearch.checkpoints import store
from xfresearch.checkpoints.validity import Unusable, newest_good
from xfresearch.data.tokenizers import has_tokenizer, load_tokenizer
from xfresearch.interop import folder
from xfresearch.interop.source import Source
from xfresearch.interop.source import load as load_source
from xfresearch.loading import edits
from xfresearch.loading.language_model import LanguageModel, Params
from xfresearch.models.model_config import ModelConfig, with_dtype
from xfresearch.models.transformer import abstract_params
from xfresearch.run_config.config import Config
from xfresearch.run_config.config_files import read_json
from xfresearch.runtime import distributed
from xfresearch.runtime.errors import UserError
from xfresearch.runtime.files import exists, inside, require_no_dangling_link
from xfresearch.runtime.formats import refused, sniff
from xfresearch.runtime.model_paths import if_on_hub, require_path, with_models
from xfresearch.sharding.capacity import require_room_for

LOADED = (
    "it must be a run's directory (with config.json and checkpoints/), one of its checkpoints (runs/a/checkpoints/500), "
    "a Hugging Face folder (config.json and safetensors) or a llama2.c .bin file"
)


def load(
    path: str | PathLike[str],
    step: int | None = None,
    mesh: Mesh | None = None,
    dtype: str = "", allow_nonfinite: bool = False
) -> LanguageModel:
    """Loads the model at `path`: a run's directory, one of its checkpoints ('runs/a/checkpoints/500'), a Hugging Face
    folder, or a llama2.c file, whose name ends in .bin.

    The parameters are on the first device, or sharded over a `mesh` (jax.sharding.Mesh). The model computes in its own
    dtype, or in `dtype` if it is given.

    Without `step`, this loads the newest good checkpoint (checkpoints/validity.py) and prints a warning on standard error
    for each newer one that is damaged or not good. With `step`, a checkpoint that is not good is loaded with a warning.
    A run in float64 switches JAX to 64 bits. Raises UserError if there is no such run or checkpoint, or if the
    requested checkpoint is damaged, and for weights of a Hugging Face folder that are NaN or infinite, unless
    `allow_nonfinite` makes it a warning.
    """
    located, step = locate(path, step)
    if _is_llama2c(located):
        from xfresearch.interop import llama2c

        return LanguageModel(**llama2c.load(located, mesh, dtype)._asdict())
    if folder.is_folder(located):
        from xfresearch.interop import importing

        return LanguageModel(**importing.load(located, mesh, dtype, allow_nonfinite)._asdict())
    run = read_json(inside(located, "config.json"))
    if "float64" in (run.model.dtype, run.model.param_dtype):
        jax.config.update("jax_enable_x64", True)
    tokenizer = load_tokenizer(str(inside(located, "tokenizer"))) if exists(located / "tokenizer") else None
    model = with_dtype(run.model, dtype)
    step, params = _restore(located, step, abstract_params(run.model, mesh))
    if model.param_dtype != run.model.param_dtype:
        params = jax.tree.map(lambda leaf: leaf.astype(model.param_dtype), params)
    return LanguageModel(model, params, tokenizer, run, step, load_source(located), edits.load(located))


class Stored(NamedTuple):
    """A model on disk, whose parameters have not been read."""

    kind: str  # 'run', 'Hugging Face folder' or 'llama2.c file'
    path: epath.Path  # of the run's directory, the folder or the file
    model: ModelConfig
    tokenizer: str  # path of its tokenizer; '' if it has none
    read: Callable[[Params], tuple[int | None, Params]]  # abstract parameters -> a run's step, parameters so sharded
    source: Callable[[], Source | None]  # the record of the Hugging Face folder that it came from, if any


def stored(path: str | PathLike[str]) -> Stored:
    """The model at `path`, which is one of those that `load` reads. Raises UserError as `load` does."""
    located, step = locate(path)
    if _is_llama2c(located):
        from xfresearch.interop import llama2c

        layout, run = llama2c.read_header(Path(located))
        weights = partial(llama2c.read_params, Path(located), layout)
        of_file = "llama2.c file", located, run.model, run.data.tokenizer
        return Stored(*of_file, lambda abstract: (None, weights(abstract)), lambda: None)
    if folder.is_folder(located):
        from xfresearch.interop import importing

        header = importing.read_header(located)
        tokenizer = str(located) if has_tokenizer(located) else ""
        read = partial(importing.read_params, located, header)
        of_folder = "Hugging Face folder", located, header.model, tokenizer

        def source() -> Source:
            return importing.source_of(located, header, importing.read_tokenizer(located))

        return Stored(*of_folder, lambda abstract: (None, read(abstract)), source)
    model = read_json(inside(located, "config.json")).model
    _require_step(located, step)  # a mistake shows before the data are prepared
    tokenizer = str(inside(located, "tokenizer")) if exists(located / "tokenizer") else ""
    return Stored("run", located, model, tokenizer, partial(_restore, located, step), partial(load_source, located))


def _is_llama2c(path: epath.Path) -> bool:
    return path.suffix == ".bin" and not path.is_dir()


def _is_foreign(path: epath.Path) -> bool:
    """Whether the model at `path` has another library's format, so it is not a run's directory."""
    return _is_llama2c(path) or folder.is_folder(path)


def locate(path: str | PathLike[str], step: int | None = None) -> tuple[epath.Path, int | None]:
    """The run's directory and the step that `path` or `step` names. A path in another library's format is returned as
    it is."""
    require_path(path, LOADED)
    located = epath.Path(path).expanduser()
    require_no_dangling_link(located)
    if located.parent.name == "checkpoints" and store.is_step(located.name):
        if step not in (None, int(located.name)):
            raise UserError(f"step={step} is not allowed with the path {located}: give one of the two")
        return located.parent.parent, int(located.name)
    if _is_foreign(located):
        if step is not None:
            raise UserError(f"step={step} is not allowed with {located}, which holds one model")
        return located, None
    if not exists(located / "config.json"):
        if located.is_file():
            raise refused(located, sniff(located), LOADED)
        if not located.exists():
            raise UserError(f"{located} does not exist: {if_on_hub(path)}{LOADED}")
        what = with_models(located) or f"not a run's directory: {LOADED}"
        raise UserError(f"{located} is {what}")
    return located, step


def run_config(path: str | PathLike[str]) -> Config:
    """The config of the run at `path`; the default config for a model in another library's format."""
    located, _ = locate(path)
    return Config() if _is_foreign(located) else read_json(inside(located, "config.json"))


def _restore(workdir: epath.Path, step: int | None, abstract: Params) -> tuple[int, Params]:
    """The requested step, or the newest good one, and its parameters with the shardings of `abstract`."""
    _require_step(workdir, step)
    require_room_for(abstract, workdir)
    if step is not None:
        try:
            return step, store.restore_params(workdir, step, abstract, named=True)
        except Unusable as error:
            raise UserError(f"{workdir}: {error}") from error
    listed = partial(store.agreed_steps, workdir)
    restored = newest_good(listed, lambda step: store.restore_params(workdir, step, abstract), f"{workdir}: ")
    if restored is None:
        raise UserError(f"{workdir}: none of its checkpoints can be read (steps {_in_words(listed())})")
    return restored


def _require_step(workdir: epath.Path, step: int | None) -> None:
    """Raises UserError if a run has no good checkpoint, or not the requested one."""
    there, good = distributed.shared([store.published(workdir), store.steps(workdir)])
    if not there:
        raise UserError(f"{workdir} has no checkpoint yet")
    if step is None and not good:
        named = f"name one of the steps {_in_words(there)} to read it all the same"
        raise UserError(f"{workdir} has no good checkpoint: {named}")
    if step not in (None, *there):
        raise UserError(f"{workdir} has no checkpoint of step {step}: it has steps {_in_words(there)}")


def _in_words(steps: list[int]) -> str:
    return ", ".join(map(str, steps))


def read_params(workdir: str | PathLike[str], model: ModelConfig, step: int, mesh: Mesh | None = None) -> Params:
    """The parameters of a run's checkpoint, on the first device or sharded over a `mesh`. Raises Unusable if the
    checkpoint is damaged, is not good, or was deleted meanwhile."""
    return store.restore_params(workdir, step, abstract_params(model, mesh))
