"""Taps: name a value inside the model; record or replace it.

Layers call `context.tap("hidden", x)`. Names read `blocks.<layer>.<sublayer>.<value>`, plus `embed` and `final`.
"""

from xfresearch.errors import UserError, nearest


class Taps:
    """Collects the values named in `record` and passes those named in `replace` through their functions."""

    def __init__(self, record=(), replace=None):
        self.record, self.replace = frozenset(record), dict(replace or {})
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
        """UserError for a name that no layer has offered, once the model has run."""
        for name in sorted(self.record | self.replace.keys()):
            if name not in self.names:
                raise UserError(
                    f"tap {name!r}: this model has no such value{nearest(name, self.names)} (lm.tap_names() lists them)"
                )
