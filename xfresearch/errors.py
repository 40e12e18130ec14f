"""A user's mistake, said in one line."""


class UserError(Exception):
    """Something the user typed or supplied is wrong. Its text is one line: what, the value given, what is allowed.

    Commands print it on standard error and exit with 2; library users catch it like any exception.
    """


class Stopped(Exception):
    """A run that has to stop for a reason worth one line (not finite, disk full): exit code 1 and its text."""


def nearest(word: str, allowed) -> str:
    """'; did you mean 'width'?' where a name in `allowed` is close to `word`, otherwise an empty string."""
    import difflib

    matches = difflib.get_close_matches(word, list(allowed), n=1, cutoff=0.6)
    return f"; did you mean '{matches[0]}'?" if matches else ""


def require(condition: bool, key: str, value, allowed: str) -> None:
    """UserError in the one form that all of them have: key, value given, what is allowed."""
    if not condition:
        raise UserError(f"config.{key}={value!r} is not allowed: it must be {allowed}")


def require_new(path, action: str) -> None:
    """UserError where something is at `path` already, an empty directory apart."""
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise UserError(f"{path} already exists: {action} to a new directory")
