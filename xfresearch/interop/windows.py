"""Sliding windows in config.json: one for all layers, or of those layers that `layer_types` calls sliding."""

from collections.abc import Callable

from xfresearch.interop.family import Refused, Windows, count

TYPES = ("full_attention", "sliding_attention")


def everywhere(default: int = 0) -> Windows:
    """`sliding_window` for every layer, null for none; `default` where the key is missing."""

    def read(config: dict) -> list[int]:
        return [_window(config, default)] * config["num_hidden_layers"]

    return Windows(read, lambda windows: {"sliding_window": windows[0] or None})


def by_layer(default_types: Callable[[dict], list[str]], default: int, switched: bool = False) -> Windows:
    """`sliding_window` for the layers that `layer_types`, or without it `default_types(config)`, calls sliding.

    switched: it counts under `use_sliding_window` only, and `max_window_layers` says how many layers come before the first
    sliding one, for readers that do not know `layer_types`.
    """

    def read(config: dict) -> list[int]:
        window = _window(config, default)
        if switched and not config.get("use_sliding_window", False):
            window = 0
        types = config.get("layer_types") or default_types(config)
        if not isinstance(types, list):
            raise Refused(f"config.json: layer_types={types!r} has the wrong type: it must be a list")
        unknown = [kind for kind in types if kind not in TYPES]
        if unknown or len(types) != config["num_hidden_layers"]:
            given = repr(unknown[0]) if unknown else f"{len(types)} types for {config['num_hidden_layers']} layers"
            raise Refused(f"config.json: layer_types has {given}: each layer has one of {', '.join(TYPES)}")
        return [window if kind == "sliding_attention" else 0 for kind in types]

    def write(windows: list[int]) -> dict:
        types = [TYPES[window > 0] for window in windows]
        found = {"layer_types": types} | ({"sliding_window": max(windows)} if any(windows) else {})
        first = types.index("sliding_attention") if any(windows) else len(types)
        return found | ({"use_sliding_window": any(windows), "max_window_layers": first} if switched else {})

    return Windows(read, write)


def _window(config: dict, default: int) -> int:
    """The window of layers that have one; 0 where config.json gives them none."""
    return count("sliding_window", config.get("sliding_window", default) or 0)
