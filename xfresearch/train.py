"""python -m xfresearch.train --config FILE[:arg] --workdir DIR [--config.key=value ...]

Trains a model, or resumes the run in the directory. At the end it prints the held-out loss and a sample, and writes a
report.
"""

import signal
import sys
import time
from pathlib import Path

from xfresearch.run import known_keys
from xfresearch.runtime import command, distributed
from xfresearch.runtime.files import write_json

EPILOG = """\
examples:
  python -m xfresearch.train --config configs/quickstart.py --workdir runs/quickstart
  python -m xfresearch.train --config configs/all_attention.py:tiny --workdir runs/a --config.steps=100
  python -m xfresearch.train --config configs/quickstart.py:tiny --start runs/a/checkpoints/100 --workdir runs/b

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

    given = ["--config", options.config, *overrides]
    given += [f"--config.start.path={options.start}"] if options.start else []
    known_keys.check(given)

    from xfresearch.config.reading import to_json
    from xfresearch.training import start

    workdir = options.workdir or "runs/" + "-".join(Path(part).stem for part in options.config.split(":"))
    config = start.parse(given, workdir)
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


def panel(config):
    """The class that measures every layer while the model trains; None without."""
    if not config.log.panel:
        return None
    from xfresearch.analysis.panel import Panel

    return Panel


if __name__ == "__main__":
    command.run(main)
