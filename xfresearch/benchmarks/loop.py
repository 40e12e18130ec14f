"""The training loop beside bare updates in a row: what reading and placing batches, dispatching, metrics and progress add.

    python -m xfresearch.bench loop --config gpt2:3m --config.batch_size=4 --updates 60

Evaluation, checkpoints and logging are off. The text is Python's own source as bytes, whatever the config says, so that
nothing is downloaded. A round is a run in a new directory and as many bare updates of one batch, which are dispatched in a
row; each of the two is first in every other round. Columns: medians of the time of an update, and the speed of the loop
relative to that of bare updates: the median over rounds, with quartiles.
"""

import time
from collections.abc import Mapping

from xfresearch.benchmarks.flags import add_json, add_sizes, write_figures
from xfresearch.benchmarks.rounds import print_table, quartiles
from xfresearch.training.callbacks import Callback

UNTIMED = 3  # updates at the beginning of each round
COLUMNS = {"bare ms": "{bare ms:.2f}", "loop ms": "{loop ms:.2f}", "ratio": "{ratio:.3f}"}
COLUMNS |= {"quartiles": "{ratio_low:.3f} to {ratio_high:.3f}", "config": "{config}"}
TEXT = {"corpus": ("python_stdlib",), "weights": (), "tokenizer": "bytes"}


def add_flags(parser) -> None:
    more = "a config; --config.key=value changes a key of it"
    parser.add_argument("--config", required=True, metavar="FILE[:arg]", help=more)
    add_sizes(parser, {"updates": 20, "rounds": 12})
    add_json(parser)


def run(a) -> None:
    import numpy as np

    from xfresearch.data.labels import trains_on_labels
    from xfresearch.data.tokenizers import tokenizer_for
    from xfresearch.runtime.progress import stage

    config = quiet(a.config, a.overrides, a.updates)
    tokenizer = None if trains_on_labels(config.data) else tokenizer_for(config.data)
    rounds = []
    with stage("timing", a.rounds + 1, "rounds") as progress:
        for number in range(a.rounds + 1):
            first, second = (_seconds_bare, _seconds_in_loop)[:: -1 if number % 2 else 1]
            timed = (first(config, tokenizer), second(config, tokenizer))[:: -1 if number % 2 else 1]
            rounds += [timed] if number else []  # the first round compiles
            progress.update(1)
    bare_R, loop_R = np.array(rounds).T
    row = {"bare ms": 1e3 * np.median(bare_R), "loop ms": 1e3 * np.median(loop_R), **quartiles("ratio", bare_R / loop_R)}
    print_table(COLUMNS, [row | {"config": a.config}])
    write_figures(a, {"row": row, "rounds": rounds})


def quiet(name: str, overrides: list[str], updates: int):
    """The config of a run of UNTIMED and then `updates` updates, without evaluation, checkpoints and logging."""
    from dataclasses import replace

    from xfresearch.benchmarks.flags import read
    from xfresearch.data.labels import trains_on_labels

    config, steps = read(name, overrides), UNTIMED + updates
    off = {"evaluation": replace(config.evaluation, every=0), "checkpoint": replace(config.checkpoint, every=steps)}
    off["log"] = replace(config.log, every=steps, panel=0)
    data = config.data if trains_on_labels(config.data) else replace(config.data, **TEXT)
    return replace(config, steps=steps, data=data, **off)


def _seconds_bare(config, tokenizer) -> float:
    """Seconds per update of the compiled program alone, on one batch. The updates are dispatched in a row."""
    import jax

    from xfresearch.data.pipeline import Batches
    from xfresearch.sharding.mesh import make_mesh
    from xfresearch.sharding.placing import batch_placer
    from xfresearch.training import loop
    from xfresearch.training.hyperparameters import hyper_of
    from xfresearch.training.program import shared_program

    loop.setup_jax(config)
    mesh = make_mesh(config)
    program = shared_program(config, mesh)
    _, place = batch_placer(mesh, config.batch_size, config.sequence_length)
    state, batch = program.jit_init(hyper_of(config)), place(Batches(config, tokenizer=tokenizer).batch(0))
    for step in range(config.steps):
        if step == UNTIMED:
            jax.block_until_ready(state)
            began = time.perf_counter()
        state, _ = program.compiled_update(state, batch)
    jax.block_until_ready(state)
    return (time.perf_counter() - began) / (config.steps - UNTIMED)


def _seconds_in_loop(config, tokenizer) -> float:
    """Seconds per update of a run in a new directory, which is removed."""
    import tempfile

    from xfresearch.training import loop

    times = Times()
    with tempfile.TemporaryDirectory() as workdir:
        loop.train(config, workdir, tokenizer, callbacks=[times])
    return (times.of_update[config.steps] - times.of_update[UNTIMED]) / (config.steps - UNTIMED)


class Times(Callback):
    """When the loop had the metrics of each update, `of_update` {step: seconds}."""

    def __init__(self):
        self.of_update: dict[int, float] = {}

    def on_step(self, step: int, figures: Mapping[str, float]) -> None:
        self.of_update[step] = time.perf_counter()
