"""The Markdown table of all options, docs/data/tables/keys.md (`make docs` writes it)."""

import re

from xfresearch.options.fields import Described, every_option
from xfresearch.run_config.config import Config

TITLE = "# Every key\n\nHow keys are set, and what \"used only with\" says: [configuration](../../configuration.md).\n\n"
SITE = re.compile(r"norms\.(\w+)\.")
NUMBERED = re.compile(r"\.feed_forward_\d\.")


def page() -> str:
    """docs/data/tables/keys.md: the keys that the code has now."""
    return TITLE + _folded(describe())


def describe() -> str:
    """The table. The key of an option that the default kind does not have is followed by the kinds that have it."""
    rows: dict[tuple[str, str], list[str]] = {}
    for option in every_option(Config()):
        if blocks := re.match(r"model\.stacks\.\w+\.blocks(?=\.)", option.path):
            rows[f"`{blocks[0]}`", " | `('main',)` | blocks by name, with the options of `model.blocks` |"] = [""]
        else:
            rows.setdefault(_row(option), []).append(option.kind)
    lines = [f"| {key}{_where(kinds)}{rest}" for (key, rest), kinds in rows.items()]
    return "| key | default | meaning |\n|---|---|---|\n" + "\n".join(lines) + "\n"


def _row(option: Described) -> tuple[str, str]:
    """The key, and what comes after the kinds that have it: the default and the meaning."""
    allowed = f" ({', '.join(f'`{value!r}`' for value in option.values)})" if option.values else ""
    condition = f"; used only with `{option.needs}`" if option.needs else ""
    return f"`{option.path}`", f" | `{option.default!r}` | {option.doc.replace('|', 'or')}{allowed}{condition} |"


def _where(kinds: list[str]) -> str:
    """' (kind=a, b)', the kinds that have an option; '' if the default one has it."""
    by, names = kinds[0].partition("=")[0], dict.fromkeys(kind.partition("=")[2] for kind in kinds)
    return "" if "" in names else f" ({by}={', '.join(names)})"


def _folded(table: str) -> str:
    """The table of keys, where groups with the same options have their rows once, as `norms.SITE` and `feed_forward`."""
    sites, rows = [], {}
    for line in table.splitlines():
        if found := SITE.search(line):
            sites.append(found[1])
            line = SITE.sub("norms.SITE.", re.sub(r" \(layout=[^)]*\)", "", line))
        rows[NUMBERED.sub(".feed_forward.", line)] = None
    names = ", ".join(f"`{name}`" for name in dict.fromkeys(sites))
    return (
        f"SITE is a place for a norm that the layout has: {names}. The layers `feed_forward_1` and `feed_forward_2` of the\n"
        "layout `macaron` have the options of `feed_forward`.\n\n" + "\n".join(rows) + "\n"
    )
