"""Errors that a command reports in one line."""


class UserError(Exception):
    """A mistake in what the user typed or supplied. Its text is one line: the key, the value given, what is allowed.

    Commands print it on standard error and exit with 2. Library users catch it like any exception.
    """


class Stopped(Exception):
    """A run that must stop for a reason outside the config (loss not finite, disk full): exit code 1 and one line."""


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
