"""How a model is loaded: from a run, one of its steps, a Hugging Face folder, or a file of llama2.c."""

import jax
from etils import epath

from xfresearch.checkpoints import store
from xfresearch.checkpoints.newest import newest_intact
from xfresearch.config.files import read_json
from xfresearch.config.run import Config
from xfresearch.data.tokenizers import load_tokenizer
from xfresearch.errors import UserError
from xfresearch.interop import folder, importing, llama2c
from xfresearch.interop.source import load as load_source
from xfresearch.language_model import LanguageModel, layout_of, with_dtype
from xfresearch.models.model_config import ModelConfig


def load(path, step: int | None = None, mesh=None, dtype: str = "") -> LanguageModel:
    """The model at `path`: a run's directory, one of its checkpoints ('runs/a/checkpoints/500'), a Hugging Face folder, or
    a file of llama2.c, whose name ends in .bin.

    Its parameters lie on the first device, or are sharded over a `mesh` (jax.sharding.Mesh).
    It computes in its own dtype, or in the `dtype` given.

    Without a step, the newest checkpoint; damaged ones are named on standard error and passed over. A run in float64
    switches JAX to 64 bits. UserError where there is no such run or checkpoint, or where the one asked for is damaged.
    """
    path, step = locate(path, step)
    if _is_llama2c(path):
        return llama2c.load(path, mesh, dtype)
    if folder.is_folder(path):
        return importing.load(path, mesh, dtype)
    run = read_json(path / "config.json")
    if "float64" in (run.model.dtype, run.model.param_dtype):
        jax.config.update("jax_enable_x64", True)
    tokenizer = load_tokenizer(str(path / "tokenizer")) if (path / "tokenizer").exists() else None
    model = with_dtype(run.model, dtype)
    step, params = _restore(path, model, step, mesh)
    return LanguageModel(model, params, tokenizer, run, step, load_source(path))


def _is_llama2c(path: epath.Path) -> bool:
    return path.suffix == ".bin" and not path.is_dir()


def _is_others(path: epath.Path) -> bool:
    """Whether the model at `path` is in a form of others, which no run of ours made."""
    return _is_llama2c(path) or folder.is_folder(path)


def locate(path, step: int | None = None) -> tuple[epath.Path, int | None]:
    """The run's directory and the step that `path` or `step` asks for; one of others as it is."""
    path = epath.Path(path).expanduser()
    if path.parent.name == "checkpoints" and path.name.isdigit():
        if step not in (None, int(path.name)):
            raise UserError(f"step={step} is not allowed with the path {path}: give one of the two")
        return path.parent.parent, int(path.name)
    if _is_others(path):
        if step is not None:
            raise UserError(f"step={step} is not allowed with {path}, which holds one model")
        return path, None
    if not (path / "config.json").exists():
        what = "is not a run's directory" if path.exists() else "does not exist"
        raise UserError(
            f"{path} {what}: a path may be a run's directory (it holds config.json and checkpoints/), one of its "
            "steps (runs/a/checkpoints/500) or a Hugging Face folder (config.json and safetensors)"
        )
    return path, step


def run_of(path) -> Config:
    """The config of the run at `path`; of a model that no run of ours made, one at its defaults."""
    path, _ = locate(path)
    return Config() if _is_others(path) else read_json(path / "config.json")


def _restore(workdir: epath.Path, model: ModelConfig, step: int | None, mesh) -> tuple[int, dict]:
    """The step asked for, or the newest that can be read, and its parameters."""
    steps = store.steps(workdir)
    if not steps:
        raise UserError(f"{workdir} has no checkpoint yet")
    if step is not None:
        if step not in steps:
            raise UserError(f"{workdir} has no checkpoint of step {step}: it has steps {', '.join(map(str, steps))}")
        try:
            return step, read_params(workdir, model, step, mesh)
        except store.Corrupt as error:
            raise UserError(f"{workdir}: {error}") from error
    found = newest_intact(steps, lambda step: read_params(workdir, model, step, mesh), f"{workdir}: ")
    if found is None:
        raise UserError(f"{workdir}: none of its checkpoints can be read (steps {', '.join(map(str, steps))})")
    return found


def read_params(workdir, model: ModelConfig, step: int, mesh=None) -> dict:
    """Parameters of a run's checkpoint, on the first device or sharded over a `mesh`; store.Corrupt where it is damaged."""
    return store.restore_params(workdir, step, layout_of(model, mesh))
