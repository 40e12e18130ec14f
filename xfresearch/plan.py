"""python -m xfresearch.plan --config FILE[:arg] --topology NAME [--mesh fsdp=64,tensor=4] [--config.key=value ...]

Estimates the cost of a training step on a machine that you do not have: compiles the step for the given TPUs, and
prints memory, FLOPs, collectives and the estimated time. The exit code is 1 if the step does not fit into memory.
"""

import math
import re
import sys

from xfresearch.runtime import command
from xfresearch.runtime.files import check_output, write_json

EPILOG = """\
examples:
  python -m xfresearch.plan --config mixtral_8x7b --topology v5p:4x4x8 --mesh fsdp=128
  python -m xfresearch.plan --config llama --topology v5p-256 --search
  python -m xfresearch.plan --config llama --topology h100:8x4 --mesh fsdp=32
  python -m xfresearch.plan --config llama --mesh fsdp=16,tensor=4

--mesh without --topology checks shapes and shardings for TPUs, and compiles nothing.
docs/plan.md explains each figure."""


def parser() -> command.Parser:
    """The flags of the command."""
    made = command.Parser(prog="python -m xfresearch.plan", description=__doc__, epilog=EPILOG)
    made.add_argument("--config", metavar="FILE[:arg]", required=True, help=command.CONFIG_HELP)
    made.add_argument("--topology", metavar="NAME", help="v5p:4x4x8, v5p-256, '2x v6e:16x16', h100:8x4, ...")
    made.add_argument("--slices", metavar="N", type=int, help="number of slices (default 1)")
    made.add_argument("--mesh", metavar="AXIS=N,...", default="", help="same as --config.mesh.AXIS=N for each axis")
    made.add_argument("--tokens", metavar="N", type=float, help="token budget to estimate hours for (default 1e12)")
    made.add_argument("--search", action="store_true", default=None, help="try meshes, remat and batch sizes")
    made.add_argument("--hlo", metavar="FILE", help="also write the text of the compiled program")
    made.add_argument("--json", metavar="FILE", help="also write the plan as JSON")
    return made


def parse(arguments: list[str]):
    options, overrides = parser().parse_known_args(arguments)
    check(options)
    options.slices = options.slices or 1
    options.tokens = options.tokens or 1e12
    return options, overrides


def check(options) -> None:
    """Raises UserError if options contradict each other, before minutes of compilation."""
    from xfresearch.runtime.errors import UserError

    if options.topology is None:
        for name in ("search", "slices", "tokens", "hlo"):
            if getattr(options, name) is not None:
                raise UserError(f"--{name} needs --topology NAME")
        if not options.mesh:
            raise UserError("--topology NAME, --mesh AXIS=N,... or both are required (see --help)")
    if options.slices is not None and options.slices < 1:
        raise UserError(f"--slices={options.slices} is not allowed: it must be at least 1")
    if options.tokens is not None and not 0 < options.tokens < math.inf:
        raise UserError(f"--tokens={options.tokens:g} is not allowed: it must be more than 0 and finite")
    if options.search and options.mesh:
        raise UserError(f"--mesh={options.mesh} is not allowed with --search, which tries every mesh of the machine")
    if options.hlo is not None and options.search:
        raise UserError(f"--hlo={options.hlo} is not allowed with --search, which compiles several programs")
    if options.hlo is not None:
        check_output("--hlo", options.hlo)


def mesh_overrides(text: str) -> list[str]:
    """The config overrides for 'fsdp=64,tensor=4'."""
    from xfresearch.runtime.errors import UserError

    overrides = {}
    for word in filter(None, text.split(",")):
        axis, _, size = (part.strip() for part in word.partition("="))
        if not re.fullmatch("-?[0-9]+", size):
            raise UserError(f"--mesh={text} is not allowed: {word!r} must have the form AXIS=N")
        if axis in overrides:
            raise UserError(f"--mesh={text} is not allowed: {axis} is given twice")
        overrides[axis] = f"--config.mesh.{axis}={size}"
    return list(overrides.values())


def main(arguments: list[str]) -> None:
    options, overrides = parse(arguments)
    from xfresearch.run_config import known_keys

    known_keys.check(["--config", options.config, *mesh_overrides(options.mesh), *overrides])
    from xfresearch.planning import topologies

    topology = None if options.topology is None else topologies.parse(options.topology, options.slices)
    if topology is None or topology.tpu:
        topologies.set_environment()

    from xfresearch.training import pretrained

    config = pretrained.parse(["--config", options.config, *mesh_overrides(options.mesh), *overrides])
    outcome = {"config": options.config, "overrides": [*mesh_overrides(options.mesh), *overrides]}
    outcome |= run(config, topology, options)
    if options.json:
        write_json(options.json, outcome)
    if not outcome["fits"]:
        sys.exit(1)


def run(config, topology, options) -> dict:
    """Prints the plan, or the results of the search, and returns it with the key `fits`."""
    from xfresearch.planning import plans, report, search

    if topology is None:
        plan = plans.check(config)
    elif options.search:
        outcome = search.search(config, topology, options.tokens)
        print(report.search_text(outcome))
        return outcome | {"fits": outcome["best"] is not None}
    else:
        plan = plans.make_plan(config, topology, options.tokens, options.hlo)
    print(report.text(plan))
    return plan | {"fits": plan["memory"]["fits"] if "memory" in plan else True}


if __name__ == "__main__":
    command.run(main)
