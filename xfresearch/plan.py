"""python -m xfresearch.plan --config FILE[:arg] --topology NAME [--mesh fsdp=64,tensor=4] [--config.key=value ...]

Says what a training step costs on a machine that is not here: compiles it for the TPUs named, and prints memory, FLOPs,
collectives and an estimate of the time. Ends with exit code 1 where it does not fit.
"""

import math
import re
import sys

from xfresearch import command
from xfresearch.files import check_output, write_json

EPILOG = """\
examples:
  python -m xfresearch.plan --config configs/mixtral_8x7b.py --topology v5p:4x4x8 --mesh fsdp=128
  python -m xfresearch.plan --config configs/llama.py --topology v5p-256 --search
  python -m xfresearch.plan --config configs/llama.py --topology h100:8x4 --mesh fsdp=32
  python -m xfresearch.plan --config configs/llama.py --mesh fsdp=16,tensor=4

--mesh alone checks shapes and shardings for TPUs, and compiles nothing. What each figure is: docs/plan.md."""


def parse(arguments: list[str]):
    parser = command.Parser(prog="python -m xfresearch.plan", description=__doc__, epilog=EPILOG)
    parser.add_argument("--config", metavar="FILE[:arg]", required=True, help=command.CONFIG_HELP)
    parser.add_argument("--topology", metavar="NAME", help="v5p:4x4x8, v5p-256, '2x v6e:16x16', h100:8x4, ...")
    parser.add_argument("--slices", metavar="N", type=int, help="slices of that topology (default 1)")
    parser.add_argument("--mesh", metavar="AXIS=N,...", default="", help="same as --config.mesh.AXIS=N for each axis")
    parser.add_argument("--tokens", metavar="N", type=float, help="budget for the hours (default 1e12)")
    parser.add_argument("--search", action="store_true", default=None, help="try meshes, recomputation and batch sizes")
    parser.add_argument("--hlo", metavar="FILE", help="also write the compiled program's text")
    parser.add_argument("--json", metavar="FILE", help="also write the plan as JSON")
    options, overrides = parser.parse_known_args(arguments)
    check(options)
    options.slices, options.tokens = options.slices or 1, options.tokens or 1e12
    return options, overrides


def check(options) -> None:
    """UserError for options that do not go together; said now, not after minutes of compiling."""
    from xfresearch.errors import UserError

    if options.topology is None:
        for name in ("search", "slices", "tokens", "hlo"):
            if getattr(options, name) is not None:
                raise UserError(f"--{name} needs --topology NAME")
        if not options.mesh:
            raise UserError("--topology NAME, --mesh AXIS=N,... or both are needed (see --help)")
    if options.slices is not None and options.slices < 1:
        raise UserError(f"--slices={options.slices} is not allowed: it must be at least 1")
    if options.tokens is not None and not 0 < options.tokens < math.inf:
        raise UserError(f"--tokens={options.tokens:g} is not allowed: it must be more than 0, and finite")
    if options.hlo is not None and options.search:
        raise UserError(f"--hlo={options.hlo} is not allowed with --search: that compiles several programs")
    if options.hlo is not None:
        check_output("--hlo", options.hlo)


def mesh_overrides(text: str) -> list[str]:
    """'fsdp=64,tensor=4' as overrides of the config."""
    from xfresearch.errors import UserError

    found = {}
    for word in filter(None, text.split(",")):
        axis, _, size = (part.strip() for part in word.partition("="))
        if not re.fullmatch("-?[0-9]+", size):
            raise UserError(f"--mesh={text}: {word!r} is not AXIS=N")
        if axis in found:
            raise UserError(f"--mesh={text}: {axis} is there twice")
        found[axis] = f"--config.mesh.{axis}={size}"
    return list(found.values())


def main(arguments: list[str]) -> None:
    options, overrides = parse(arguments)
    from xfresearch.planning import topologies

    topology = None if options.topology is None else topologies.parse(options.topology, options.slices)
    if topology is None or topology.tpu:
        topologies.set_environment()

    from xfresearch.config import files

    config = files.parse(["--config", options.config, *mesh_overrides(options.mesh), *overrides])
    found = {"config": options.config, "overrides": [*mesh_overrides(options.mesh), *overrides]}
    found |= run(config, topology, options)
    if options.json:
        write_json(options.json, found)
    if not found["fits"]:
        sys.exit(1)


def run(config, topology, options) -> dict:
    """Prints the plan, or the plans that were searched, and returns them with `fits`."""
    from xfresearch.planning import plans, report, search

    if topology is None:
        plan = plans.check(config)
    elif options.search:
        found = search.search(config, topology, options.tokens)
        print(report.search_text(found))
        return found | {"fits": found["best"] is not None}
    else:
        plan = plans.make_plan(config, topology, options.tokens, options.hlo)
    print(report.text(plan))
    return plan | {"fits": plan["memory"]["fits"] if "memory" in plan else True}


if __name__ == "__main__":
    command.run(main)
