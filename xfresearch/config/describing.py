"""Makes the Markdown table of all options in docs/configuration.md (`make docs` writes it)."""

import dataclasses
import typing

from xfresearch.config.fields import Choice
from xfresearch.config.run import Config


def describe() -> str:
    """The table. The key of an option that only a non-default kind has is followed by that kind."""
    return "| key | default | meaning |\n|---|---|---|\n" + "\n".join(_rows(Config(), "", "", set())) + "\n"


def _rows(config, prefix: str, kind: str, seen: set, chosen: Choice | None = None, condition: str = ""):
    """A row for each option of a group. Kinds share some fields: `seen` are those that already have a row.
    `condition` is the one under which the whole group is used."""
    hints = typing.get_type_hints(type(config))
    for spec in dataclasses.fields(config):
        value = getattr(config, spec.name)
        path = prefix + spec.name
        inner = spec.metadata.get("choice")
        needs = spec.metadata.get("needs")
        used_with = needs.words if needs else condition
        if isinstance(value, dict):
            for name, item in value.items():
                yield from _groups(item, f"{path}.{name}.", inner, seen)
        elif inner:
            yield from _groups(value, f"{path}.", inner, seen)
        elif dataclasses.is_dataclass(value):
            yield from _rows(value, f"{path}.", kind, seen, condition=used_with)
        elif (prefix, id(spec)) not in seen and not (kind and spec.name in ("kind", "layout")):
            seen.add((prefix, id(spec)))
            choices = tuple(chosen.classes) if chosen and spec.name == chosen.by else _literals(hints[spec.name])
            yield _row(path, kind, value, spec.metadata["doc"], choices, used_with)


def _groups(value, prefix: str, chosen: Choice, seen: set):
    """The options of the group's default kind, then the additional options of its other kinds."""
    yield from _rows(value, prefix, "", seen, chosen)
    for name in chosen.classes:
        yield from _rows(chosen.make(name), prefix, f"{chosen.by}={name}", seen)


def _literals(hint) -> tuple:
    """The values of a Literal, () for any other type."""
    return typing.get_args(hint) if typing.get_origin(hint) is typing.Literal else ()


def _row(path: str, kind: str, value, doc: str, choices: tuple, used_with: str) -> str:
    allowed = f" ({', '.join(f'`{choice!r}`' for choice in choices)})" if choices else ""
    condition = f"; used only with `{used_with}`" if used_with else ""
    meaning = doc.replace("|", "or") + allowed + condition
    return f"| `{path}`{f' ({kind})' if kind else ''} | `{value!r}` | {meaning} |"
