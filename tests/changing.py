"""Changes one option of a dataclass of options. A kind or a layout is changed as in a config file, by the same code."""

from dataclasses import fields, replace
from typing import Any

from xfresearch.options.fields import Choice
from xfresearch.options.groups import to_config_dict
from xfresearch.options.reading import from_dict
from xfresearch.runtime.errors import UserError, nearest


def change(config: Any, path: str, value: Any) -> Any:
    """`config` with the option at a dotted path set to `value`, which only a change of kind checks. Raises UserError
    if the option does not exist."""
    return _changed(config, path.split("."), value, f"{path}={value!r}")


def _changed(config: Any, path: list[str], value: Any, words: str, chosen: Choice | None = None) -> Any:
    """`chosen`: the classes that the group `config` can have."""
    (name, *rest), known = path, config if isinstance(config, dict) else {each.name: each for each in fields(config)}
    if name not in known:
        exist = f"{nearest(name, known)} (the options are {', '.join(known)})"
        raise UserError(f"{words}: there is no such option{exist}")
    if chosen and path == [chosen.by]:
        group = to_config_dict(config, chosen=chosen)
        group[name] = value
        return from_dict(chosen.classes[value], group)
    if isinstance(config, dict):
        return {**config, name: _changed(config[name], rest, value, words, chosen) if rest else value}
    inner = known[name].metadata.get("choice")
    return replace(config, **{name: _changed(getattr(config, name), rest, value, words, inner) if rest else value})
