"""Updates of training runs on random tokens, side by side: no data are read.

    python -m xfresearch.bench update --config gpt2:3m --config moe:3m --config.batch_size=4
    python -m xfresearch.bench update --config llama:3m --against torch,torch_compile
    python -m xfresearch.bench update --config gpt2:3m --against ../checkout-of-before

Every round runs one update of each row. Columns: the median of a row's rounds with its quartiles; tokens per second at the
median; MFU, the matrix products of training (three times those of a forward pass, with all pairs of causal attention) per
second, as a share of what the device can do; memory of the compiled update; seconds to compile, or to read the program from
JAX's cache on disk; page faults of an update; and the speed relative to the first row, the median over rounds.

--against torch and torch_compile time the same model in PyTorch with the same weights, in its own process. Before that, the
losses of tokens must agree in float32 to 1e-4, and those of the first two updates to 1e-3 (bfloat16: 2e-2). Memory is the
peak of PyTorch's allocations, on a CPU the growth of the process. A path is a checkout, whose code runs the same config in
its own process. The process reads its program from JAX's cache, because a process that has compiled is slower afterwards.
This checkout then runs in two such processes: the row "again" shows by how much two processes of one program differ here. A
smaller difference shows nothing.
"""

import tempfile
from functools import partial
from pathlib import Path

from xfresearch.benchmarks import peers
from xfresearch.benchmarks.flags import add_json, add_sizes, read, write_figures
from xfresearch.benchmarks.rounds import print_table, quartiles
from xfresearch.evaluation.held_out import at_least
from xfresearch.runtime.errors import UserError

COLUMNS = {"ms": "{ms:.1f}", "quartiles": "{ms_low:.1f} to {ms_high:.1f}", "tokens/s": "{tokens/s:,.0f}", "MFU": "{MFU:.3f}"}
COLUMNS |= {"GB": "{GB:.2f}", "compile s": "{compile_seconds:.1f}", "faults": "{page faults:,.0f}"}
COLUMNS |= {"speed": "{ratio:.3f} ({ratio_low:.3f} to {ratio_high:.3f})", "config": "{title}"}


def add_flags(parser) -> None:
    more = "a config; may be given several times; --config.key=value changes all of them"
    parser.add_argument("--config", action="append", required=True, metavar="FILE[:arg]", help=more)
    add_sizes(parser, {"rounds": 15})
    add_json(parser)
    against = "also time the first config in PyTorch (torch, torch_compile), or with the code of a checkout (its path)"
    parser.add_argument("--against", default="", metavar="NAME,...", help=against)
    python = "the Python that has PyTorch (default: this one)"
    parser.add_argument("--torch-python", default="", metavar="PYTHON", help=python)
    apart = "one row after the other and not in rounds, so that each has the device's whole memory"
    parser.add_argument("--apart", action="store_true", help=apart)
    together = "also update N runs of the first config in one program (jax.vmap); its figures are for one of them"
    parser.add_argument("--together", type=at_least(1), default=1, metavar="N", help=together)
    profile = "also the time of each operation of the first config, as a multiple of its floor"
    parser.add_argument("--profile", action="store_true", help=profile)


    grow = "grow a size of the config by 2 and 4, and fit the exponents of time and FLOPs per token"
    parser.add_argument("--grow", choices=("length", "width", "depth", "experts"), help=grow)
    sweep = "measure the options of execution on this machine, and print the overrides to use"
    parser.add_argument("--sweep", action="store_true", help=sweep)


def run(a) -> None:
    _require_alone(a)
    _share_memory(a)
    if a.sweep:
        from xfresearch.benchmarks.fastest import sweep

        rows, best = sweep(read(a.config[0], a.overrides), a.rounds, measured, lambda config: _ours(config, 1))
        return write_figures(a, {"rows": rows, "overrides": best})
    if a.grow:
        from xfresearch.benchmarks import growing

        configs: dict = growing.grown(a.grow, a.config[0], a.overrides)
    else:
        configs = {name: read(name, a.overrides) for name in a.config}
    first = next(iter(configs.values()))
    with tempfile.TemporaryDirectory() as folder:
        starts = {name: _ours(config, 1) for name, config in configs.items()}
        starts |= {a.config[0]: _in_a_process(a, first)} if _checkouts(a) else {}
        if a.together > 1:
            starts[f"{a.config[0]}, {a.together} runs in one program"] = _ours(first, a.together)
        starts |= _theirs(a, first, Path(folder)) | _again(a, first)
        rows = measured(starts, a.rounds, a.apart)
    figures = report(rows, first)
    figures |= growing.report(a.grow, rows) if a.grow else {}
    operations = _profile(first) if a.profile else []
    write_figures(a, {"rows": rows, "operations": operations} | figures)


def _require_alone(a) -> None:
    """Raises UserError if --grow or --sweep is given with a flag that it does not read."""
    for name in ("grow", "sweep"):
        others = [other for other in ("against", "profile", "grow", "sweep") if other != name and getattr(a, other)]
        others += ["together"] if a.together > 1 else []
        if getattr(a, name) and others:
            raise UserError(f"--{others[0]} is not allowed with --{name}")
        if getattr(a, name) and len(a.config) > 1:
            raise UserError(f"--config={a.config[1]} is not allowed: --{name} takes one config")


def _share_memory(a) -> None:
    """Leaves memory of a GPU to the other processes: JAX would take three quarters of it at its start."""
    import os

    if a.against:
        os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")


class TimedUpdate:
    """A row of the table. Each call runs one update. The functions that _ours and _theirs return make rows."""

    def __init__(self, config, timer, runs: int = 1, error: str = ""):
        self.config, self.timer, self.runs, self.error = config, timer, runs, error

    def __call__(self) -> float:
        return self.timer()

    def figures(self) -> dict:
        """Figures that one update does not show. A row of another process has ended then."""
        if isinstance(self.timer, peers.Peer):
            return {"compile_seconds": self.timer.start["compile_seconds"], **self.timer.end()}
        return {"compile_seconds": self.timer.compile_seconds, "memory_bytes": self.timer.memory_bytes()}


def _ours(config, runs: int):
    def start() -> TimedUpdate:
        from xfresearch.training.timing import Timer

        return TimedUpdate(config, Timer(config, runs), runs)

    return start


def _checkouts(a) -> list[str]:
    return [name for name in a.against.split(",") if name and name not in peers.TORCH]


def _in_a_process(a, config, root: str = str(peers.ROOT)):
    """The first config with the code of a checkout, by default this one, in a process like those of other checkouts."""
    return lambda: TimedUpdate(config, peers.checkout_peer(root, ["--config", a.config[0], *a.overrides]))


def _again(a, config) -> dict:
    """The row beside a checkout that shows how far two processes of this one differ."""
    return {f"{a.config[0]}, again": _in_a_process(a, config)} if _checkouts(a) else {}


def _theirs(a, config, folder: Path) -> dict:
    """{name: function that starts the row} of --against."""
    from xfresearch.benchmarks import torch_model

    names = [name for name in a.against.split(",") if name]
    wanted = [name for name in names if name in peers.TORCH]
    for name in _checkouts(a):
        peers.checkout_root(name)
    if wanted:
        torch_model.require_expressible(config)
        a.torch_python = peers.torch_python(a.torch_python, wanted[0])
        torch_model.write(config, folder, a.rounds + 2)

    def torch(name: str) -> TimedUpdate:
        peer = peers.torch_peer(name, a.torch_python, folder)
        return TimedUpdate(config, peer, error=torch_model.tokens_differ(folder))

    return {name: partial(torch, name) if name in peers.TORCH else _in_a_process(a, config, name) for name in names}


def measured(starts: dict, rounds: int, apart: bool) -> list[dict]:
    """A row of figures for each name. Rows run in turns, or with `apart` one after the other, the last one first."""
    import numpy as np

    from xfresearch.benchmarks.torch_model import updates_differ

    groups = [{name: start} for name, start in reversed(starts.items())] if apart else [starts]
    rows: dict = {}
    for group in groups:
        rows |= _together(group, rounds)
    rows = {name: rows[name] for name in starts}
    first = next(iter(rows.values()))
    first_R = np.array(first["seconds"])
    for name, row in rows.items():
        if name in peers.TORCH and not row["error"]:
            row["error"] = updates_differ(row["losses"], first["losses"], row["dtype"])
        row |= dict.fromkeys(("ratio", "ratio_low", "ratio_high"))
        if not row["error"]:
            ratios_R = first_R / row["seconds"] * (row["tokens"] / first["tokens"])
            if apart:  # rounds are not pairs
                ratios_R = np.array([np.median(first_R) / np.median(row["seconds"])])
            row |= quartiles("ratio", ratios_R)
    return list(rows.values())


def _together(starts: dict, rounds: int) -> dict[str, dict]:
    import numpy as np

    from xfresearch.run_config.closed_form import costs
    from xfresearch.training.timing import timed_rounds

    timed = {}
    try:
        for name, start in starts.items():
            timed[name] = start()
        running = [row for row in timed.values() if not row.error]
        seconds_NR, faults_NR = timed_rounds(running, rounds)
        rows = {}
        for name, row in timed.items():
            config, losses = row.config, row.timer.losses
            figures = {"config": name, "error": row.error, "losses": losses, "dtype": config.model.dtype, "seconds": []}
            figures["tokens"] = tokens = config.batch_size * config.sequence_length
            figures["flops"] = float(costs(config.model, config.sequence_length).training_flops_per_token) * tokens
            if not row.error:
                i = running.index(row)
                figures["seconds"] = (seconds_NR[i] / row.runs).tolist()
                ours = not isinstance(row.timer, peers.Peer)
                figures["page faults"] = float(np.median(faults_NR[i])) / row.runs if ours else None
                figures |= row.figures()
            rows[name] = figures
        return rows
    finally:
        for row in timed.values():
            if isinstance(row.timer, peers.Peer):
                row.timer.kill()


def report(rows: list[dict], config) -> dict:
    """Prints the table; adds medians, tokens/s and MFU to the rows. Returns the peak that MFU is relative to."""
    import numpy as np

    from xfresearch.benchmarks.device_rates import peak_or_measured

    peak, source = peak_or_measured(config.model.dtype)
    for row in rows:
        if not row["error"]:
            row |= quartiles("ms", 1e3 * np.array(row["seconds"]))
            seconds = row["ms"] / 1e3
            row |= {"tokens/s": row["tokens"] / seconds, "GFLOP/s": row["flops"] / seconds / 1e9}
            row["MFU"] = row["flops"] / seconds / peak
    print_table(COLUMNS, [row | _shown(row) for row in rows])
    print(f"MFU is relative to {source}.")
    return {"peak_flops": peak, "peak_source": source}


def _shown(row: dict) -> dict:
    error, memory = row["error"], row.get("memory_bytes")
    title = f"{row['config']}: {error}" if error else row["config"]
    return {"title": title, "GB": None if memory is None else memory / 1e9}


def _profile(config) -> list[dict]:
    from xfresearch.benchmarks import operations
    from xfresearch.training.timing import Timer

    return operations.report(Timer(config), config.model.dtype)
