"""Splits a command line into the config file and its overrides, and finds their keys. This imports no JAX."""

from collections.abc import Sequence
from typing import Any

from xfresearch.options import shipped
from xfresearch.options.fields import CHOOSING
from xfresearch.options.other_names import OTHER_NAMES
from xfresearch.options.reading import ending_in, nearest_key
from xfresearch.runtime.errors import UserError, did_you_mean, nearest


def split(arguments: Sequence[Any]) -> tuple[Any, list[tuple[str, str]]]:
    """The config file and the (dotted key, value) overrides in `arguments`: `--name=value` or `--name value`."""
    file = ""
    overrides = []
    rest = list(arguments)
    while rest:
        name, has_value, value = rest.pop(0).partition("=")
        if name != "--config" and not name.startswith("--config."):
            help_ = "(see --help; a key of the config is --config.KEY=VALUE)"
            raise UserError(f"{name}: there is no such option{_nearest_flag(name)} {help_}")
        if not has_value:
            if not rest:
                raise UserError(f"{name}: a value is missing")
            value = rest.pop(0)
        if name == "--config":
            file = value
        else:
            overrides.append((name.removeprefix("--config."), value))
    if not file:
        raise UserError(f"--config FILE[:arg] is missing; {shipped.listed()}")
    return file, overrides


def _nearest_flag(name: str) -> str:
    """'; did you mean '--config.optimizer.learning_rate'?' for --lr."""
    key = OTHER_NAMES.get(name.lstrip("-").replace("-", "_"))
    return did_you_mean([f"--config.{key}"]) if key else nearest(name, ["--config", "--workdir"])


def _of_a_kind(config: Any, key: str) -> bool:
    """Whether a group on the way to `key` has a kind or a layout."""
    for part in key.split("."):
        if {*config} & {*CHOOSING}:
            return True
        config = config[part]
    return False


def find(config: Any, name: str, value: str, all_kinds: bool = False):
    """The group or value of a config at the dotted key of an override. Raises UserError if there is none.

    all_kinds: the config has the keys of all kinds and layouts. Returns None then if the error would suggest several keys
    of which a config may have only one.
    """
    current = config
    path = "config"
    parts = name.split(".")
    for index, part in enumerate(parts):
        group = current if hasattr(current, "keys") else {}
        if all_kinds and path.endswith(".blocks") and parts[index + 1 :]:  # a config names its blocks as it likes
            part = "main"
        if part not in group:
            holds = "has no keys" if hasattr(current, "keys") else "holds a single value"
            words = "has, in one kind or another," if all_kinds and {*group} & {*CHOOSING} else "has"
            existing = f"{path} {words} {', '.join(group)}" if group else f"{path} {holds}"
            asked = ".".join(parts[index:]), (path, group), ("config", config)
            alike = ending_in(*asked) if all_kinds else []
            if len(alike) > 1 and any(_of_a_kind(config, key) for key in alike):
                return None
            hint = nearest_key(*asked)
            raise UserError(f"config.{name}={value}: there is no key '{part}'{hint} ({existing})")
        current = current[part]
        path = f"{path}.{part}"
    return current
