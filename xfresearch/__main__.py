"""python -m xfresearch COMMAND [ARGUMENTS]

`xfresearch COMMAND` is `python -m xfresearch.COMMAND`; COMMAND --help explains it.
"""

import ast
import importlib
import platform
from pathlib import Path

from xfresearch import __version__
from xfresearch.runtime import command
from xfresearch.runtime.errors import UserError, nearest

MODELS = ("train", "prepare", "evaluate", "generate", "compare", "convert", "analyze", "edit", "study", "plan", "bench")
COMMANDS = (*MODELS, "configs", "completion")


def main(arguments: list[str]) -> None:
    word, *rest = arguments or ["--help"]
    if word in COMMANDS:
        module(word).main(rest)
    elif word == "--version":
        print("\n".join(versions()))
    elif word in ("--help", "-h"):
        print(command.as_typed(text_of_help()))
    elif word.startswith("-"):
        raise UserError(f"{word}: there is no such flag before a command{nearest(word, ('--help', '--version'))}")
    else:
        raise UserError(f"{word}: there is no such command{nearest(word, COMMANDS)} (see python -m xfresearch --help)")


def start() -> None:
    """The command `xfresearch` of an installed package."""
    command.run(main)


def module(name: str):
    """The module of a command. `xfresearch.configs` is the package of the configs, too."""
    return importlib.import_module("xfresearch.configs.__main__" if name == "configs" else f"xfresearch.{name}")


def text_of_help() -> str:
    lines = [f"  python -m xfresearch.{name:12}{summary(name)}" for name in COMMANDS]
    flags = ["  --help       show this, or with a command its help", "  --version    show the versions and the devices"]
    first = "A first run: python -m xfresearch.train --config quickstart --workdir runs/quickstart"
    pages = "Pages that are named docs/...: https://github.com/xfresearch/xfresearch/tree/main/docs"
    return "\n".join(["usage: python -m xfresearch.COMMAND [--help] ...", "", *lines, "", *flags, "", first, pages])


def summary(name: str) -> str:
    """The first sentence of a command's docstring, without the lines of its usage. The module is not imported."""
    here = Path(__file__).parent
    file = here / "configs" / "__main__.py" if name == "configs" else here / f"{name}.py"
    text = ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))) or ""
    paragraphs = [part for part in text.split("\n\n") if not part.startswith("python -m")]
    sentence = " ".join(paragraphs[0].split())
    return sentence.split(". ")[0].split(": ")[0].rstrip(".")


def versions() -> list[str]:
    """The lines of --version: ours, those of JAX and Python, and the devices."""
    import jax

    from xfresearch.runtime.hardware import cpu_model, git_commit, kinds_of

    commit = git_commit()
    try:
        devices = f"{kinds_of(jax.devices())}, processor {cpu_model()}"
    except RuntimeError as error:  # such as a driver that does not match
        devices = f"none: {' '.join(str(error).split())}"
    return [
        f"xfresearch {__version__}{f' (commit {commit})' if commit else ''}",
        f"jax {jax.__version__}, Python {platform.python_version()}, {platform.system()} {platform.machine()}",
        f"devices: {devices}",
    ]


def whole_parser() -> command.Parser:
    """A parser of all commands and their flags, of which `completion` makes its scripts."""
    whole = command.Parser(prog="xfresearch")
    whole.add_argument("--version", action="store_true", help="show the versions and the devices")
    commands = whole.add_subparsers(dest="command")
    for name in COMMANDS:
        commands.add_parser(name, parents=[module(name).parser()], add_help=False, help=summary(name))
    return whole


if __name__ == "__main__":
    start()
