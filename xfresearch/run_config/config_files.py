"""Reads config files of ml-collections, overrides on the command line, and a run's config.json.

`--config FILE[:arg]` loads a file whose `get_config(arg)` returns a ConfigDict; FILE may be the name of a shipped config
(shipped.py). `--config.KEY=VALUE` overrides one of its keys. Overrides of a kind or a layout decide which keys exist, so
they are applied first, in their order.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from os import PathLike
from pathlib import Path
from traceback import extract_tb
from typing import Any, TypeAlias, TypeVar

from absl import flags
from etils import epath
from ml_collections import ConfigDict, config_flags

from xfresearch.data.given import as_given
from xfresearch.models.encoder import EncoderConfig
from xfresearch.models.model_config import ModelConfig
from xfresearch.options import shipped
from xfresearch.options.fields import with_defaults
from xfresearch.options.groups import Group, to_config_dict
from xfresearch.options.overrides import find, split
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
    return resolve(from_dict(Config, _overridden(config, overrides, file)))


@cache
def _keep_keys() -> None:
    known_keys.keep(Config())


def parse_as(cls: type[T], arguments: Sequence[Source]) -> T:
    """The same for a config file of another dataclass `cls`, such as that of a study; nothing is resolved."""
    file, overrides = split(arguments)
    return from_dict(cls, _overridden(_read(file), overrides, file))


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
    config = _parse_flags(config_flags.DEFINE_config_file, [], [f"--config={shipped.located(file)}"], file)
    config.unlock()
    return config


def _overridden(config: ConfigDict, overrides: list[tuple[str, str]], file: Source) -> ConfigDict:
    """The ConfigDict of a config file with its overrides."""
    file = file if isinstance(file, str) else "config"
    last = dict(overrides).items()  # of two overrides of one key, the second one counts
    overrides = [override for override in last if not _choose(config, *override)]
    for override in overrides:
        _check_override(config, *override)
    remaining = [f"--config.{name}={value}" for name, value in overrides]
    return _parse_flags(config_flags.DEFINE_config_dict, [config], remaining, file)


def _parse_flags(define: Callable[..., Any], default: list[Any], arguments: list[str], file: str) -> Any:
    """The config that `define`, a function of config_flags, makes of a config file or a `default` and the arguments."""
    values = flags.FlagValues()
    argv = ["xfresearch", *arguments]
    try:
        define("config", *default, flag_values=values, sys_argv=argv)
        values(argv)
        config = values.config
        config.items()
    except UserError as error:
        raise UserError(f"--config={file}: {error}{_line(error, file)}") from error
    except Exception as error:  # a config file is the user's code, which may raise anything
        lines = str(error).splitlines() or [type(error).__name__]
        # The flags' library puts the stack trace of a config file into its message: the last line says what went wrong.
        text = lines[-1] if "Traceback (most recent call last)" in str(error) else " ".join(" ".join(lines).split())
        text = text.split("Flag parsing error: ")[-1].removeprefix("flag ")
        raise UserError(f"--config={file}: {text[:300]}{_line(error, file)}") from error
    return config


def _line(error: BaseException | None, file: str) -> str:
    """', at line N of the file' if the error comes from its code: the flags' library hides the traceback."""
    path = Path(shipped.located(file).split(":")[0]).resolve()
    while error:
        lines = [frame.lineno for frame in extract_tb(error.__traceback__) if Path(frame.filename).resolve() == path]
        if lines:
            return f", at line {lines[-1]} of {path.name}"
        error = error.__cause__ or error.__context__
    return ""


def _choose(config: ConfigDict, name: str, value: str) -> bool:
    """Applies an override if it chooses a kind or a layout, or unsets an option. Returns whether it does."""
    *parts, last = name.split(".")
    group = config
    for part in parts:
        group = group.get(part) if hasattr(group, "keys") else None
    if isinstance(group, Group) and last == group.by:
        group[last] = value
        return True
    if value == "None" and hasattr(group, "keys") and last in group and not isinstance(group[last], str):
        group[last] = None  # whether it may be unset shows when the config is read
        return True
    return False


def _check_override(config: ConfigDict, name: str, value: str) -> None:
    """Raises UserError if the key of an override does not exist or its value has the wrong type."""
    current = find(config, name, value)
    if hasattr(current, "keys"):
        allowed, valid = f"a value and not a group of keys ({', '.join(current)})", False
    elif isinstance(current, bool):
        allowed, valid = "True or False", value.lower() in ("true", "false", "1", "0")
    elif isinstance(current, int):
        allowed, valid = "an integer", _parses_as(int, value)
    elif isinstance(current, float):
        allowed, valid = "a number", _parses_as(float, value)
    else:
        return
    if not valid:
        raise UserError(f"config.{name}={value} has the wrong type: it must be {allowed}")


def _parses_as(kind: type, text: str) -> bool:
    try:
        kind(text)
    except ValueError:
        return False
    return True


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
