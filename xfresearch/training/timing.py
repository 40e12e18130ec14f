"""How long an update takes on this machine, for several configs in turns."""

import resource
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from xfresearch.options.comparing import fingerprint
from xfresearch.run_config.config import Config

DOCUMENTS = 3  # of a sequence of random tokens
UPDATES = 10  # of a turn
TURNS, MOST_TURNS = 3, 9  # the fewest and the most turns of each of two configs
AGREE = 1.03  # the most that the second fastest turn may take, relative to the fastest one


def random_batch(config: Config) -> dict[str, np.ndarray]:
    """A batch of random tokens, with the shapes and types of a run's batches. No data are read. With packed documents a
    sequence has DOCUMENTS of equal length."""
    from xfresearch.training.program import arrays_of

    B, L = config.batch_size, config.sequence_length
    text_BL = np.random.default_rng(config.seed).integers(config.model.vocab_size, size=(B, L + 1))
    documents = DOCUMENTS if config.data.packing == "documents" else 1
    document_L, position_L = np.divmod(np.arange(L), -(-L // documents))
    values = {"tokens": text_BL[:, :-1], "targets": text_BL[:, 1:], "positions": np.broadcast_to(position_L, (B, L))}
    values["segments"] = np.broadcast_to(1 + document_L, (B, L))
    values["prefix"] = values["positions"] < L // documents // 2
    arrays = arrays_of(config)
    return {name: values.get(name, np.ones((B, L))).astype(dtype) for name, dtype in arrays.items()} | _source(config)


def _source(config: Config) -> dict[str, np.ndarray]:
    """Random sources of the length of a run's, each read by all documents of its row; {} without an encoder."""
    if not config.source_length:
        return {}
    shape = (config.batch_size, config.source_length)
    tokens_BS = np.random.default_rng(config.seed + 1).integers(config.model.vocab_size, size=shape)
    positions_BS = np.broadcast_to(np.arange(shape[1]), shape)
    values = {"source": tokens_BS, "source_segments": np.ones(shape), "source_positions": positions_BS}
    return {name: value.astype(np.int32) for name, value in values.items()}


class Timer:
    """Each call runs one update of a config on random tokens, and returns its seconds. A first update has run before.

    runs: update as many runs of different seeds in one program (jax.vmap).
    compile_seconds: to trace and compile the update, or to read it from JAX's cache on disk.
    losses: of each update so far, before the parameters move.
    """

    def __init__(self, config: Config, runs: int = 1):
        import jax

        from xfresearch.sharding.mesh import make_mesh
        from xfresearch.sharding.partition import batch_sharding
        from xfresearch.training import loop
        from xfresearch.training.fitting import fitting_program
        from xfresearch.training.hyperparameters import hyper_of
        from xfresearch.training.program import stacked

        loop.setup_jax(config)
        mesh, batch = make_mesh(config), random_batch(config)
        program = fitting_program(config, mesh)
        if runs == 1:
            self._update, self._state = program.jit_update, program.jit_init(hyper_of(config))
            self._batch = jax.device_put(batch, batch_sharding(mesh))
        else:
            states = (program.jit_init(hyper_of(replace(config, seed=seed))) for seed in range(runs))
            self._update, self._state = program.mapped_update, stacked(*states)
            self._batch = jax.device_put({name: np.stack([value] * runs) for name, value in batch.items()})
        self.losses: list[float] = []
        began = time.perf_counter()
        self._compiled()
        self.compile_seconds = time.perf_counter() - began
        self()

    def __call__(self) -> float:
        import jax

        began = time.perf_counter()
        self._state, metrics = jax.block_until_ready(self._update(self._state, self._batch))
        seconds = time.perf_counter() - began
        self.losses.append(float(metrics["loss"].mean()))
        return seconds

    def memory_bytes(self) -> int:
        """Bytes that the compiled update needs on a device: state, batch, outputs and temporary arrays."""
        sizes = self._compiled().memory_analysis()
        outputs = sizes.output_size_in_bytes - sizes.alias_size_in_bytes
        return sizes.argument_size_in_bytes + outputs + sizes.temp_size_in_bytes

    def compiled_text(self) -> str:
        """The compiled program, in the language of XLA."""
        return self._compiled().as_text()

    def _compiled(self):
        return self._update.lower(self._state, self._batch).compile()  # jax.jit keeps it for the calls


def timed_rounds(timers: Sequence[Callable[[], float]], rounds: int) -> np.ndarray:
    """Seconds and page faults of every call, an array [2, timers, rounds]. Every round calls each timer once. Rounds begin
    with different timers, because a call may be slower or faster after a call of another timer."""
    measured = np.zeros((2, len(timers), rounds))
    for number in range(rounds):
        for i in np.roll(range(len(timers)), -number):
            before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
            measured[0, i, number] = timers[i]()
            measured[1, i, number] = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
    return measured


def seconds_per_update(config: Config, runs: int = 1) -> float:
    """Seconds of the fastest of UPDATES updates, after one that compiles. runs: as those of a Timer."""
    timer = Timer(config, runs)
    return min(timer() for _ in range(UPDATES))


def same_seconds(config: Config) -> str:
    """A digest of the options that decide how long an update takes: configs with the same one are timed once."""
    without, also = ("seed", "steps", "optimizer.learning_rate"), ("model.", "training.", "mesh.")
    return fingerprint(config, without=without, also=also)


def relative_seconds(config: Config, baseline: Config) -> float:
    """The time of the config's fastest update as a multiple of the baseline's. The two run in turns, so that a busy machine
    slows both; the device has the state of one at a time, as in training. More turns follow until the two fastest turns of
    each config agree."""
    turns_T2: list[tuple[float, float]] = []
    while len(turns_T2) < TURNS or (len(turns_T2) < MOST_TURNS and not _agree(turns_T2)):
        turns_T2.append((seconds_per_update(baseline), seconds_per_update(config)))
    of_baseline, of_config = np.min(turns_T2, axis=0)
    return float(of_config / of_baseline)


def _agree(turns_T2: Sequence[tuple[float, float]]) -> bool:
    """Whether each config has two turns that are as fast as each other."""
    fastest_2, second_2 = np.sort(turns_T2, axis=0)[:2]
    return bool((second_2 <= AGREE * fastest_2).all())
