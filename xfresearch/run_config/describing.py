"""Makes the Markdown table of all options in docs/data/tables/keys.md (`make docs` writes it)."""

import dataclasses
import typing
from typing import NamedTuple

from xfresearch.options.fields import Choice
from xfresearch.run_config.config import Config


class OptionRow(NamedTuple):
    """An option, and the kinds or layouts that have it: [''] if the default one has it."""

    path: str
    default: str
    meaning: str
    kinds: list[str]

    def text(self) -> str:
        by = self.kinds[0].partition("=")[0]
        where = "" if "" in self.kinds else f" ({by}={', '.join(each.partition('=')[2] for each in self.kinds)})"
        return f"| `{self.path}`{where} | `{self.default}` | {self.meaning} |"


def describe() -> str:
    """The table. The key of an option that the default kind does not have is followed by the kinds that have it."""
    rows: dict[tuple, OptionRow] = {}
    _add(rows, Config(), "")
    return "| key | default | meaning |\n|---|---|---|\n" + "\n".join(row.text() for row in rows.values()) + "\n"


def _add(rows: dict, config, prefix: str, kind: str = "", chosen: Choice | None = None, condition: str = "") -> None:
    """Adds a row for each option of a group. `kind`: 'kind=NAME' of the group, or '' for its default. `chosen`: the choice
    of this kind. `condition`: under which the whole group is used."""
    hints = typing.get_type_hints(type(config))
    for spec in dataclasses.fields(config):
        value = getattr(config, spec.name)
        path = prefix + spec.name
        inner = spec.metadata.get("choice")
        needs = spec.metadata.get("needs")
        used_with = needs.words if needs else condition
        chosen_here = chosen if chosen and spec.name == chosen.by else None
        if "named" in spec.metadata:
            for name, cls in spec.metadata["named"].items():
                _add_named(rows, cls(), f"{path}.{name}.")
        elif isinstance(value, dict):
            assert inner, f"{path}: only groups with a choice are in a dict"
            for name, item in value.items():
                _add_kinds(rows, item, f"{path}.{name}.", inner)
        elif inner:
            _add_kinds(rows, value, f"{path}.", inner)
        elif dataclasses.is_dataclass(value):
            _add(rows, value, f"{path}.", kind, condition=used_with)
        elif not (kind and chosen_here):
            choices = tuple(chosen_here.classes) if chosen_here else _literals(hints[spec.name])
            row = _row(path, value, spec.metadata["doc"], choices, used_with)
            kinds = rows.setdefault(row, OptionRow(*row, [])).kinds
            kinds += [] if kind in kinds else [kind]  # each layout has the same attention


def _add_named(rows: dict, config, prefix: str) -> None:
    """Adds the options of a group that a config need not have. Its blocks have the options of any blocks: one row."""
    hints = typing.get_type_hints(type(config))
    for spec in dataclasses.fields(config):
        value, doc = getattr(config, spec.name), spec.metadata["doc"]
        needs = spec.metadata.get("needs")
        blocks = isinstance(value, dict)
        choices = () if blocks else _literals(hints[spec.name])
        shown = f"{doc}, with the options of `model.blocks`" if blocks else doc
        row = _row(prefix + spec.name, tuple(value) if blocks else value, shown, choices, needs.words if needs else "")
        rows.setdefault(row, OptionRow(*row, [""]))


def _add_kinds(rows: dict, value, prefix: str, chosen: Choice) -> None:
    """Adds the options of a group's default kind, then the additional ones of its other kinds."""
    _add(rows, value, prefix, "", chosen)
    for name in chosen.classes:
        _add(rows, chosen.make(name), prefix, f"{chosen.by}={name}", chosen)


def _literals(hint) -> tuple:
    """The values of a Literal, () for any other type."""
    return typing.get_args(hint) if typing.get_origin(hint) is typing.Literal else ()


def _row(path: str, value, doc: str, choices: tuple, used_with: str) -> tuple[str, str, str]:
    """The path, the default and the meaning of an option."""
    allowed = f" ({', '.join(f'`{choice!r}`' for choice in choices)})" if choices else ""
    condition = f"; used only with `{used_with}`" if used_with else ""
    return path, repr(value), doc.replace("|", "or") + allowed + condition
