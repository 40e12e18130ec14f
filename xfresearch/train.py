"""python -m xfresearch.train --config FILE[:arg] --workdir DIR [--config.key=value ...]

Trains a model, or resumes the run in the directory. At the end it prints the held-out loss and a sample, and writes a
report.
"""

import signal
import sys
import time
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING

from xfresearch.runtime import command, distributed, memory
from xfresearch.runtime.errors import UserError
from xfresearch.runtime.files import write_json
from xfresearch.runtime.terminal import filtered

if TYPE_CHECKING:  # --help must not wait for them
    from xfresearch.analysis.panel import Panel
    from xfresearch.run_config.config import Config
    from xfresearch.run_config.config_files import Source
    from xfresearch.training.callbacks import Callback
    from xfresearch.training.trained_run import Run

EPILOG = """\
examples:
  python -m xfresearch.train --config quickstart --workdir runs/quickstart
  python -m xfresearch.train --config all_attention:tiny --workdir runs/a --config.steps=100
  python -m xfresearch.train --config quickstart:tiny --start runs/a/checkpoints/100 --workdir runs/b

The same command again resumes from the newest checkpoint, bit for bit as if the run had never stopped.

exit codes: 0 finished; 2 a mistake in the command; 3 the loss is not finite; 75 a fault that may pass, such as a full disk:
the same command resumes; 143 told to stop by SIGTERM, and saved (130: by Ctrl-C); 1 a bug"""


def parser() -> command.Parser:
    """The flags of the command."""
    made = command.Parser(prog="python -m xfresearch.train", description=__doc__, epilog=EPILOG)
    made.add_argument("--config", metavar="FILE[:arg]", required=True, help=command.CONFIG_HELP)
    made.add_argument(
        "--workdir", metavar="DIR", help="directory of the run, local or gs:// (default: runs/FILE-arg)"
    )
    made.add_argument(
        "--start", metavar="PATH", help="trained model to start from; short for --config.start.path (docs/finetune.md)"
    )
    made.add_argument(
        "--fork",
        action="store_true",
        help="resume from DIR's newest checkpoint although config, data or versions differ (docs/training.md)",
    )
    made.add_argument("--print-config", action="store_true", help="print every key of the config as JSON, and end")
    made.add_argument("--json", metavar="FILE", help="also write the results as JSON")
    distributed.add_flags(made)
    return made


def main(arguments: list[str]) -> None:
    began = time.time()
    options, overrides = parser().parse_known_args(arguments)
    distributed.check(options)
    from xfresearch.run_config import known_keys

    given = ["--config", options.config, *overrides]
    given += [f"--config.start.path={options.start}"] if options.start else []
    known_keys.check(given)  # before the imports that take seconds

    from xfresearch.options.reading import to_json
    from xfresearch.training import pretrained

    workdir = options.workdir or default_workdir(options.config)
    config = pretrained.parse(given, workdir)
    if options.print_config:
        print(to_json(config))
        return
    with distributed.joined(options, workdir):
        from xfresearch.training import session

        results = session.run(config, workdir, given, options.fork, began, panel(config))
        if options.json and distributed.first():
            write_json(options.json, results)
    if results["stopped_by"]:
        sys.exit(128 + signal.Signals[results["stopped_by"]])


def default_workdir(file: str) -> str:
    """'runs/gpt2-tiny' for 'configs/gpt2.py:tiny'."""
    name, *argument = file.split(":")
    return "runs/" + "-".join([Path(name).stem, *argument])


def train(
    config: "Source",
    overrides: Mapping[str, object] = MappingProxyType({}),
    *,
    workdir: str = "",
    callbacks: "Sequence[Callback]" = (),
    start: str = "",
    fork: bool = False,
) -> "Run":
    """Trains a model, or resumes the run in `workdir`, as the command does, and returns the run.

    config: the name of a config ('gpt2:tiny'), a config file FILE[:arg], or a config: a ConfigDict, or the Config of a run.
    overrides: {dotted key: value}, such as {'steps': 100, 'optimizer.learning_rate': 3e-3}. workdir: by default runs/ and
    the name of the config. callbacks: see the run while it trains (training/callbacks.py). start: a trained model to start
    from. fork: resume although config, data or versions differ.

    Ctrl-C ends the run early: its state is saved, it is returned, and the same call resumes it. So does SIGTERM, after which
    the signal does what it did before the call. In another thread than the main one, a callback can end it, a signal
    cannot. Raises UserError for a mistake, Diverged if the loss is not finite, Stopped
    if a checkpoint cannot be written, and what a callback raises.
    """
    began = time.time()
    from xfresearch.run_config.config_files import as_arguments
    from xfresearch.training import pretrained, session
    from xfresearch.training.trained_run import Run

    given = as_arguments(config, {**overrides, **({"start.path": start} if start else {})})
    if not workdir and not isinstance(config, str):
        raise UserError("workdir='' is not allowed: it must be the directory of the run, for a config without a name")
    workdir = str(workdir) or default_workdir(str(config))
    _reuse_memory()
    with filtered():
        parsed = pretrained.parse(given, workdir)
        results = session.run(parsed, workdir, given, fork, began, panel(parsed), callbacks)
    if results["stopped_by"] == "SIGTERM":
        signal.raise_signal(signal.SIGTERM)
    return Run(workdir, results["stopped_by"])


@cache
def _reuse_memory() -> None:
    """The setting of the commands, once in this process."""
    memory.reuse()


def panel(config: "Config") -> "type[Panel] | None":
    """The class that measures every layer while the model trains; None without."""
    if not config.log.panel:
        return None
    from xfresearch.analysis.panel import Panel

    return Panel


if __name__ == "__main__":
    command.run(main)
