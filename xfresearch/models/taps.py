"""Taps: named values inside the model that can be recorded or replaced.

Layers call `context.tap("hidden", x)`. Names are `blocks.<layer>.<sublayer>.<value>`, `embed` and `final`.
"""

from xfresearch.errors import UserError


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
