"""python -m xfresearch.planning.named --json docs/data/scale.json

Compiles the named plans of docs/plan.md, one at a time, each in a separate process, and writes each result as soon as
it is ready. Plans that are already in the file are skipped (--again compiles them too). Needs libtpu (make libtpu), and
takes hours on two cores.
"""

import datetime
import json
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from xfresearch.options import shipped
from xfresearch.runtime.command import Parser, run
from xfresearch.runtime.errors import UserError
from xfresearch.runtime.files import write_rows

ROOT = Path(__file__).parents[2]
FULL = "--config.training.remat=full"
LIMIT = 3 * 3600  # time limit of one plan, in seconds
TRIES = 4  # meshes to compile at most, until one fits


@dataclass(frozen=True)
class Named:
    group: str
    config: str
    topology: str
    overrides: tuple[str, ...] = ()  # (): the formula chooses the mesh
    published: float = 0  # model-FLOPs utilisation that MaxText reports for this shape and machine
    wanted: float = 0  # utilisation that the estimate without overlap must reach (test_named.py)

    @property
    def name(self) -> str:
        return " ".join((self.config, self.topology, *self.overrides))


def overrides(batch: int, mesh: str, *more: str) -> tuple[str, ...]:
    return (f"--mesh={mesh}", f"--config.batch_size={batch}", *more)


# MaxText's figures are from its docs (tiering, configs of v5p and v6e). They count half of causal attention.
LARGE = (
    Named("large", "configs/llama.py:70b", "v5p:8x8x8", overrides(1024, "fsdp=512", FULL), 0.654, 0.5),
    Named("large", "configs/llama.py:70b", "v6e:16x16", overrides(512, "fsdp=256", FULL), 0.503, 0.5),
    Named("large", "configs/mixtral_8x7b.py", "v5p:4x4x8", overrides(1024, "fsdp=128", FULL), 0.526, 0.4),
    Named("large", "configs/mixtral_8x7b.py", "v6e:16x16", overrides(1536, "fsdp=256", FULL), 0.352, 0.4),
)
WEAK = tuple(
    Named("weak scaling", "configs/llama.py", topology, overrides(4 * chips, f"fsdp={chips}", FULL))
    for topology, chips in (("v5p:2x2x4", 16), ("v5p:4x4x4", 64), ("v5p:4x8x8", 256), ("v5p:8x8x8", 512))
)
DEPTH = tuple(
    Named("depth", "configs/llama.py", "v5p:2x2x4", overrides(64, "fsdp=16", FULL, f"--config.model.depth={depth}"))
    for depth in (16, 64)
)
TOPOLOGIES = ("v5e:8x8", "v5p:4x4x4", "v6e:8x8")
# playground's model is small, and the others but variants are for laptops, in float32. No plan of a model with an encoder
# or of bert was compiled.
NOT_PLANNED = ("variants", "brody_majority", "facts", "playground", "vanilla_2017", "t5", "bart", "bert")


def every_config() -> tuple[Named, ...]:
    """Every named config on three machines."""
    names = [name for name in shipped.names() if name not in NOT_PLANNED]
    return tuple(Named("every config", f"configs/{name}.py", topology) for name in names for topology in TOPOLOGIES)


def named() -> tuple[Named, ...]:
    return (*LARGE, *DEPTH, *WEAK, *every_config())


def candidates(plan: Named) -> list[tuple[str, ...]]:
    """Overrides (mesh and remat) to try, at the config's batch size or the next larger one that the mesh allows.

    These are the fastest that fit by the formula, then the one that needs the least memory, since the formula may be
    wrong.
    """
    from xfresearch.planning import compiling, search, topologies
    from xfresearch.run_config.config_files import parse

    topologies.set_environment()
    topology = topologies.parse(plan.topology)
    config = compiling.prepare(parse(["--config", str(ROOT / plan.config)]))
    found = search.by_formula(config, topology, 1e12, topologies.tpu_devices(topology), batches=(1,))
    return ranked([plan for _, plan in found])


def ranked(plans: list[dict]) -> list[tuple[str, ...]]:
    """Overrides of the best TRIES plans, in the order that `candidates` describes."""
    from xfresearch.planning import search

    fitting = [one for one in plans if one["memory"]["total"] <= search.MARGIN * one["memory"]["available"]]
    fitting.sort(key=lambda one: -one["utilisation"][0])
    smallest = min(plans, key=lambda one: one["memory"]["total"])
    return list(dict.fromkeys(_overrides_of(one) for one in (*fitting[: TRIES - 1], smallest)))


def _overrides_of(plan: dict) -> tuple[str, ...]:
    mesh = ",".join(f"{axis}={size}" for axis, size in plan["mesh"].items())
    return overrides(plan["batch"]["sequences"], mesh, f"--config.training.remat={plan['remat']}")


def compile_one(plan: Named) -> dict:
    """The compiled plan. If the formula chooses the mesh, this is the first candidate that fits, or the last one."""
    try:
        tries = [plan.overrides] if plan.overrides else candidates(plan)
    except UserError as error:
        return {"config": plan.config, "overrides": [], "error": str(error)}
    for options in tries:
        result = run_plan(plan, options)
        if "error" in result or result["memory"]["fits"]:
            break
    return result


def run_plan(plan: Named, options: tuple[str, ...]) -> dict:
    """The plan from the command line, run in a separate process; {"error": ...} if it writes no plan."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "plan.json"
        command = [
            sys.executable,
            "-m",
            "xfresearch.plan",
            "--config",
            str(ROOT / plan.config),
            "--topology",
            plan.topology,
        ]
        try:
            done = subprocess.run([*command, *options, "--json", str(file)], capture_output=True, text=True, timeout=LIMIT)
        except subprocess.TimeoutExpired:
            return {"error": f"no plan after {LIMIT / 3600:g} hours", "config": plan.config, "overrides": list(options)}
        result = json.loads(file.read_text()) if file.exists() else {"error": done.stderr.strip()[-300:]}
    return result | {"config": plan.config, "overrides": list(options)}


def main(arguments: list[str]) -> None:
    parser = Parser(prog="python -m xfresearch.planning.named", description=__doc__)
    parser.add_argument("--json", metavar="FILE", required=True, help="file of results, read first and then updated")
    parser.add_argument("--only", metavar="WORD", default="", help="only plans whose group or name contains WORD")
    parser.add_argument("--again", action="store_true", help="also compile plans that are in the file")
    options = parser.parse_args(arguments)
    from xfresearch.runtime.hardware import git_commit, versions
    from xfresearch.runtime.terminal import bar

    file = Path(options.json)
    rows = json.loads(file.read_text())["rows"] if file.exists() else {}
    selected = [plan for plan in named() if options.only in f"{plan.group} {plan.name}"]
    if not selected:
        groups = ", ".join(dict.fromkeys(plan.group for plan in named()))
        raise UserError(f"--only={options.only} is not allowed: it must be a part of a group ({groups}) or name of a plan")
    missing = [plan for plan in selected if options.again or plan.name not in rows]
    for plan in bar(missing, desc="plans", unit="plan", disable=None):
        result = compile_one(plan)
        about = {"date": datetime.date.today().isoformat(), "commit": git_commit(), "versions": versions()}
        rows[plan.name] = {"group": plan.group, "published": plan.published, "wanted": plan.wanted, **about, **result}
        write_rows(file, rows)


if __name__ == "__main__":
    run(main)
