"""python -m xfresearch.planning.accounting [--json FILE]

Compares a plan's memory of one device with that of the update compiled for this machine's CPU, for small models of 12
layers, whose activations take most of the memory, as in large ones. It is compiled with the schedule that holds the least
memory. By default XLA begins operations on a CPU as early as it can, so that its threads compute at the same time, and holds
their results longer. docs/plan.md has the table.
"""

from dataclasses import dataclass

from xfresearch.runtime.command import Parser, run
from xfresearch.runtime.files import write_json

SIZES = ("model.vocab_size=4096", "model.width=128", "model.depth=12", "batch_size=16", "sequence_length=128")
KERNELS = ("training.attention_kernel=plain", "training.expert_kernel=ragged", "training.layers=scan")
WITHIN = 0.10  # the largest error that is expected
SCHEDULE = {"xla_cpu_scheduler_type": "CPU_SCHEDULER_TYPE_MEMORY_OPTIMIZED"}


@dataclass(frozen=True)
class Case:
    config: str
    overrides: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        return " ".join((self.config, *self.overrides))


CASES = (
    Case("gpt2"),
    Case("llama"),
    Case("gptj"),
    Case("palm"),
    Case("dyt"),
    Case("all_attention"),
    Case("no_query"),
    Case("normless"),
    Case("vanilla_2017_decoder"),
    Case("llama", ("training.remat=dots",)),
    Case("gpt2", ("model.vocab_size=16000", "training.accumulate=2")),
    Case("moe"),
    Case("llama", ("training.remat=full",)),
    Case("t5", ("model.stacks.encoder.depth=12", "source_length=128")),
)


def compare(case: Case) -> tuple[float, float]:
    """Bytes of the update: (by the plan's formula, compiled)."""
    from xfresearch.planning import compiling, formula
    from xfresearch.run_config.config_files import parse
    from xfresearch.sharding.mesh import make_mesh

    overrides = [f"--config.{option}" for option in (*SIZES, *KERNELS, *case.overrides)]
    config = compiling.prepare(parse(["--config", f"{case.config}:tiny", *overrides]))
    mesh = make_mesh(config, _one_device())
    compiled = compiling.compile_step(compiling.trace(config, mesh)[1], options=SCHEDULE)
    assert isinstance(compiled, compiling.Compiled), "a tiny model fits"
    accounted = formula.estimate_step(config, dict(mesh.shape)).memory
    return sum(accounted.values()), compiled.arguments + compiled.temporary + compiled.outputs


def _one_device() -> list:
    import jax

    return jax.devices("cpu")[:1]


def main(arguments: list[str]) -> None:
    from xfresearch.planning.report import table
    from xfresearch.runtime.terminal import bar

    parser = Parser(prog="python -m xfresearch.planning.accounting", description=__doc__)
    parser.add_argument("--json", metavar="FILE", help="also write the figures as JSON")
    options = parser.parse_args(arguments)
    cases = bar(CASES, desc="compiling", unit="update", disable=None)
    compared = {case.name: compare(case) for case in cases}
    rows = [("config", "plan, MB", "compiled, MB", "ratio")]
    rows += [(name, f"{a / 1e6:.0f}", f"{b / 1e6:.0f}", f"{a / b:.3f}") for name, (a, b) in compared.items()]
    print(table(rows))
    if options.json:
        write_json(options.json, compared)


if __name__ == "__main__":
    run(main)
