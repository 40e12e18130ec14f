"""Times one hot operation of implementations, models or configs, side by side.

    python -m xfresearch.bench attention --memory 512
    python -m xfresearch.bench cross_entropy --vocab 32000 --rows 512,1024,4096
    python -m xfresearch.bench grouped_matmul --experts 8
    python -m xfresearch.bench import_hf --layers 16
    python -m xfresearch.bench decode runs/a runs/b
    python -m xfresearch.bench decode --config gpt2 --config.model.dtype=float32 --against transformers
    python -m xfresearch.bench update --config gpt2:3m --config moe:3m
    python -m xfresearch.bench loop --config gpt2:3m
    python -m xfresearch.bench save --megabytes 1024
    python -m xfresearch.bench gpu --list

Every round calls each row once, so that a busy machine slows all of them equally. Each operation has its own --help.
"""

from typing import Any

from xfresearch.benchmarks import decode, gpu, import_hf, loop, save, update
from xfresearch.benchmarks.kernels import KERNELS
from xfresearch.runtime.command import Parser, run

OPERATIONS: dict[str, Any] = KERNELS | {"import_hf": import_hf, "decode": decode, "update": update}
OPERATIONS |= {"loop": loop, "save": save, "gpu": gpu}
OVERRIDABLE = ("decode", "update", "loop")  # operations that take --config.key=value


def parser() -> Parser:
    """The flags of the command."""
    made = Parser(prog="python -m xfresearch.bench", description=__doc__)
    operations = made.add_subparsers(dest="operation", required=True, metavar="|".join(OPERATIONS))
    for name, operation in OPERATIONS.items():
        operation.add_flags(operations.add_parser(name, description=operation.__doc__))
    return made


def parse(arguments):
    options, overrides = parser().parse_known_args(arguments)
    options.overrides = overrides
    if options.overrides and options.operation not in OVERRIDABLE:
        parser().error(f"unrecognized arguments: {' '.join(options.overrides)}")
    return options


def main(arguments: list[str]) -> None:
    options = parse(arguments)
    OPERATIONS[options.operation].run(options)


if __name__ == "__main__":
    run(main)
