"""The keys of a run's config, in a file: a typo is answered before JAX is imported.

The options of a kind stand in the file of its module, which imports JAX and Flax. That takes seconds. So commands look for
their overrides in a tree of all keys first. An installed package has the tree in keys.json, which `make docs` writes. The
options of a checkout may have changed: there the first command that reads a config keeps the tree in the cache, with the
digest of the sources that the tree was made of. Keys that are in the tree are checked again, with the config of the file.
"""

import dataclasses
import json
from contextlib import suppress
from pathlib import Path

from xfresearch import __version__
from xfresearch.data.cache import cache_root
from xfresearch.options import shipped
from xfresearch.options.fields import Choice
from xfresearch.options.overrides import find, split
from xfresearch.runtime.errors import UserError
from xfresearch.runtime.files import write_text
from xfresearch.runtime.identity import PACKAGE, source_digest

SHIPPED = Path(__file__).with_name("keys.json")


def check(arguments: list[str]) -> None:
    """Raises UserError for a config file that does not exist, and for an override whose key no kind and no layout has. Other
    arguments are left to the parser of the config."""
    file, overrides = split(arguments)
    shipped.require(file)
    tree = kept() or {}
    for name, value in overrides if tree else ():
        for owner, group in (("model", tree["model"]), *_stacks(tree["model"])):
            block, _, option = name.removeprefix(f"{owner}.blocks.").partition(".")
            if name.startswith(f"{owner}.blocks.") and option:  # a file may name its blocks as it likes
                group["blocks"].setdefault(block, group["blocks"]["main"])
        find(tree, name, value, all_kinds=True)


def _stacks(model: dict) -> list[tuple[str, dict]]:
    return [(f"model.stacks.{name}", group) for name, group in model["stacks"].items()]


def keep(config) -> None:
    """Writes the tree of a config at its defaults to the cache, unless the tree of these sources is there. If the cache
    cannot be written, the next typo only takes some seconds longer to be answered."""
    if kept() is None:
        with suppress(OSError, UserError):
            _file().parent.mkdir(parents=True, exist_ok=True)
            write_text(_file(), json.dumps({"source": source_digest(), "keys": tree_of(config)}))


def kept() -> dict | None:
    """The tree of these sources, if there is one."""
    if installed():
        return json.loads(SHIPPED.read_text(encoding="utf-8"))
    try:
        stored = json.loads(_file().read_text(encoding="utf-8"))
        return stored["keys"] if stored["source"] == source_digest() else None
    except (OSError, UserError, ValueError, LookupError, TypeError):  # nothing yet, or the file of something else
        return None


def installed() -> bool:
    """Whether this package is that of a wheel, which nobody edits."""
    return any(PACKAGE.parent.glob(f"xfresearch-{__version__}.dist-info/RECORD"))


def _file() -> Path:
    return cache_root() / "keys.json"


def tree_of(config) -> dict:
    """{name: None, or the tree of a group} of a config, with the keys of every kind and layout that a group can have."""
    tree: dict[str, dict | None] = {}
    for spec in dataclasses.fields(config):
        value, chosen = getattr(config, spec.name), spec.metadata.get("choice")
        if "named" in spec.metadata:
            tree[spec.name] = {name: tree_of(cls()) for name, cls in spec.metadata["named"].items()}
        elif isinstance(value, dict):
            tree[spec.name] = {name: _of_all(spec.metadata["choice"]) for name in value}
        elif chosen:
            tree[spec.name] = _of_all(chosen)
        else:
            tree[spec.name] = tree_of(value) if dataclasses.is_dataclass(value) else None
    return tree


def _of_all(chosen: Choice) -> dict:
    """The trees of all classes that a group can have, as one."""
    whole: dict[str, dict | None] = {}
    for name in chosen.classes:
        _merge(whole, tree_of(chosen.make(name)))
    return whole


def _merge(into: dict, tree: dict) -> None:
    for name, group in tree.items():
        if isinstance(group, dict) and isinstance(into.get(name), dict):
            _merge(into[name], group)
        elif into.get(name) is None:
            into[name] = group
