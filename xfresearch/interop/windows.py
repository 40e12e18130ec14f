"""Sliding windows in config.json: one for all layers, or one for the layers that `layer_types` marks as sliding."""

from collections.abc import Callable

from xfresearch.interop.family import Unsupported, Windows, count

TYPES = ("full_attention", "sliding_attention")


def everywhere(default: int = 0) -> Windows:
    """`sliding_window` applies to every layer; null means no window. `default` is the window if the key is missing."""

    def read(config: dict) -> list[int]:
        return [_window(config, default)] * config["num_hidden_layers"]

    return Windows(read, lambda windows: {"sliding_window": windows[0] or None})


def by_layer(default_types: Callable[[dict], list[str]], default: int, switched: bool = False) -> Windows:
    """`sliding_window` applies to the layers that `layer_types`, by default `default_types(config)`, marks as sliding.

    switched: it applies only if `use_sliding_window` is true. `max_window_layers` is the number of layers before the
    first sliding one, for readers that do not support `layer_types`.
    """

    def read(config: dict) -> list[int]:
        window = _window(config, default)
        if switched and not config.get("use_sliding_window", False):
            window = 0
        types = config.get("layer_types") or default_types(config)
        if not isinstance(types, list):
            raise Unsupported(f"config.json: layer_types={types!r} has the wrong type: it must be a list")
        unknown = [kind for kind in types if kind not in TYPES]
        if unknown or len(types) != config["num_hidden_layers"]:
            given = repr(unknown[0]) if unknown else f"{len(types)} types for {config['num_hidden_layers']} layers"
            raise Unsupported(f"config.json: layer_types has {given}: each layer must have one of {', '.join(TYPES)}")
        return [window if kind == "sliding_attention" else 0 for kind in types]

    def write(windows: list[int]) -> dict:
        types = [TYPES[window > 0] for window in windows]
        found = {"layer_types": types} | ({"sliding_window": max(windows)} if any(windows) else {})
        first = types.index("sliding_attention") if any(windows) else len(types)
        return found | ({"use_sliding_window": any(windows), "max_window_layers": first} if switched else {})

    return Windows(read, write)


def _window(config: dict, default: int) -> int:
    """The window of the sliding layers; 0 if config.json has none."""
    return count("sliding_window", config.get("sliding_window", default) or 0)
