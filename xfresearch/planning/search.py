"""Searches meshes, recomputation and batch sizes: plans all of them by formula, then compiles the best ones."""

from dataclasses import replace
from itertools import product

from xfresearch.models.model_config import mixtures
from xfresearch.options.fields import with_values
from xfresearch.planning import compiling, plans
from xfresearch.planning.topologies import Topology, gpus, tpu_devices
from xfresearch.run_config.config import Config
from xfresearch.runtime.errors import UserError
from xfresearch.sharding.letters import row_parts

COMPILED = 4  # the search ends after it has compiled this many plans that fit
BATCHES = (1, 2, 4)  # multiples of the config's batch size, or of the smallest one that gives every device a row
LARGEST_TENSOR = 16  # tensor parallelism over more devices than this has never been faster
LONG = 8192  # sequence length in tokens from which on context parallelism is tried
MARGIN = 1.1  # a plan may exceed the memory by this factor according to the formula, which is rough


def search(config: Config, topology: Topology, tokens: float) -> dict:
    """{"tried": rows, "compiled": rows (both best first), "best": the best plan or None}.

    Raises UserError if no mesh fits the config.
    """
    config = compiling.prepare(config)
    devices = tpu_devices(topology) if topology.tpu else gpus(topology)
    tried = by_formula(config, topology, tokens, devices)
    margin = MARGIN if topology.tpu else 1
    fitting = [(c, p) for c, p in tried if p["memory"]["total"] <= margin * p["memory"]["available"]]
    fitting.sort(key=lambda pair: -pair[1]["utilisation"][0])
    rows = [row(plan) for _, plan in fitting]
    if not topology.tpu:
        return {"tried": rows, "compiled": [], "best": fitting[0][1] if fitting else None}
    compiled = _compile(fitting, topology, tokens, devices)
    fit = [plan for plan in compiled if plan["memory"]["fits"]]
    fit.sort(key=lambda plan: -plan["utilisation"][0])
    refused = [plan for plan in compiled if not plan["memory"]["fits"]]
    return {"tried": rows, "compiled": [row(plan) for plan in fit + refused], "best": fit[0] if fit else None}


def by_formula(
    config: Config, topology: Topology, tokens: float, devices, batches=BATCHES
) -> list[tuple[Config, dict]]:
    """Every candidate that the model supports, with its plan by formula. Raises UserError if there is none."""
    from xfresearch.runtime.terminal import bar as progress_bar

    estimated = []
    reason = ""
    options = list(candidates(config, topology, batches))
    for candidate in progress_bar(options, desc="formula", unit="plan", disable=None):
        try:
            estimated.append((candidate, plans.formula_plan(candidate, topology, tokens, devices)))
        except UserError as error:  # the mesh does not fit the model
            reason = str(error)
    if not estimated:
        raise UserError(f"--search: no mesh of {topology.devices} devices fits this config; the last error: {reason}")
    return estimated


def _compile(fitting: list, topology: Topology, tokens: float, devices) -> list[dict]:
    """Compiles the best plans of the formula, until COMPILED of them fit or twice as many have been tried."""
    from xfresearch.runtime.terminal import bar as progress_bar

    compiled = []
    with progress_bar(total=COMPILED, desc="compiling", unit="plan", disable=None) as bar:
        for candidate, _ in fitting[: 2 * COMPILED]:
            plan = plans.compiled_plan(candidate, topology, tokens, devices)
            compiled.append(plan)
            bar.update(plan["memory"]["fits"])
            if sum(plan["memory"]["fits"] for plan in compiled) == COMPILED:
                break
    return compiled


def candidates(config: Config, topology: Topology, batches):
    """Configs to try: every combination of a mesh of all devices, recomputation and batch size."""
    for sizes, remat, times in product(meshes(config, topology.devices), ("none", "dots", "full"), batches):
        rows = row_parts(sizes) * config.training.accumulate
        smallest = -(-config.batch_size // rows) * rows
        training = with_values(config.training, {"remat": remat})
        mesh = with_values(config.mesh, sizes)
        yield replace(config, batch_size=smallest * times, training=training, mesh=mesh)


def meshes(config: Config, devices: int) -> list[dict[str, int]]:
    """All axis sizes to try; the product of each is the number of devices."""
    experts = max((moe.experts for moe in mixtures(config.model)), default=1)
    contexts = [n for n in _divisors(devices) if n == 1 or config.sequence_length // n >= LONG // 2]
    sizes = []
    for tensor, expert, context in product(_divisors(devices, LARGEST_TENSOR), _divisors(experts), contexts):
        if devices % (tensor * expert * context):
            continue
        rest = devices // (tensor * expert * context)
        for data in _divisors(rest, config.mesh.data if config.mesh.data > 0 else rest):
            sizes.append({"data": data, "fsdp": rest // data, "expert": expert, "tensor": tensor, "context": context})
    return sizes


def _divisors(n: int, most: int | None = None) -> list[int]:
    return [d for d in range(1, min(n, most or n) + 1) if n % d == 0]


def row(plan: dict) -> dict:
    """One row of a table of plans."""
    return {
        "mesh": {axis: size for axis, size in plan["mesh"].items() if size > 1},
        "remat": plan["remat"],
        "batch": plan["batch"]["sequences"],
        "fits": plan["memory"]["fits"],
        "memory": plan["memory"]["total"] / plan["memory"]["available"],
        "step_seconds": plan.get("step_seconds"),
        "utilisation": plan.get("utilisation"),
    }
