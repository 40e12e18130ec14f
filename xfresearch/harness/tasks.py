"""Tasks for lm_eval: its own, which it fetches from the network, or those of local_tasks/, read from a folder here."""

import importlib.util
import json
import logging
import os
import re
from pathlib import Path

from xfresearch.errors import UserError, nearest

FOLDER = Path(__file__).parent / "local_tasks"
PREFIX = "local_"  # sets our names apart from lm_eval's
FIELDS = {"query", "choices", "gold", "context", "context_options", "continuation"}


def local_names() -> list[str]:
    return sorted(path.stem for path in FOLDER.glob("*.yaml"))


def split_names(text: str, folder: str) -> list[str]:
    """The names in 'piqa,boolq'; UserError where one cannot be found in the folder of --task-data, if that is given."""
    names = list(dict.fromkeys(name.strip() for name in text.split(",")))
    for name in names:
        if not name:
            raise UserError(f"--tasks={text} is not allowed: it must be names with commas between them")
        if folder and name not in local_names():
            allowed = f"with --task-data they are {', '.join(local_names())}"
            raise UserError(f"--tasks={name} is not a task here: {allowed}{nearest(name, local_names())}")
        if folder and not data_file(name, folder).is_file():
            raise UserError(f"--task-data={folder}: {data_file(name, folder).name}, the file of {name}, is not there")
    return names


def data_file(name: str, folder: str) -> Path:
    return Path(folder).expanduser().absolute() / _config(name)["dataset_kwargs"]["data_files"]["test"]


def check_installed() -> None:
    if importlib.util.find_spec("lm_eval") is None:
        raise UserError("--tasks needs lm_eval, which is not installed: pip install -r requirements-eval.txt")


def load(names: list[str], folder: str, cache: Path) -> list:
    """lm_eval's tasks and groups of these names. `cache` is where local files are kept in the form that it reads."""
    manager = _manager(folder)
    found = []
    for name in names:
        if folder:
            check_data(name, folder)
        try:
            built = manager.load([_local_config(name, folder, cache) if folder else name])
        except Exception as error:  # what goes wrong with a file, the network or a task differs by library
            reason = " ".join(str(error).split())[:300] or type(error).__name__
            where = f"from {data_file(name, folder)}" if folder else "by lm_eval (--task-data DIR reads local files)"
            raise UserError(f"--tasks={name} could not be loaded {where}: {reason}") from error
        grouped = {member.task_name for group in built.get("groups", {}).values() for member in group.get_all_tasks()}
        found += [*built.get("groups", {}).values()]
        found += [task for task_name, task in built["tasks"].items() if task_name not in grouped]
    return found


def check_data(name: str, folder: str) -> None:
    """UserError for the first line of a task's file that is no JSON or lacks a field that its prompts are made of."""
    words = re.findall(
        r"\w+", " ".join(str(value) for key, value in _config(name).items() if key.startswith("doc_to_"))
    )
    needed, path = FIELDS & set(words), data_file(name, folder)
    with open(path, "rb") as file:
        for number, line in enumerate(file, 1):
            try:
                missing = sorted(needed - json.loads(line).keys())
            except (ValueError, AttributeError) as error:
                raise UserError(f"{path}:{number}: the line is not a JSON object: {error}") from None
            if missing:
                raise UserError(f"{path}:{number}: no field {missing[0]!r}, which --tasks={name} reads")


def _manager(folder: str):
    """lm_eval's index of tasks: ours alone where a folder is given, and then nothing asks the network."""
    if folder:
        os.environ |= {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    import datasets
    from lm_eval.tasks import TaskManager

    datasets.disable_progress_bars()
    return TaskManager(include_path=str(FOLDER), include_defaults=not folder)


def _config(name: str) -> dict:
    import yaml

    return yaml.safe_load((FOLDER / f"{name}.yaml").read_text())


def _local_config(name: str, folder: str, cache: Path) -> dict:
    """Our task file, its data being where the user says."""
    files = {"test": str(data_file(name, folder))}
    return _config(name) | {"dataset_kwargs": {"data_files": files, "cache_dir": str(cache)}}
