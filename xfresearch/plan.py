"""python -m xfresearch.plan --config FILE[:arg] --topology NAME [--mesh fsdp=64,tensor=4] [--config.key=value ...]

Says what a training step costs on a machine that is not here: compiles it for the TPUs named, and prints memory, FLOPs,
collectives and an estimate of the time. Ends with exit code 1 where it does not fit.
"""

import sys

from xfresearch import command

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
    parser.add_argument("--slices", metavar="N", type=int, default=1, help="slices of that topology (default 1)")
    parser.add_argument("--mesh", metavar="AXIS=N,...", default="", help="same as --config.mesh.AXIS=N for each axis")
    parser.add_argument("--tokens", metavar="N", type=float, default=1e12, help="budget for the hours (default 1e12)")
    parser.add_argument("--search", action="store_true", help="try meshes, recomputation and batch sizes")
    parser.add_argument("--hlo", metavar="FILE", default="", help="also write the compiled program's text")
    parser.add_argument("--json", metavar="FILE", help="also write the plan as JSON")
    return parser.parse_known_args(arguments)


def mesh_overrides(text: str) -> list[str]:
    """'fsdp=64,tensor=4' as overrides of the config."""
    from xfresearch.errors import UserError

    found = []
    for word in filter(None, text.split(",")):
        axis, _, size = word.partition("=")
        if not size.lstrip("-").isdigit():
            raise UserError(f"--mesh={text}: {word!r} is not AXIS=N")
        found.append(f"--config.mesh.{axis.strip()}={size}")
    return found


def main(arguments: list[str]) -> None:
    options, overrides = parse(arguments)
    from xfresearch.errors import UserError
    from xfresearch.planning import topologies

    if options.search and not options.topology:
        raise UserError("--search needs --topology NAME")
    if not options.topology and not options.mesh:
        raise UserError("--topology NAME, --mesh AXIS=N,... or both are needed (see --help)")
    for option, path in (("--hlo", options.hlo), ("--json", options.json)):
        if path:  # said now, not after minutes of compiling
            command.check_output(option, path)
    topology = options.topology and topologies.parse(options.topology, options.slices)
    if not topology or topology.tpu:
        topologies.set_environment()

    from xfresearch import config_io

    config = config_io.parse(["--config", options.config, *mesh_overrides(options.mesh), *overrides])
    found = {"config": options.config, "overrides": [*mesh_overrides(options.mesh), *overrides]}
    found |= run(config, topology, options)
    if options.json:
        command.write_json(options.json, found)
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
