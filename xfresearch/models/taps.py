"""Taps: named values inside the model that can be recorded or replaced.

Layers call `context.tap("hidden", x)`. Names are `blocks.<layer>.<sublayer>.<value>`, `embed` and `final`.
"""

from xfresearch.errors import UserError, nearest


class Taps:
    """Collects the values named in `record` and applies the functions in `replace`, {name: function}."""

    def __init__(self, record=(), replace=None):
        self.record = frozenset(record)
        self.replace = dict(replace or {})
        self.names: list[str] = []
        self.values: dict = {}

    def __call__(self, name: str, value):
        self.names.append(name)
        if name in self.replace:
            new = self.replace[name](value)
            if getattr(new, "shape", None) != value.shape:
                raise UserError(
                    f"replace[{name!r}] returned shape {getattr(new, 'shape', None)}: it must be {value.shape}"
                )
            value = new.astype(value.dtype)
        if name in self.record:
            self.values[name] = value
        return value

    def check(self) -> None:
        """Raises UserError for a name that does not exist. Call it after the model has run."""
        for name in sorted(self.record | self.replace.keys()):
            if name not in self.names:
                raise UserError(
                    f"tap {name!r}: this model has no such value{nearest(name, self.names)} (lm.tap_names() lists them)"
                )
