"""python -m xfresearch

Lists the commands with the first sentence of their help.
"""

import ast
from pathlib import Path

from xfresearch.runtime.command import run
from xfresearch.runtime.errors import UserError, nearest

COMMANDS = ("train", "evaluate", "generate", "compare", "convert", "analyze", "edit", "study", "plan", "bench")


def main(arguments: list[str]) -> None:
    for word in arguments:
        if word in COMMANDS:
            raise UserError(f"{word} is not allowed here: the command is python -m xfresearch.{word}")
        if word not in ("--help", "-h"):
            raise UserError(f"{word}: there is no such command{nearest(word, COMMANDS)} (python -m xfresearch lists them)")
    print("usage: python -m xfresearch.COMMAND [--help]\n")
    for name in COMMANDS:
        print(f"  python -m xfresearch.{name:10}{summary(name)}")


def summary(name: str) -> str:
    """The first sentence of a command's docstring, without the lines of its usage. The module is not imported."""
    text = ast.get_docstring(ast.parse(Path(__file__).with_name(f"{name}.py").read_text(encoding="utf-8")))
    paragraphs = [part for part in text.split("\n\n") if not part.startswith("python -m")]
    sentence = " ".join(paragraphs[0].split())
    return sentence.split(". ")[0].split(": ")[0].rstrip(".")


if __name__ == "__main__":
    run(main)
