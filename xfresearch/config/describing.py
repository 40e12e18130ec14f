"""A Markdown table of every option with its default and meaning (docs/configuration.md has it; `make docs` writes it)."""

import dataclasses
import typing

from xfresearch.config.fields import Choice
from xfresearch.config.run import Config


def describe() -> str:
    """The table. Options of a kind that is not the default one have the kind beside their key."""
    return "| key | default | what it is |\n|---|---|---|\n" + "\n".join(_rows(Config(), "", "", set())) + "\n"


def _rows(config, prefix: str, kind: str, seen: set, chosen: Choice | None = None):
    """A row for each option of a group. `seen` are the dataclass fields that have a row already: kinds share some."""
    hints = typing.get_type_hints(type(config))
    for spec in dataclasses.fields(config):
        value, path, inner = getattr(config, spec.name), prefix + spec.name, spec.metadata.get("choice")
        if isinstance(value, dict):
            for name, item in value.items():
                yield from _groups(item, f"{path}.{name}.", inner, seen)
        elif inner:
            yield from _groups(value, f"{path}.", inner, seen)
        elif dataclasses.is_dataclass(value):
            yield from _rows(value, f"{path}.", kind, seen)
        elif (prefix, id(spec)) not in seen and not (kind and spec.name in ("kind", "layout")):
            seen.add((prefix, id(spec)))
            choices = tuple(chosen.classes) if chosen and spec.name == chosen.by else _closed(hints[spec.name])
            yield _row(path, kind, value, spec, choices)


def _groups(value, prefix: str, chosen: Choice, seen: set):
    """The options of the kind that a group has, then those that other kinds have besides."""
    yield from _rows(value, prefix, "", seen, chosen)
    for name in chosen.classes:
        yield from _rows(chosen.make(name), prefix, f"{chosen.by}={name}", seen)


def _closed(hint) -> tuple:
    """The values of a Literal."""
    return typing.get_args(hint) if typing.get_origin(hint) is typing.Literal else ()


def _row(path: str, kind: str, value, spec: dataclasses.Field, choices: tuple) -> str:
    allowed = f" ({', '.join(f'`{choice!r}`' for choice in choices)})" if choices else ""
    needs = spec.metadata.get("needs")
    read = f"; read with `{needs.words}`" if needs else ""
    return f"| `{path}`{f' ({kind})' if kind else ''} | `{value!r}` | {spec.metadata['doc'].replace('|', 'or')}{allowed}{read} |"
