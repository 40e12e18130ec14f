"""python -m xfresearch.completion bash|zsh

Prints a script that completes commands, flags and names of configs in a shell. It is made of the commands' own
parsers and does not start Python at each TAB: make it again after an upgrade.
"""

import shtab

from xfresearch.options import shipped
from xfresearch.runtime import command

EPILOG = """\
  xfresearch completion bash > ~/.local/share/bash-completion/completions/xfresearch
  xfresearch completion zsh > ~/.zfunc/_xfresearch      with fpath+=~/.zfunc before compinit in ~/.zshrc"""
# What a value is, by the word that stands for it in the help.
DIRECTORIES = ("DIR", "RUN", "WORKDIR", "NEW_WORKDIR", "FOLDER")
CONFIG = "FILE[:arg]"


def parser() -> command.Parser:
    """The flags of the command."""
    made = command.Parser(prog="python -m xfresearch.completion", description=__doc__, epilog=EPILOG)
    made.add_argument("shell", choices=("bash", "zsh"), help="the shell that will read the script")
    return made


def main(arguments: list[str]) -> None:
    from xfresearch.__main__ import whole_parser

    options = parser().parse_args(arguments)
    whole = whole_parser()
    _complete(whole)
    print(shtab.complete(whole, options.shell))


def _complete(parser) -> None:
    """Says of each argument of a parser, and of the parsers in it, what completes its value."""
    names = " ".join(shipped.shipped())
    configs = {
        "bash": "_xfresearch_configs",
        "zsh": f"_alternative 'configs:config:({names})' 'files:file:_files -g \"*.py\"'",
        "preamble": {"bash": f"_xfresearch_configs() {{ compgen -W '{names}' -- $1; compgen -f -X '!*.py' -- $1; }}"},
    }
    for action in parser._actions:  # as shtab does: argparse has no public list of them
        if isinstance(action.choices, dict):
            for each in action.choices.values():
                _complete(each)
        elif action.metavar == CONFIG:
            action.complete = configs
        elif action.metavar in DIRECTORIES:
            action.complete = shtab.DIRECTORY
        elif action.metavar == "FILE":
            action.complete = shtab.FILE


if __name__ == "__main__":
    command.run(main)
