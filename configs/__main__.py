"""python -m xfresearch.configs
python -m xfresearch.configs show NAME
python -m xfresearch.configs copy NAME DIR

Lists the configs that come with xfresearch: --config NAME[:arg] of the other commands reads one in any directory. show
prints the args of one, or the values of an option with their formulas, and copy makes a file of one to change.
"""

from collections.abc import Mapping
from itertools import zip_longest
from pathlib import Path
from textwrap import wrap
from typing import Any

from xfresearch.options import shipped
from xfresearch.runtime import command
from xfresearch.runtime.errors import UserError
from xfresearch.runtime.files import write_text

EPILOG = """\
examples:
  python -m xfresearch.configs
  python -m xfresearch.configs show gpt2
  python -m xfresearch.configs show layout
  python -m xfresearch.configs copy gpt2 .

A copy imports what it shares with others as xfresearch.configs.common, in any directory. docs/configuration.md has every
key."""

VALUES = "Of an option whose values have names it prints each value with its formula and paper."
CONFIG = "a shipped config, such as gpt2 or studies/w_o"
ARGS = 28  # characters of the column of args, which has several lines if it needs them


def parser() -> command.Parser:
    """The flags of the command."""
    made = command.Parser(prog="python -m xfresearch.configs", description=__doc__, epilog=EPILOG)
    actions = made.add_subparsers(dest="action", metavar="show|copy")
    show = actions.add_parser("show", description=f"Prints what a config is, and the args that it takes. {VALUES}")
    copy = actions.add_parser("copy", description="Copies a config, to be changed and read as --config FILE.py[:arg].")
    show.add_argument("name", metavar="NAME", help=f"{CONFIG}, or an option, such as layout, norm or attention.kind")
    copy.add_argument("name", metavar="NAME", help=CONFIG)
    copy.add_argument("target", metavar="DIR", help="a directory, or a new file that ends in .py")
    return made


def main(arguments: list[str]) -> None:
    options = parser().parse_args(arguments)
    if options.action is None:
        print(listed())
    elif options.action == "show":
        print(shown(options.name))
    else:
        print(copied(options.name, options.target))


def listed() -> str:
    """A line for each shipped config: its name, its args, and what it is."""
    lines = [("config", "args", "about")]
    for name, file in shipped.shipped().items():
        about, known = shipped.about(file)
        args = wrap(", ".join(each.partition(":")[2] for each in known if ":" in each), ARGS)
        lines += zip_longest([name], args, [about], fillvalue="")
    width = max(len(name) for name, _, _ in lines)
    return "\n".join(f"{name:{width}}  {args:{ARGS}}  {about}".rstrip() for name, args, about in lines)


def shown(name: str) -> str:
    """What a config says of itself, and where its file is; or the values of an option."""
    if name not in shipped.shipped():
        from xfresearch.models.catalogue import TABLES  # only here: JAX takes seconds

        if name in TABLES:
            return values(TABLES[name])
        raise UserError(f"{_no_config(name)}, and no option whose values have names ({', '.join(TABLES)})")
    return f"{shipped.docstring(_file(name))}\n\n{_file(name)}"


def values(table: Mapping[str, Any]) -> str:
    """A line for each value of an option: its name, its formula, and its paper in parentheses."""
    width = max(map(len, table))
    return "\n".join(f"{name:{width}}  {of.formula}{of.paper and f' ({of.paper})'}" for name, of in table.items())


def copied(name: str, target: str) -> str:
    """Copies a shipped config. Returns what to do with it."""
    source = _file(name)
    path = Path(target).expanduser()
    path = path if path.suffix == ".py" else path / source.name
    if path.exists():
        raise UserError(f"{path} already exists: name a new file, such as {path.with_stem(f'my_{path.stem}')}")
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, source.read_text(encoding="utf-8"))
    kind = "study" if name.startswith("studies/") else "train"
    next_command = command.as_typed(f"python -m xfresearch.{kind} --config {path}:tiny --workdir runs/{path.stem}")
    return f"{path}: change it, then {next_command}"


def _file(name: str) -> Path:
    """The file of a shipped config. Raises UserError if there is none of this name."""
    if name not in shipped.shipped():
        raise UserError(_no_config(name))
    return shipped.shipped()[name]


def _no_config(name: str) -> str:
    return f"{name}: there is no such config{shipped.nearest(name)} (python -m xfresearch.configs lists them)"


if __name__ == "__main__":
    command.run(main)
