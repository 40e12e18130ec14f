"""Reads config files of ml-collections, overrides on the command line, and a run's config.json.

`--config FILE[:arg]` loads a file whose `get_config(arg)` returns a ConfigDict; FILE may be the name of a shipped config
(shipped.py). `--config.KEY=VALUE` overrides one of its keys.
"""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from importlib.machinery import SourceFileLoader
from os import PathLike
from pathlib import Path
from traceback import extract_tb
from types import ModuleType
from typing import TypeAlias, TypeVar

from etils import epath
from ml_collections import ConfigDict

from xfresearch.data.given import as_given
from xfresearch.models.encoder import EncoderConfig
from xfresearch.models.model_config import ModelConfig
from xfresearch.options import shipped
from xfresearch.options.fields import with_defaults
from xfresearch.options.groups import override, to_config_dict
from xfresearch.options.overrides import split
from xfresearch.options.reading import from_dict
from xfresearch.run_config import known_keys
from xfresearch.run_config.config import Config
from xfresearch.run_config.resolving import resolve
from xfresearch.runtime.errors import UserError, shortened
from xfresearch.runtime.files import exists, read_object

# A config file, FILE[:arg], or a config: a program may give one in the place of the name of a file.
Source: TypeAlias = str | ConfigDict | Config
T = TypeVar("T")


def default_config() -> ConfigDict:
    """The ConfigDict that every file in `configs/` starts from: all keys have their defaults."""
    return to_config_dict(Config())


def default_encoder() -> ConfigDict:
    """The ConfigDict of an encoder, to put into `config.model.stacks.encoder`: all keys have their defaults."""
    return to_config_dict(EncoderConfig(), "config.model.stacks.encoder")


def as_arguments(source: Source, overrides: Mapping[str, object]) -> list[Source]:
    """The arguments of a command with this config and these overrides, {dotted key: value}."""
    if not isinstance(source, Source):
        allowed = "the name of a config, a config file FILE[:arg], or a config (ConfigDict or Config)"
        raise UserError(f"config={shortened(repr(source))} is not allowed: it must be {allowed}")
    return ["--config", source, *(f"--config.{key}={_text(value)}" for key, value in overrides.items())]


def _text(value: object) -> str:
    """A value as a command has it."""
    value = value.item() if hasattr(value, "item") else value  # of NumPy
    return str(value) if isinstance(value, str | None) else repr(tuple(value) if isinstance(value, list) else value)


def parse(arguments: Sequence[Source], model: ModelConfig | None = None, tokenizer: str = "") -> Config:
    """`--config FILE[:arg]` and `--config.key=value ...` as a resolved Config. Raises UserError for any mistake.

    If they are given, `model` and `tokenizer` replace those of the file; `--config.key=value` changes them too.
    """
    _keep_keys()
    file, overrides = split(arguments)
    config = _read(file)
    if model:
        config.model = to_config_dict(model, "config.model")
    if tokenizer:
        config.data.tokenizer = tokenizer
    override(config, overrides)
    return resolve(from_dict(Config, config))


@cache
def _keep_keys() -> None:
    known_keys.keep(Config())


def parse_as(cls: type[T], arguments: Sequence[Source]) -> T:
    """The same for a config file of another dataclass `cls`, such as that of a study; nothing is resolved."""
    file, overrides = split(arguments)
    config = _read(file)
    override(config, overrides)
    return from_dict(cls, config)


def start_path(arguments: Sequence[Source]) -> str:
    """config.start.path of a config file and its overrides, of which nothing else is checked."""
    file, overrides = split(arguments)
    return str(dict(overrides).get("start.path", _read(file).get("start", {}).get("path", "")))


def _read(file: Source) -> ConfigDict:
    """The ConfigDict of a config file, or of a config, which stays as it is."""
    if not isinstance(file, str):
        return to_config_dict(file if isinstance(file, Config) else from_dict(Config, file))
    path = shipped.require(file)
    if "get_config" not in path.read_text(errors="replace"):
        raise UserError(f"--config={file}: it has no function get_config ({shipped.listed()})")
    try:
        config = _module(path).get_config(*file.split(":", 1)[1:])
        if not isinstance(config, ConfigDict):
            raise UserError(f"get_config has returned {shortened(repr(config), 60)}: it must return a ConfigDict")
    except Exception as error:  # a config file is the user's code, which may raise anything
        text = str(error) if isinstance(error, UserError) else " ".join(f"{type(error).__name__}: {error}".split())[:300]
        raise UserError(f"--config={file}: {text}{_line(error, path)}") from error
    return config


def _module(path: Path) -> ModuleType:
    """The module of a config file, whose name need not end in .py."""
    loader = SourceFileLoader("config_file", str(path))
    module = sys.modules[loader.name] = ModuleType(loader.name)  # where dataclasses look for it
    module.__file__ = str(path)
    loader.exec_module(module)
    return module


def _line(error: BaseException, path: Path) -> str:
    """', at line N of the file' if the error comes from its code."""
    lines = [frame.lineno for frame in extract_tb(error.__traceback__) if frame.filename == str(path)]
    return f", at line {lines[-1]} of {path.name}" if lines else ""


def read_json(path: str | PathLike[str]) -> Config:
    """The Config of a run, read from its config.json. Raises UserError if the file is missing or invalid.

    Options that describe a machine (paths, thread counts) get their defaults: they come from the user's own command and
    environment, never from a folder that may be somebody else's. Its compilation cache could hold any program. Paths of data
    are NotGiven (data/given.py) if this user did not write the file.
    """
    path = epath.Path(path)
    if not exists(path):
        raise UserError(f"{path}: there is no such file, so this is not a run's directory")
    value = read_object(path)
    try:
        config = with_defaults(from_dict(Config, value), deciding="machine")
        return resolve(replace(config, data=as_given(config.data, value)))
    except UserError as error:  # such as the key of an earlier version, which the user renames in this file
        raise UserError(f"{path}: {error}") from None
