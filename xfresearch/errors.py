"""Errors that a command reports in one line, and its exit codes. Launchers obey the codes (docs/launch.md)."""

import errno

MISTAKE = 2  # of the user: the same command fails again
DIVERGED = 3  # the loss is not finite: the same command fails again, after hours
TRANSIENT = 75  # a full disk, a process that never came: the same command may succeed later (EX_TEMPFAIL)
# A command that was told to stop, and has saved, exits with 128 plus the number of the signal: 143 for SIGTERM.

# Errors of a disk or a network that may be gone at the next try.
_TRANSIENT_ERRORS = {getattr(errno, name) for name in ("EIO", "ENOSPC", "EDQUOT", "ESTALE", "EAGAIN", "EBUSY", "ENOMEM")}
_TRANSIENT_ERRORS |= {getattr(errno, name) for name in ("ETIMEDOUT", "ENETDOWN", "ENETUNREACH", "EHOSTUNREACH", "ENOLCK")}


class UserError(Exception):
    """A mistake in what the user typed or supplied. Its text is one line: the key, the value given, what is allowed.

    Commands print it on standard error and exit with 2. Library users catch it like any exception.
    """


class Stopped(Exception):
    """A run that must stop for a reason outside the config, such as a full disk. It may succeed later."""

    exit_code = TRANSIENT


class Diverged(Stopped):
    """A run whose loss or gradient is not finite. It would stop at the same step again."""

    exit_code = DIVERGED


def is_transient(error: OSError) -> bool:
    """Whether an error of a disk or a network may be gone at the next try."""
    return error.errno in _TRANSIENT_ERRORS


def nearest(word: str, allowed) -> str:
    """'; did you mean 'width'?' if a name in `allowed` is close to `word`, otherwise an empty string."""
    import difflib

    matches = difflib.get_close_matches(word, list(allowed), n=1, cutoff=0.6)
    return f"; did you mean '{matches[0]}'?" if matches else ""


def require(condition: bool, key: str, value, allowed: str) -> None:
    """Raises UserError unless `condition` holds. The message has the key, the value given and what is allowed."""
    if not condition:
        raise UserError(f"config.{key}={value!r} is not allowed: it must be {allowed}")


def require_new(path, action: str) -> None:
    """Raises UserError if `path` exists and is not an empty directory."""
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise UserError(f"{path} already exists: {action} to a new directory")
