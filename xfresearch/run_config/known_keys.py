"""The keys that a run's config can have, in a file: a typo is answered before JAX is imported.

The options of a kind stand in the file of its module, which imports JAX and Flax. That takes seconds. So commands look for
their overrides in a list of all keys first, of which the file has the digest of the sources. `make wheel` puts it into the
wheel; in a checkout the first command that reads a config writes it to the cache. Keys that are in the list are checked
again, with the config of the file.
"""

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

from xfresearch.data.cache import cache_root
from xfresearch.options import shipped
from xfresearch.options.fields import every_option
from xfresearch.options.overrides import find, split
from xfresearch.runtime.errors import UserError
from xfresearch.runtime.files import write_text
from xfresearch.runtime.identity import source_digest

OF_WHEEL = Path(__file__).with_name("keys.json")


def check(arguments: list[str]) -> None:
    """Raises UserError for a config file that does not exist, and for an override whose key no kind and no layout has. Other
    arguments are left to the parser of the config."""
    file, overrides = split(arguments)
    shipped.require(file)
    tree = kept()
    for name, value in overrides if tree else ():
        find(tree, name, value, all_kinds=True)


def keep(config: Any) -> None:
    """Writes the keys of a config to the cache, unless those of these sources are kept. If the cache cannot be written, the
    next typo only takes some seconds longer to be answered."""
    if not kept():
        with suppress(OSError, UserError):
            _file().parent.mkdir(parents=True, exist_ok=True)
            write(config, _file())


def write(config: Any, file: Path) -> None:
    """Writes the keys that a config can have, with the digest of the sources."""
    keys = dict.fromkeys(each.path for each in every_option(config))
    write_text(file, json.dumps({"source": source_digest(), "keys": [*keys]}, indent=0))


def kept() -> dict:
    """The kept keys of these sources, as a tree of groups in which single values are None; {} without."""
    for file in (OF_WHEEL, _file()):
        with suppress(OSError, UserError, ValueError, LookupError, TypeError):  # nothing yet, or the file of something else
            stored = json.loads(file.read_text(encoding="utf-8"))
            if stored["source"] == source_digest():
                return _tree(stored["keys"])
    return {}


def _file() -> Path:
    return cache_root() / "keys.json"


def _tree(keys: list[str]) -> dict:
    tree: dict = {}
    for key in keys:
        *groups, last = key.split(".")
        group = tree
        for name in groups:
            group[name] = group.get(name) or {}
            group = group[name]
        group.setdefault(last, None)
    return tree
