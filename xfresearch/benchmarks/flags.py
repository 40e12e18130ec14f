"""Flags that the operations share."""

from xfresearch.held_out import at_least


def add_sizes(parser, sizes: dict[str, int]) -> None:
    """Adds one flag per size. Those with the default 0 may be 0, the others are at least 1."""
    for name, default in sizes.items():
        kind = at_least(1 if default else 0)
        parser.add_argument(f"--{name}", type=kind, default=default, metavar="N", help=f"default {default}")


def add_json(parser) -> None:
    parser.add_argument("--json", metavar="FILE", help="also write the figures to this file")
