"""Errors that a command reports in one line, and its exit codes. Launchers obey the codes (docs/launch.md)."""

import errno
import os
import re
from collections.abc import Iterable, Iterator

BUG = 1
MISTAKE = 2  # of the user: the same command fails again
DIVERGED = 3  # the loss is not finite: the same command fails again, after hours
TRANSIENT = 75  # a full disk, a process that never came: the same command may succeed later (EX_TEMPFAIL)
# A command that was told to stop, and has saved, exits with 128 plus the number of the signal: 143 for SIGTERM.

# Errors of a disk or a network that may be gone at the next try.
_TRANSIENT_ERRORS = {getattr(errno, name) for name in ("EIO", "ENOSPC", "EDQUOT", "ESTALE", "EBUSY", "ENOMEM", "ENOLCK")}
_TRANSIENT_ERRORS |= {getattr(errno, name) for name in ("ETIMEDOUT", "ENETDOWN", "ENETUNREACH", "EHOSTUNREACH")}
# Refusals of a file system, which stay.
_REFUSALS = {getattr(errno, name) for name in ("EACCES", "EPERM", "EROFS", "ENOSYS", "EOPNOTSUPP", "ENAMETOOLONG", "ELOOP")}
# TensorStore and ArrayRecord give the text of an error only; buckets have codes.
_TEXTS = {os.strerror(number): number for number in _TRANSIENT_ERRORS | _REFUSALS}
_TEXTS |= {"UNAVAILABLE": errno.ENETDOWN, "DEADLINE_EXCEEDED": errno.ETIMEDOUT}
_TEXTS |= {"PERMISSION_DENIED": errno.EACCES, "UNAUTHENTICATED": errno.EACCES}


class UserError(Exception):
    """A mistake in what the user typed or supplied. Its text is one line: the key, the value given, what is allowed.

    Commands print it on standard error and exit with 2. Notebooks show it in place of a stack trace. Library users catch it
    like any exception.
    """

    def _render_traceback_(self) -> list[str]:
        """The lines that IPython shows. `%debug` still opens the frame that raised it."""
        return [f"{type(self).__name__}: {self}"]


class NothingMeasured(UserError):
    """A model has nothing that an analysis measures."""


class Stopped(Exception):
    """A run that must stop for a reason outside the config, such as a full disk. It may succeed later."""

    exit_code = TRANSIENT


class Diverged(Stopped):
    """A run whose loss or gradient is not finite. It would stop at the same step again."""

    exit_code = DIVERGED


def exit_code(error: BaseException) -> int:
    """The exit code of a command that ends with `error`. If an error of the disk led to it, that error decides."""
    if isinstance(error, Diverged):
        return error.exit_code
    errors = disk_errors(error)
    if errors:
        return TRANSIENT if errors & _TRANSIENT_ERRORS else MISTAKE
    if isinstance(error, UserError) or out_of_memory(error):
        return MISTAKE
    return error.exit_code if isinstance(error, Stopped) else BUG


def disk_errors(error: BaseException) -> set[int]:
    """The numbers (errno) of the errors of a disk or a network that led to `error`, whether they may pass or stay."""
    numbers: set[int] = set()
    for cause in _causes(error):
        number = cause.errno if isinstance(cause, OSError) else None
        if number is not None and number in _TEXTS.values():
            numbers.add(number)
        numbers |= {number for text, number in _TEXTS.items() if text in str(cause)}
    return numbers


def _causes(error: BaseException) -> Iterator[BaseException]:
    """`error`, and every exception that was being handled when it was raised."""
    cause: BaseException | None = error
    while cause is not None:
        yield cause
        cause = cause.__cause__ or cause.__context__


def out_of_memory(error: BaseException) -> str:
    """What Python, NumPy or XLA says of an allocation that failed and led to `error`, on one line; '' for another error."""
    for cause in _causes(error):
        text = (str(cause).strip().splitlines() or [""])[0]
        of_xla = type(cause).__name__ == "JaxRuntimeError" and re.search("RESOURCE_EXHAUSTED|out.of.memory", text, re.I)
        if isinstance(cause, MemoryError) or of_xla:
            return shortened(text or type(cause).__name__, 200)
    return ""


def nearest(word: str, allowed: Iterable[str]) -> str:
    """'; did you mean 'width'?' if a name in `allowed` is close to `word`, otherwise an empty string."""
    return did_you_mean(closest(word, allowed))


def closest(word: str, allowed: Iterable[str]) -> list[str]:
    """The name in `allowed` that is closest to `word`, if one is close."""
    import difflib

    return difflib.get_close_matches(word, list(allowed), n=1, cutoff=0.6)


def did_you_mean(names: list[str]) -> str:
    """'; did you mean 'a' or 'b'?', or an empty string without names. At most four names are given."""
    quoted = [f"'{name}'" for name in names[:4]]
    words = " or ".join(filter(None, (", ".join(quoted[:-1]), *quoted[-1:])))
    return f"; did you mean {words}?" if words else ""


def require(condition: bool, key: str, value: object, allowed: str) -> None:
    """Raises UserError unless `condition` holds. The message has the key, the value given and what is allowed."""
    if not condition:
        raise UserError(f"config.{key}={shortened(repr(value))} is not allowed: it must be {shortened(allowed)}")


def shortened(text: str, most: int = 500) -> str:
    """The beginning of a text: what others wrote into a config may have millions of characters."""
    return text if len(text) <= most else f"{text[:most]}..."


def require_new(path: str | os.PathLike[str], action: str) -> None:
    """Raises UserError if `path`, which may be in a bucket or begin with ~, exists and is not an empty directory."""
    from etils import epath

    target = epath.Path(path).expanduser()
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise UserError(f"{target} already exists: {action} to a new directory")
