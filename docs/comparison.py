"""python -m docs.comparison [--seeds N] [--only WORD,...] [--json FILE] [--config.key=value ...]

Trains every variant at about 3 M parameters on the same tokens with several seeds, and measures its speed relative to
`gpt2`.

The variants are those of configs/variants.py (each one choice away from its base) and every named config at :3m. For a
given seed, all variants train on the same batches. A variant is skipped if the output file already has its results for
the same config.
"""

import json
import math
import statistics
import time
from dataclasses import replace
from functools import cache
from pathlib import Path

from configs.variants import VARIANTS
from xfresearch.command import Parser, run
from xfresearch.config.comparing import fingerprint
from xfresearch.config.files import parse
from xfresearch.config.run import Config
from xfresearch.errors import UserError
from xfresearch.files import write_rows
from xfresearch.statistics import summary

BASELINE = "configs/gpt2.py:3m"
ROUNDS = 7


def names() -> list[str]:
    """The --config arguments of all variants, the baseline first."""
    files = [
        file for file in sorted(Path("configs").glob("*.py")) if ":3m" in file.read_text() and file.stem != "common"
    ]
    named = [f"configs/{file.name}:3m" for file in files if file.stem != "variants"]
    variants = [f"configs/variants.py:{name}" for name in ("base", *VARIANTS)]
    return [BASELINE, *(name for name in named if name != BASELINE), *variants]


def compare(seeds: int, overrides: list[str], output: str, only: list[str] = ()) -> dict:
    """{name: row} of all variants, or of those whose names contain a word of `only`. Writes `output` after each one."""
    from tqdm import tqdm

    path = Path(output)
    rows = json.loads(path.read_text())["rows"] if path.exists() else {}
    for word in only:
        if not any(word in name for name in names()):
            raise UserError(f"--only={word} is not allowed: it must be a part of one of {', '.join(names())}")
    selected = [name for name in names() if not only or any(word in name for word in only)]
    baseline = cache(lambda: Trial(_with_vocabulary(parse(["--config", BASELINE, *overrides]))).timer())
    with tqdm(selected, unit="variant", disable=None) as bar:
        for name in bar:
            bar.set_postfix_str(name)
            config = _with_vocabulary(parse(["--config", name, *overrides]))
            own = fingerprint(config, without=("seed",))
            row = rows.get(name, {})
            if row.get("config") != own or len(row["bits_per_byte"]) < seeds:
                trial = Trial(config)
                row = {"config": own, "bits_per_byte": [trial.train(seed) for seed in range(seeds)]}
                row["relative_speed"] = relative_speed(trial.timer(), baseline())
                rows[name] = row | environment()
                write_rows(output, rows)
    return rows


def environment() -> dict:
    """The date, machine, library versions and commit of a measurement."""
    from xfresearch.hardware import describe_machine, git_commit, versions

    return {
        "date": time.strftime("%Y-%m-%d"),
        "machine": describe_machine(),
        "versions": versions(),
        "commit": git_commit(),
    }


def table(rows: dict) -> str:
    """A text table: mean and standard deviation of validation bits per byte, and relative speed."""
    lines = [f"{'variant':45}{'bits per byte':>16}{'speed':>8}"]
    for name, row in rows.items():
        values = [math.nan if value is None else value for value in row["bits_per_byte"]]  # JSON has no NaN
        mean, deviation = summary(values)
        lines.append(f"{name:45}{mean:9.3f} +-{deviation:.3f}{row['relative_speed']:8.2f}")
    return "\n".join(lines)


def _with_vocabulary(config: Config) -> Config:
    from xfresearch.config.resolving import with_vocabulary
    from xfresearch.data.tokenizers import vocab_size

    return with_vocabulary(config, vocab_size(config.data))


class Trial:
    """One variant. Its programs are compiled once, for all seeds and the timing."""

    def __init__(self, config: Config):
        from xfresearch.data.pipeline import prepare
        from xfresearch.data.tokenizers import tokenizer_for
        from xfresearch.sharding.mesh import make_mesh
        from xfresearch.training import loop
        from xfresearch.training.hyper import hyper_of
        from xfresearch.training.program import shared_program

        loop.setup_jax(config)
        program = shared_program(config, make_mesh(config))
        self.config = config
        self.heldout = prepare(config, config.evaluation.split)
        self.byte_lengths = tokenizer_for(config.data).byte_lengths
        self.start = lambda seed: program.jit_init(hyper_of(replace(config, seed=seed)))
        self.step, self.evaluator = program.jit_update, program.evaluate

    def train(self, seed: int) -> float:
        """Validation bits per byte after training; NaN if training diverged."""
        from xfresearch.data.pipeline import Batches, evaluation_batches
        from xfresearch.evaluation import evaluate_batches

        batches = Batches(replace(self.config, seed=seed))
        state = self.start(seed)
        for number in range(self.config.steps):
            state, _ = self.step(state, batches.batch(number))
        heldout = evaluation_batches(self.heldout, self.config.batch_size, self.config.evaluation.final_sequences)
        return evaluate_batches(self.evaluator, state["params"], heldout, self.byte_lengths)["bits_per_byte"]

    def timer(self):
        """A function that runs one update and returns its seconds."""
        import jax

        from xfresearch.data.pipeline import Batches

        batch = Batches(self.config).batch(0)
        state, _ = self.step(self.start(0), batch)

        def run() -> float:
            nonlocal state
            start = time.perf_counter()
            state, _ = jax.block_until_ready(self.step(state, batch))
            return time.perf_counter() - start

        return run


def relative_speed(own, baseline) -> float:
    """Training tokens per second relative to the baseline, from two timers of updates on equal batches. The timers run
    alternately, so that a busy machine slows both equally."""
    ratios = []
    for _ in range(ROUNDS):
        seconds = own()
        ratios.append(baseline() / seconds)
    return statistics.median(ratios)


def main(arguments: list[str]) -> None:
    parser = Parser(prog="python -m docs.comparison", description=__doc__)
    parser.add_argument("--seeds", type=int, default=3, metavar="N", help="seeds of each variant (default 3)")
    parser.add_argument("--only", default="", metavar="WORD,...", help="only variants whose names contain a word")
    parser.add_argument("--json", default="docs/data/variants.json", metavar="FILE", help="output; keeps existing rows")
    options, overrides = parser.parse_known_args(arguments)
    rows = compare(options.seeds, overrides, options.json, [word for word in options.only.split(",") if word])
    print(table(rows))


if __name__ == "__main__":
    run(main)
