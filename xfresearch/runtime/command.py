"""Arguments, one-line error messages and exit codes that all commands share.

A user's mistake exits with 2 and one line on standard error; errors.py has the other codes. A bug keeps its stack trace and
exits with 1; of a run of many processes, the trace is in a log, and one line names its path.
"""

import argparse
import os
import re
import sys
from pathlib import Path
from typing import Any, NoReturn

from xfresearch.runtime import distributed, memory, xla_flags
from xfresearch.runtime.errors import BUG, MISTAKE, Stopped, UserError, exit_code, out_of_memory
from xfresearch.runtime.files import check_output
from xfresearch.runtime.hardware import start_without_tpu
from xfresearch.runtime.terminal import filtered, one_line

CONFIG_HELP = (
    "the config: a name that python -m xfresearch.configs lists, or the path of a file; --config.key=value overrides a "
    "key of it, e.g. --config.model.width=128 (docs/configuration.md lists them)"
)
NEEDS_LESS = "a smaller model, batch or sequence, or a machine with more memory"


class Parser(argparse.ArgumentParser):
    """An ArgumentParser that raises UserError, so that all mistakes look alike, and checks the file of --json."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter, **kwargs)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> tuple[Any, list[str]]:  # type: ignore[override]
        options, rest = super().parse_known_args(args, namespace)
        if getattr(options, "json", None) is not None:  # fail now, not after hours of work
            check_output("--json", options.json)
        return options, rest

    def format_help(self) -> str:
        return as_typed(super().format_help())

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message} (see --help)")


def as_typed(text: str) -> str:
    """`text` with `xfresearch NAME` in the place of `python -m xfresearch.NAME`, if this process was started like that."""
    installed = Path(sys.argv[0]).stem == "xfresearch"
    return re.sub(r"python -m xfresearch[. ]", "xfresearch ", text) if installed else text


def require_only(options: argparse.Namespace, names: tuple[str, ...], beside: str) -> None:
    """Raises UserError if a flag is given that is none of `names`. The message says that it is not allowed with `beside`."""
    for name, value in vars(options).items():
        if value and name not in names:
            raise UserError(f"--{name.replace('_', '-')} is not allowed with {beside}")


def run(main, arguments=None) -> None:
    """Calls `main(arguments)` and ends the process with the exit code of its outcome."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    start_without_tpu()
    xla_flags.set_flags()
    memory.reuse()
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="backslashreplace")  # a terminal may have fewer characters than a sample
    with filtered():
        _run(main, sys.argv[1:] if arguments is None else arguments)


def _run(main, arguments: list[str]) -> None:
    try:
        main(arguments)
    except KeyboardInterrupt:
        _finish(130, "interrupted")
    except BrokenPipeError:
        os._exit(1)
    except Exception as error:
        _fail(error)


def _fail(error: Exception) -> None:
    """Prints one line for `error` and ends the process. Raises the error if it is a bug in a single process."""
    if isinstance(error, ImportError) and "gcsfs" in str(error):  # which fsspec imports at the first address in a bucket
        install = "pip install 'xfresearch[cloud]', or in a checkout -r requirements/cloud.txt"
        error = UserError(f"an address gs://... needs gcsfs, which is not installed: {install}")
    if not isinstance(error, UserError) and (reason := out_of_memory(error)):
        error = UserError(f"this needs more memory than there is ({reason}): {NEEDS_LESS}")
    code = exit_code(error)
    if code == BUG and not distributed.is_active():
        sys.excepthook = _print_trace
        raise error
    if distributed.is_active() and not isinstance(error, UserError | Stopped):
        log = distributed.log_error(error)
        first = (str(error).strip().splitlines() or [""])[0][:200]
        _finish(code, f"failed: {type(error).__name__}: {first} (details in {log})")
    line = f"{'error' if code == MISTAKE else 'stopped'}: {error}"
    if isinstance(error, UserError):
        _finish(code, line)
    _print_error(line)
    _exit_now(code)  # threads that write a checkpoint must not print after this line


def _print_trace(*error) -> None:
    with filtered():
        sys.__excepthook__(*error)


def _print_error(line: str) -> None:
    sys.stdout.flush()
    print(one_line(as_typed(line)), file=sys.stderr, flush=True)


def _finish(code: int, line: str) -> None:
    _print_error(line)
    if distributed.is_active():
        _exit_now(code)
    sys.exit(code)


def _exit_now(code: int) -> None:
    """Ends the process without waiting for its threads or for other processes."""
    if distributed.is_active():
        distributed.exit_now(code)
    os._exit(code)
