"""Fields that differ between layers: sliding windows, and the RoPE and the feed-forward layer that depend on the layer.

config.json has one window for all layers, or one for the layers that `layer_types` marks as sliding.
"""

from collections.abc import Callable
from typing import NamedTuple

from xfresearch.interop.family import ByLayer, Rope, Unsupported, count
from xfresearch.interop.rope import FULL, SLIDING, TYPES, read_rope

WINDOW = "*.attention.window"


class Sliding(NamedTuple):
    """How a family's config.json tells which layers have a sliding window.

    types(config): the layer types of a config.json without `layer_types`.
    default: the window if its key is missing.
    switched: the window applies only if `use_sliding_window` is true. `max_window_layers` is then the number of layers
        before the first sliding one, for readers that do not support `layer_types`.
    """

    types: Callable[[dict], list[str]]
    default: int
    switched: bool = False

    @property
    def keys(self) -> tuple[str, ...]:
        """The keys of config.json."""
        return "sliding_window", "layer_types", *(("use_sliding_window", "max_window_layers") if self.switched else ())

    def read(self, config: dict) -> list[int]:
        """The window of each layer, 0 for full attention."""
        window = window_of(config, self.default)
        if self.switched and not config.get("use_sliding_window", False):
            window = 0
        return [window if kind == SLIDING else 0 for kind in self.layer_types(config)]

    def layer_types(self, config: dict) -> list[str]:
        types = config.get("layer_types") or self.types(config)
        if not isinstance(types, list):
            raise Unsupported(f"config.json: layer_types={types!r} has the wrong type: it must be a list")
        unknown = [kind for kind in types if kind not in TYPES]
        if unknown or len(types) != config["num_hidden_layers"]:
            given = repr(unknown[0]) if unknown else f"{len(types)} types for {config['num_hidden_layers']} layers"
            raise Unsupported(f"config.json: layer_types has {given}: each layer must have one of {', '.join(TYPES)}")
        return types

    def write(self, windows: list[int]) -> dict:
        types = [SLIDING if window else FULL for window in windows]
        keys = {"layer_types": types} | ({"sliding_window": max(windows)} if any(windows) else {})
        first = types.index(SLIDING) if any(windows) else len(types)
        return keys | ({"use_sliding_window": any(windows), "max_window_layers": first} if self.switched else {})


def windows_of(blocks: list) -> list[int]:
    """The window of each layer's block."""
    return [getattr(block.attention, "window", 0) for block in blocks]


def name_of(window: int) -> str:
    """The name of a block with this window."""
    return f"window_{window}" if window else "full"


def windowed(window: int) -> tuple[str, dict]:
    """The name and the fields of a layer that differs from others by its window alone."""
    return name_of(window), {WINDOW: window} if window else {}


def everywhere(default: int = 0) -> ByLayer:
    """`sliding_window` applies to every layer; null means no window. `default` is the window if the key is missing."""

    def read(config: dict, changes: dict) -> list[tuple[str, dict]]:
        return [windowed(window_of(config, default))] * config["num_hidden_layers"]

    return ByLayer(read, lambda blocks: {"sliding_window": windows_of(blocks)[0] or None}, ("sliding_window",))


def some_layers(types: Callable[[dict], list[str]], default: int, switched: bool = False) -> ByLayer:
    """`sliding_window` applies to the sliding layers (class Sliding)."""
    sliding = Sliding(types, default, switched)

    def read(config: dict, changes: dict) -> list[tuple[str, dict]]:
        return [windowed(window) for window in sliding.read(config)]

    return ByLayer(read, lambda blocks: sliding.write(windows_of(blocks)), sliding.keys)


def some_layers_with_rope(types: Callable[[dict], list[str]], default: int, rope: Rope) -> ByLayer:
    """`sliding_window` applies to the sliding layers, whose RoPE may differ from that of the others."""
    sliding = Sliding(types, default)

    def read(config: dict, changes: dict) -> list[tuple[str, dict]]:
        kinds = sliding.layer_types(config)
        own = {SLIDING: windowed(window_of(config, default)), FULL: windowed(0)}
        own = {kind: (name, fields | read_rope(rope, config, changes, kind)) for kind, (name, fields) in own.items()}
        return [own[kind] for kind in kinds]

    return ByLayer(read, lambda blocks: sliding.write(windows_of(blocks)), sliding.keys)


def every(number: int) -> Callable[[dict], list[str]]:
    """Layer types in which each `number`-th layer has full attention."""
    return lambda config: [SLIDING if (i + 1) % number else FULL for i in range(config["num_hidden_layers"])]


def window_of(config: dict, default: int) -> int:
    """The window of the sliding layers; 0 if config.json has none."""
    return count("sliding_window", config.get("sliding_window", default) or 0)


def period_of(values: list) -> list:
    """The shortest list that gives `values` when repeated."""
    count = len(values)
    return next(values[:p] for p in range(1, count + 1) if count % p == 0 and values == values[:p] * (count // p))
