"""Tasks for lm_eval: its own, which it downloads, or those of local_tasks/, which read a local folder."""

import importlib.util
import json
import os
import re
from pathlib import Path

from xfresearch.runtime.errors import UserError, nearest
from xfresearch.runtime.files import inside
from xfresearch.runtime.opening import open_to_read

FOLDER = Path(__file__).parent / "local_tasks"
PREFIX = "local_"  # distinguishes our names from lm_eval's
TEXTS = {"query", "context", "continuation"}
CHOICES = {"choices", "context_options"}
FIELDS = {*TEXTS, *CHOICES, "gold"}


def local_names() -> list[str]:
    return sorted(path.stem for path in FOLDER.glob("*.yaml"))


def split_names(text: str, folder: str) -> list[str]:
    """The names in a text such as 'piqa,boolq'. Raises UserError if `folder` (--task-data) is given and lacks one."""
    names = list(dict.fromkeys(name.strip() for name in text.split(",")))
    for name in names:
        if not name:
            raise UserError(f"--tasks={text} is not allowed: it must be names separated by commas")
        if folder and name not in local_names():
            allowed = f"with --task-data, it must be one of {', '.join(local_names())}"
            raise UserError(f"--tasks={name} is not allowed: {allowed}{nearest(name, local_names())}")
        if folder and not data_file(name, folder).is_file():
            raise UserError(f"--task-data={folder} has no file {data_file(name, folder).name}, which {name} reads")
    return names


def data_file(name: str, folder: str) -> Path:
    return Path(inside(Path(folder).expanduser().absolute(), _config(name)["dataset_kwargs"]["data_files"]["test"]))


def check_installed() -> None:
    if importlib.util.find_spec("lm_eval") is None:
        install = "pip install 'xfresearch[eval]', or in a checkout -r requirements/eval.txt"
        raise UserError(f"--tasks needs lm_eval, which is not installed: {install}")


def load(names: list[str], folder: str, cache: Path, examples: int = 0) -> dict:
    """The tasks and groups of these names in the form of lm_eval's evaluator. Each item will follow `examples` solved
    examples. `cache` is the folder for lm_eval's converted copies of local files."""
    manager = _manager(folder)
    built_tasks: dict[str, dict] = {"tasks": {}, "groups": {}, "group_map": {}}
    for name in names:
        if folder:
            check_data(name, folder, examples)
        try:
            built = manager.load([_local_config(name, folder, cache) if folder else name])
        except Exception as error:  # libraries raise different types for faults of files, the network and tasks
            reason = " ".join(str(error).split())[:300] or type(error).__name__
            where = f"from {data_file(name, folder)}" if folder else "by lm_eval (--task-data DIR reads local files)"
            raise UserError(f"--tasks={name} could not be loaded {where}: {reason}") from error
        built_tasks = {kind: built_tasks[kind] | built[kind] for kind in built_tasks}
    return built_tasks


def check_data(name: str, folder: str, examples: int = 0) -> None:
    """Raises UserError for the first line of a task's file that is not JSON, or lacks a valid field that the task's
    prompts need."""
    templates = [str(value) for key, value in _config(name).items() if key.startswith("doc_to_")]
    needed = FIELDS & set(re.findall(r"\w+", " ".join(templates)))
    path = data_file(name, folder)
    number = 0
    with open_to_read(path) as file:
        for number, line in enumerate(file, 1):
            try:
                item = json.loads(line)
                missing = sorted(needed - item.keys())
            except (ValueError, AttributeError, RecursionError) as error:
                raise UserError(f"{path}:{number}: the line is not a JSON object: {error}") from None
            if missing:
                raise UserError(f"{path}:{number}: no field {missing[0]!r}, which --tasks={name} reads")
            if problem := _problem({field: item[field] for field in needed}):
                raise UserError(f"{path}:{number}: {problem}")
    if not number:
        raise UserError(f"{path} is empty: --tasks={name} has no items")
    if examples >= number:
        raise UserError(f"--fewshot={examples} is not allowed: it must be below {number}, the items of {path}")


def _problem(item: dict) -> str:
    """The problem of an item's values, or ''. lm_eval would compute wrong metrics from some such values."""
    for field, value in item.items():
        if field in TEXTS and not isinstance(value, str):
            return f"{field}={value!r} is not allowed: it must be a string"
        if field in CHOICES and not (
            isinstance(value, list) and value and all(choice and isinstance(choice, str) for choice in value)
        ):
            return f"{field}={value!r} is not allowed: it must be a list of non-empty strings"
    gold = item.get("gold", 0)
    count = len(next((item[field] for field in CHOICES & item.keys()), [""]))
    if type(gold) is not int or not 0 <= gold < count:
        return f"gold={gold!r} is not allowed: it must be the index of a choice, 0 to {count - 1}"
    return ""


def _manager(folder: str):
    """lm_eval's index of tasks. With a folder, it has only our tasks, and nothing uses the network."""
    if folder:
        os.environ |= {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
    import logging

    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    import datasets
    from lm_eval.tasks import TaskManager

    datasets.disable_progress_bars()
    return TaskManager(include_path=str(FOLDER), include_defaults=not folder)


def _config(name: str) -> dict:
    import yaml

    return yaml.safe_load((FOLDER / f"{name}.yaml").read_text())


def _local_config(name: str, folder: str, cache: Path) -> dict:
    """Our task file, with the path of its data in the user's folder."""
    files = {"test": str(data_file(name, folder))}
    return _config(name) | {"dataset_kwargs": {"data_files": files, "cache_dir": str(cache)}}
