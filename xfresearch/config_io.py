"""From ml-collections files, dotted overrides and JSON to the typed `Config`, and back.

`config_flags` of ml-collections loads `--config FILE[:arg]` and applies `--config.key=value`; this file checks names
and types against the dataclasses, so that a mistake is one line instead of a stack trace.
"""

import dataclasses
import json
import math
import types
import typing
from pathlib import Path

from xfresearch.config import Config, ModelConfig
from xfresearch.errors import UserError, nearest
from xfresearch.resolving import resolve


def to_config_dict(value):
    """A dataclass (or a plain value) as an ml-collections ConfigDict, every default spelt out."""
    from ml_collections import ConfigDict

    if dataclasses.is_dataclass(value):
        value = {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
    if not isinstance(value, dict):
        return value
    return ConfigDict({k: to_config_dict(v) for k, v in value.items()})


def default_config():
    """What every file in `configs/` starts from: a ConfigDict with all keys at their defaults."""
    return to_config_dict(Config())


def from_dict(cls, data, key: str = "config"):
    """Builds the dataclass `cls` from a mapping; UserError for an unknown key, a wrong type or a value out of range."""
    data = dict(data.items())
    fields = {f.name: f for f in dataclasses.fields(cls)}
    for name, value in data.items():
        if name not in fields:
            raise UserError(
                f"{key}.{name}={_short(value)}: there is no such key{nearest(name, fields)} ({key} has {', '.join(fields)})"
            )
    hints = typing.get_type_hints(cls)
    values = {name: _convert(hints[name], value, f"{key}.{name}") for name, value in data.items()}
    for name, value in values.items():
        _check_range(fields[name], value, f"{key}.{name}")
    return cls(**values)


def _convert(kind, value, key: str):
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if dataclasses.is_dataclass(kind):
        if not hasattr(value, "items"):
            raise UserError(
                f"{key}={_short(value)} has the wrong type: it holds {', '.join(f.name for f in dataclasses.fields(kind))}"
            )
        return from_dict(kind, value, key)
    if origin is typing.Literal:
        if value not in args:
            allowed = ", ".join(repr(a) for a in args)
            raise UserError(
                f"{key}={_short(value)} is not allowed: it must be one of {allowed}{nearest(str(value), args)}"
            )
        return value
    if origin is tuple and isinstance(value, (list, tuple)):
        return tuple(_convert(args[0], v, f"{key}[{i}]") for i, v in enumerate(value))
    if origin is dict and hasattr(value, "items"):
        return {k: _convert(args[1], v, f"{key}.{k}") for k, v in value.items()}
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if isinstance(kind, type) and not isinstance(kind, types.GenericAlias) and type(value) is kind:
        return value
    raise UserError(f"{key}={_short(value)} has the wrong type {type(value).__name__}: it must be {_type_name(kind)}")


def _check_range(spec: dataclasses.Field, value, key: str) -> None:
    low, high, above = (spec.metadata[name] for name in ("low", "high", "above"))
    inside = (low is None or value >= low) and (high is None or value <= high) and (above is None or value > above)
    if not inside:
        words = (("at least", low), ("above", above), ("at most", high))
        bounds = " and ".join(f"{word} {n}" for word, n in words if n is not None)
        raise UserError(f"{key}={value!r} is not allowed: it must be {bounds}")
    if isinstance(value, float) and not math.isfinite(value):
        raise UserError(f"{key}={value!r} is not allowed: it must be a finite number")


def _short(value) -> str:
    text = " ".join(str(value).split()) if hasattr(value, "items") else repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _type_name(kind) -> str:
    names = {int: "an integer", float: "a number", bool: "True or False", str: "a string"}
    if typing.get_origin(kind) is tuple:
        return f"a tuple, each item {_type_name(typing.get_args(kind)[0])}"
    return names.get(kind, "a mapping")


def model_from(value) -> ModelConfig:
    """A resolved ModelConfig from one, from a ConfigDict or mapping (`config.model`), or from a whole run's config."""
    from xfresearch.resolving import resolve_model

    if isinstance(value, Config):
        return resolve(value).model
    if isinstance(value, ModelConfig):
        return resolve_model(value)
    if "model" in value:
        return resolve(from_dict(Config, value)).model
    return resolve_model(from_dict(ModelConfig, value, "config.model"))


def parse(arguments: list[str]) -> Config:
    """`--config FILE[:arg]` and `--config.key=value ...` as a resolved Config; UserError for any mistake in them."""
    return resolve(from_dict(Config, _load(arguments)))


def _load(arguments: list[str]):
    from absl import flags
    from ml_collections import config_flags

    file, overrides = split(arguments)
    path = Path(file.split(":")[0])
    if not path.is_file():
        raise UserError(f"--config={file}: there is no such file; the named configs are {_named_configs()}")
    if "get_config" not in path.read_text(errors="replace"):
        raise UserError(f"--config={file}: it has no function get_config; the named configs are {_named_configs()}")
    plain = _parse_flags(flags, config_flags, [f"--config={file}"], file)
    for name, value in overrides:
        _check_override(plain, name, value)
    return _parse_flags(flags, config_flags, [f"--config={file}", *(f"--config.{k}={v}" for k, v in overrides)], file)


def _parse_flags(flags, config_flags, arguments: list[str], file: str):
    values = flags.FlagValues()
    argv = ["xfresearch", *arguments]
    config_flags.DEFINE_config_file("config", flag_values=values, sys_argv=argv)
    try:
        values(argv)
        config = values.config
        config.items()
    except UserError:
        raise
    except Exception as error:  # a config file is the user's code: whatever it raises is said in one line
        text = " ".join(str(error).split()) or type(error).__name__
        text = text.split("Flag parsing error: ")[-1].removeprefix("flag ")
        raise UserError(f"--config={file}: {text[:300]}") from error
    return config


def split(arguments: list[str]) -> tuple[str, list[tuple[str, str]]]:
    """The config file and the (dotted key, value) overrides among `arguments`, each `--name=value` or `--name value`."""
    file, overrides, rest = "", [], list(arguments)
    while rest:
        name, has_value, value = rest.pop(0).partition("=")
        if name != "--config" and not name.startswith("--config."):
            raise UserError(
                f"{name}: there is no such option{nearest(name, ['--config', '--workdir'])} "
                "(see --help; a key of the config is --config.KEY=VALUE)"
            )
        if not has_value:
            if not rest:
                raise UserError(f"{name}: a value is missing")
            value = rest.pop(0)
        if name == "--config":
            file = value
        else:
            overrides.append((name.removeprefix("--config."), value))
    if not file:
        raise UserError(f"--config FILE[:arg] is missing; the named configs are {_named_configs()}")
    return file, overrides


def _check_override(config, name: str, value: str) -> None:
    here, path = config, "config"
    for part in name.split("."):
        keys = list(here.keys()) if hasattr(here, "keys") else []
        if part not in keys:
            has = f"{path} has {', '.join(keys)}" if keys else f"{path} holds a single value"
            raise UserError(f"config.{name}={value}: there is no key '{part}'{nearest(part, keys)} ({has})")
        here, path = here[part], f"{path}.{part}"
    if isinstance(here, bool):
        allowed, good = "True or False", value.lower() in ("true", "false", "1", "0")
    elif isinstance(here, int):
        allowed, good = "an integer", _reads_as(int, value)
    elif isinstance(here, float):
        allowed, good = "a number", _reads_as(float, value)
    else:
        allowed, good = (
            f"a value and not a group of keys ({', '.join(here)})" if hasattr(here, "keys") else "",
            not hasattr(here, "keys"),
        )
    if not good:
        raise UserError(f"config.{name}={value} has the wrong type: it must be {allowed}")


def _reads_as(kind, text: str) -> bool:
    try:
        kind(text)
    except ValueError:
        return False
    return True


def _named_configs() -> str:
    folder = Path(__file__).parent.parent / "configs"
    files = [p.name for p in sorted(folder.glob("*.py")) if "def get_config" in p.read_text()]
    return ", ".join(f"configs/{name}" for name in files) or "(none found)"


def to_json(config) -> str:
    """A dataclass as JSON that `from_dict` reads back to an equal one."""
    return json.dumps(dataclasses.asdict(config), indent=2)


def read_json(path) -> Config:
    """The Config of a run from its config.json; UserError where the file is missing or is not one."""
    from etils import epath

    path = epath.Path(path)
    if not path.exists():
        raise UserError(f"{path}: there is no such file, so this is not a run's directory")
    try:
        data = json.loads(path.read_text())
    except ValueError as error:
        raise UserError(f"{path}: not valid JSON: {error}") from error
    return resolve(from_dict(Config, data))


def differences(old, new, key: str = "config") -> list[str]:
    """Lines 'config.key: old -> new' for every field in which two dataclasses differ."""
    old, new = ({k: v for k, v in _flatten(dataclasses.asdict(c), key)} for c in (old, new))
    return [
        f"{k}: {old.get(k, '(absent)')!r} -> {new.get(k, '(absent)')!r}"
        for k in sorted(old.keys() | new.keys())
        if old.get(k, ...) != new.get(k, ...)
    ]


def _flatten(value, key: str):
    if isinstance(value, dict):
        for name, item in value.items():
            yield from _flatten(item, f"{key}.{name}")
    else:
        yield key, value


def describe() -> str:
    """A Markdown table of every key with its default and meaning (docs/configuration.md holds it; `make docs` writes it)."""
    return "| key | default | what it is |\n|---|---|---|\n" + "\n".join(_describe_rows(Config(), "config")) + "\n"


def _describe_rows(value, key: str):
    for spec in dataclasses.fields(value):
        item, path = getattr(value, spec.name), f"{key}.{spec.name}"
        if isinstance(item, dict):
            for name, inner in item.items():
                yield from _describe_rows(inner, f"{path}.{name}")
        elif dataclasses.is_dataclass(item):
            yield from _describe_rows(item, path)
        else:
            hint = typing.get_type_hints(type(value))[spec.name]
            allowed = (
                ", ".join(f"`{a!r}`" for a in typing.get_args(hint))
                if typing.get_origin(hint) is typing.Literal
                else ""
            )
            meaning = spec.metadata["doc"].replace("|", "or") + (f" ({allowed})" if allowed else "")
            yield f"| `{path.removeprefix('config.')}` | `{item!r}` | {meaning} |"
