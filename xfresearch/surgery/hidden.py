"""The hidden size of a feed-forward layer."""

from dataclasses import replace

from xfresearch.models.feed_forwards.dense import HiddenOptions


def with_hidden(options: HiddenOptions, hidden: int) -> HiddenOptions:
    """`options` with this hidden size, and with the defaults of the options that derive one from the model's width."""
    fields = options.__dataclass_fields__
    defaults = {name: fields[name].default for name in ("hidden_factor", "gated_hidden") if name in fields}
    return replace(options, hidden=hidden, **defaults)
