"""python -m xfresearch.planning.named --json docs/data/scale.json

Compiles the named plans of docs/scale.md, one after the other, each in a process of its own, and writes every result as it
comes. What the file already has is not compiled again, unless asked for. Needs libtpu (make libtpu), and hours on two cores.
"""

import datetime
import json
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from xfresearch.command import Parser, run
from xfresearch.errors import UserError
from xfresearch.files import write_rows

ROOT = Path(__file__).parents[2]
FULL = "--config.training.remat=full"
LIMIT = 3 * 3600  # seconds of one plan
TRIES = 4


@dataclass(frozen=True)
class Named:
    group: str
    config: str
    topology: str
    overrides: tuple[str, ...] = ()  # () where the mesh is to be chosen by formula
    published: float = 0  # model-FLOPs utilisation that MaxText reports for this shape and machine
    wanted: float = 0  # utilisation that the not overlapped estimate is to reach

    @property
    def name(self) -> str:
        return " ".join((self.config, self.topology, *self.overrides))


def overrides(batch: int, mesh: str, *more: str) -> tuple[str, ...]:
    return (f"--mesh={mesh}", f"--config.batch_size={batch}", *more)


# MaxText's figures: its docs (tiering, configs of v5p and v6e), causal attention counted in half.
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
NOT_PLANNED = ("__init__", "common", "variants", "brody_majority")  # the last has 600 parameters, in float32


def every_config() -> tuple[Named, ...]:
    """Every named config on three machines."""
    files = sorted(path for path in (ROOT / "configs").glob("*.py") if path.stem not in NOT_PLANNED)
    return tuple(Named("every config", f"configs/{path.name}", topology) for path in files for topology in TOPOLOGIES)


def named() -> tuple[Named, ...]:
    return (*LARGE, *DEPTH, *WEAK, *every_config())


def chosen(plan: Named) -> list[tuple[str, ...]]:
    """Overrides with meshes and recomputations to try, at the config's batch or the next larger one: the fastest that fit
    by formula, and last what takes the least memory, since the formula may be wrong."""
    from xfresearch.config.files import parse
    from xfresearch.planning import program, search, topologies

    topologies.set_environment()
    topology = topologies.parse(plan.topology)
    config = program.ready(parse(["--config", str(ROOT / plan.config)]))
    found = search.by_formula(config, topology, 1e12, topologies.tpu_devices(topology), batches=(1,))
    return ranked([plan for _, plan in found])


def ranked(found: list[dict]) -> list[tuple[str, ...]]:
    """Overrides of the TRIES plans by formula that `chosen` speaks of."""
    from xfresearch.planning import search

    fitting = [one for one in found if one["memory"]["total"] <= search.MARGIN * one["memory"]["available"]]
    fitting.sort(key=lambda one: -one["utilisation"][0])
    smallest = min(found, key=lambda one: one["memory"]["total"])
    return list(dict.fromkeys(_overrides_of(one) for one in (*fitting[: TRIES - 1], smallest)))


def _overrides_of(found: dict) -> tuple[str, ...]:
    mesh = ",".join(f"{axis}={size}" for axis, size in found["mesh"].items())
    return overrides(found["batch"]["sequences"], mesh, f"--config.training.remat={found['remat']}")


def compile_one(plan: Named) -> dict:
    """The plan as compiled; of meshes to choose from the first that fits."""
    try:
        several = [plan.overrides] if plan.overrides else chosen(plan)
    except UserError as error:
        return {"config": plan.config, "overrides": [], "error": str(error)}
    for options in several:
        found = run_plan(plan, options)
        if "error" in found or found["memory"]["fits"]:
            break
    return found


def run_plan(plan: Named, options: tuple[str, ...]) -> dict:
    """The plan by the command line, in a process of its own; {"error": ...} where that ends otherwise."""
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
        done = subprocess.run([*command, *options, "--json", str(file)], capture_output=True, text=True, timeout=LIMIT)
        found = json.loads(file.read_text()) if file.exists() else {"error": done.stderr.strip()[-300:]}
    return found | {"config": plan.config, "overrides": list(options)}


def main(arguments: list[str]) -> None:
    parser = Parser(prog="python -m xfresearch.planning.named", description=__doc__)
    parser.add_argument("--json", metavar="FILE", required=True, help="where results are kept, and looked for first")
    parser.add_argument("--only", metavar="WORD", default="", help="plans whose group or name has the word")
    parser.add_argument("--again", action="store_true", help="compile also what the file has")
    options = parser.parse_args(arguments)
    from tqdm import tqdm

    from xfresearch.hardware import git_commit, versions

    file = Path(options.json)
    rows = json.loads(file.read_text())["rows"] if file.exists() else {}
    asked = [plan for plan in named() if options.only in f"{plan.group} {plan.name}"]
    waiting = [plan for plan in asked if options.again or plan.name not in rows]
    for plan in tqdm(waiting, desc="plans", unit="plan", file=sys.stderr, disable=None):
        found = compile_one(plan)
        about = {"date": datetime.date.today().isoformat(), "commit": git_commit(), "versions": versions()}
        rows[plan.name] = {"group": plan.group, "published": plan.published, "wanted": plan.wanted, **about, **found}
        write_rows(file, rows)


if __name__ == "__main__":
    run(main)
