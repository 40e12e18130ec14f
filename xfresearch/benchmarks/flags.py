"""Flags that the operations share, and the file of figures that they write."""

from xfresearch.evaluation.held_out import at_least
from xfresearch.runtime.files import write_json

PATHS = ("json", "torch_python")  # options that are paths of one machine


def add_sizes(parser, sizes: dict[str, int]) -> None:
    """Adds one flag per size. Those with the default 0 may be 0, the others are at least 1."""
    for name, default in sizes.items():
        kind = at_least(1 if default else 0)
        parser.add_argument(f"--{name}", type=kind, default=default, metavar="N", help=f"default {default}")


def add_json(parser) -> None:
    parser.add_argument("--json", metavar="FILE", help="also write the figures to this file")


def write_figures(options, figures: dict) -> None:
    """Writes the figures to the file of --json, if it is given, with the command's options, machine, versions and commit."""
    if options.json:
        from xfresearch.runtime.hardware import environment

        given = {name: value for name, value in vars(options).items() if name not in PATHS}
        write_json(options.json, {"arguments": given} | environment() | figures)


def read(name: str, overrides: list[str]):
    """The config with its vocabulary, of which no data are read."""
    from xfresearch.planning.compiling import prepare
    from xfresearch.run_config.config_files import parse

    return prepare(parse(["--config", name, *overrides]))
