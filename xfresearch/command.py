"""What every command line shares: arguments, one-line failures, exit codes.

A user's mistake exits with 2 and one line on standard error. Anything else that stops a command exits with 1 and one
line that names a log file, where the stack trace is.
"""

import argparse
import os
import sys
import tempfile
import traceback

from xfresearch import distributed
from xfresearch.errors import Stopped, UserError
from xfresearch.files import check_output
from xfresearch.hardware import start_without_tpu

CONFIG_HELP = (
    "--config FILE[:arg] loads a config; --config.key=value overrides a key of it, e.g. --config.model.width=128 "
    "(docs/configuration.md lists them)"
)


class Parser(argparse.ArgumentParser):
    """argparse whose errors are UserErrors, so that all mistakes look the same. A file of --json has to be writable."""

    def __init__(self, **kwargs):
        super().__init__(allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter, **kwargs)

    def parse_known_args(self, args=None, namespace=None):
        options, rest = super().parse_known_args(args, namespace)
        if getattr(options, "json", None) is not None:  # said now, not after hours of work
            check_output("--json", options.json)
        return options, rest

    def error(self, message: str):
        raise UserError(f"{message} (see --help)")


def run(main, arguments=None) -> None:
    """Calls `main(arguments)` and ends the process with the exit code that its outcome has."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    start_without_tpu()
    try:
        main(sys.argv[1:] if arguments is None else arguments)
    except UserError as error:
        _finish(2, f"error: {error}")
    except Stopped as error:
        _say(f"stopped: {error}")
        _end(1)  # threads that were writing a checkpoint are not to print after the one line
    except KeyboardInterrupt:
        _finish(130, "interrupted")
    except BrokenPipeError:
        os._exit(1)
    except Exception as error:
        log = distributed.failed(error) if distributed.several() else _keep_trace()
        first = (str(error).strip().splitlines() or [""])[0][:200]
        _finish(1, f"failed: {type(error).__name__}: {first} (details in {log})")


def _say(line: str) -> None:
    sys.stdout.flush()
    print(line.replace("\n", " "), file=sys.stderr, flush=True)


def _finish(code: int, line: str) -> None:
    _say(line)
    if distributed.several():
        _end(code)
    sys.exit(code)


def _end(code: int) -> None:
    """Ends the process without waiting for its threads or for other processes."""
    if distributed.several():
        distributed.leave(code)
    os._exit(code)


def _keep_trace() -> str:
    """Writes the stack trace of the error in hand to a file, whose name it returns."""
    with tempfile.NamedTemporaryFile("w", prefix="xfresearch-", suffix=".log", delete=False) as log:
        traceback.print_exc(file=log)
    return log.name
