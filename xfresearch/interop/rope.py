"""RoPE in config.json: `rope_theta` and `rope_scaling`, as models on the Hub have them, or `rope_parameters`, which
newer releases of `transformers` write."""

import sys

from xfresearch.interop.family import Rope, Unsupported, count, number
from xfresearch.models.mixers.softmax.config import SoftmaxConfig, rotary_size
from xfresearch.models.mixers.softmax.options import RopeConfig

FULL, SLIDING = TYPES = ("full_attention", "sliding_attention")  # of layers
PATH = "*.attention.rope."
# {rope_type: (our rope.scaling, {our field: Hugging Face key})}
SCALINGS = {
    "default": ("none", {}),
    "linear": ("linear", {"factor": "factor"}),
    "llama3": ("llama3", {"factor": "factor", "low_frequency": "low_freq_factor", "high_frequency": "high_freq_factor",
                          "original_length": "original_max_position_embeddings"}),
    "yarn": ("yarn", {"factor": "factor", "low_frequency": "beta_slow", "high_frequency": "beta_fast",
                      "original_length": "original_max_position_embeddings",
                      "attention_factor": "attention_factor", "truncate": "truncate"}),
}  # fmt: skip
DEFAULTS = {"beta_slow": 1.0, "beta_fast": 32.0, "attention_factor": 0.0, "truncate": True}


def read_rope(rope: Rope, config: dict, changes: dict, kind: str = FULL) -> dict:
    """Our RoPE fields of layers of the type `kind`, which matters for families that have a RoPE for each type.
    `changes` has the head sizes. Raises Unsupported if our models lack the scaling."""
    given, default = _given(rope, config, kind)
    scaling = given.get("rope_type", given.get("type", "default"))
    if scaling not in list(rope.scalings):  # in a list, because the value may not be hashable
        raise Unsupported(f"config.json: rope_type={scaling!r} is not allowed: it must be one of {', '.join(rope.scalings)}")
    name, keys = SCALINGS[scaling]
    theta = given.get("rope_theta")
    options = {
        PATH + "theta": number("rope_theta", default if theta is None else theta),
        PATH + "scaling": name,
        PATH + "fraction": _fraction(rope, config, given, changes),
    }
    original = config.get("original_max_position_embeddings", config.get("max_position_embeddings"))
    for ours, theirs in keys.items():
        value = given.get(theirs, DEFAULTS.get(theirs, original if ours == "original_length" else None))
        if value is None and theirs not in DEFAULTS:
            raise Unsupported(f"config.json: rope_scaling has no {theirs}: rope_type={scaling!r} requires it")
        options[PATH + ours] = _read(theirs, value)
    _check_others(given, scaling, keys.values())
    return options


def _given(rope: Rope, config: dict, kind: str) -> tuple[dict, float]:
    """The keys of RoPE of layers of the type `kind`, and theta if these keys lack it. As in `transformers`, rope_scaling
    comes before rope_parameters, which newer releases write and in which families with `by_type` have an object for each
    type of layer."""
    scaling, parameters = (_object(config, name) for name in ("rope_scaling", "rope_parameters"))
    if not rope.by_type:
        return scaling or parameters or rope.scaling_default, _theta(config, rope.theta, rope.theta_default)
    if parameters and not parameters.keys() & {FULL, SLIDING}:
        allowed = f"an object for each type of layer, {FULL} and {SLIDING}"
        raise Unsupported(f"config.json: rope_parameters={parameters!r} is not allowed: it must be {allowed}")
    own = _object(parameters, kind)
    if kind == SLIDING:
        return own, _theta(config, rope.sliding_theta, rope.sliding_theta_default)
    return own | scaling, _theta(config, rope.theta, rope.theta_default)


def _object(config: dict, name: str) -> dict:
    value = config.get(name) or {}
    if not isinstance(value, dict):
        raise Unsupported(f"config.json: {name}={value!r} has the wrong type: it must be an object")
    return value


def _theta(config: dict, key: str, default: float):
    theta = config.get(key)
    return default if theta is None else theta


def _read(key: str, value):
    """The value of a key of rope_scaling."""
    if key == "original_max_position_embeddings":
        return count(key, value)
    if key == "truncate":
        if not isinstance(value, bool):
            raise Unsupported(f"config.json: truncate={value!r} of rope_scaling has the wrong type: it must be a boolean")
        return value
    return number(key, DEFAULTS[key] if value is None else value)  # `transformers` takes them for null too


def _check_others(given: dict, scaling: str, read) -> None:
    """Refuses keys of rope_scaling that `transformers` reads and we do not, and names those that neither reads."""
    for unknown in sorted(given.keys() & {"mscale", "mscale_all_dim", "short_factor", "long_factor"}):
        raise Unsupported(f"config.json: {unknown} of rope_scaling is not allowed: our {scaling} does not support it")
    known = {"rope_type", "type", "rope_theta", "partial_rotary_factor", "original_max_position_embeddings", *read}
    ignored = sorted(given.keys() - known)
    if ignored:
        text = f"{', '.join(ignored)} of rope_scaling in config.json is not read: rope_type={scaling!r} has no such key"
        print(f"warning: {text} here or in transformers", file=sys.stderr)


def rope_names(rope: Rope, scaling: str) -> dict[str, str]:
    """{our RoPE field: Hugging Face key} for our rope.scaling=`scaling`."""
    fraction = rope.fraction or rope.size and f"{rope.size} over the size of a head"
    names = {
        PATH + ours: theirs for name, keys in SCALINGS.values() if name == scaling for ours, theirs in keys.items()
    }
    return names | {PATH + "theta": rope.theta} | ({PATH + "fraction": fraction} if fraction else {})


def _fraction(rope: Rope, config: dict, given: dict, changes: dict) -> float:
    """The fraction of a head's dimensions that RoPE rotates."""
    heads = changes["*.attention.heads"]
    width = changes["width"]
    size = changes.get("*.attention.head_size")
    head = size or max(width // heads, 1)
    if rope.size:
        return count(rope.size, config.get(rope.size, rope.size_default)) / head
    if not rope.fraction:
        if head % 2 and (size or width % heads == 0):
            name = "head_dim" if size else "hidden_size / num_attention_heads"
            raise Unsupported(f"config.json: {name}={head} is not allowed: it must be even, because RoPE rotates pairs")
        return _whole(given.get("partial_rotary_factor", config.get("partial_rotary_factor")))
    # In `rope_parameters`, every family uses the same key.
    fraction = given.get("partial_rotary_factor", config.get(rope.fraction))
    return number(rope.fraction, rope.default if fraction is None else fraction)


def _whole(fraction) -> float:
    """1.0, the fraction in families that rotate whole heads. `transformers` fails with other values, or ignores them."""
    if fraction not in (None, 1):
        reason = "1, because this family rotates whole heads"
        raise Unsupported(f"config.json: partial_rotary_factor={fraction!r} is not allowed: it must be {reason}")
    return 1.0


def write_rope(rope: Rope, full: SoftmaxConfig, sliding: SoftmaxConfig | None = None) -> dict:
    """The RoPE keys of config.json, in the form of models on the Hub. `sliding` is the attention of the sliding layers of
    a family that has a RoPE for each type of layer."""
    keys: dict = {rope.theta: full.rope.theta} if rope.theta else {}
    if rope.theta:
        unscaled = {"rope_type": "default"} if rope.scaling_default else None
        keys["rope_scaling"] = _scaling(full.rope) or unscaled
    if rope.size:
        keys[rope.size] = rotary_size(full.head_size, full.rope.fraction)
    if rope.fraction:
        keys[rope.fraction] = full.rope.fraction
    if sliding and rope.sliding_theta:
        keys[rope.sliding_theta] = sliding.rope.theta
    elif sliding and sliding.rope.theta != rope.sliding_theta_default:
        parts = {FULL: full.rope, SLIDING: sliding.rope}
        keys["rope_parameters"] = {kind: {"rope_theta": part.theta} | _scaling(part) for kind, part in parts.items()}
        keys["rope_scaling"] = None
    return keys


def _scaling(ours: RopeConfig) -> dict:
    """rope_scaling of our RoPE; {} if it is not scaled."""
    theirs, keys = next((kind, keys) for kind, (name, keys) in SCALINGS.items() if name == ours.scaling)
    values = {name: getattr(ours, field) for field, name in keys.items()}
    usual = {"attention_factor": 0.0, "truncate": True}  # `transformers` has the same defaults; 0 is its null
    values = {name: value for name, value in values.items() if usual.get(name) != value}
    return {"rope_type": theirs, **values} if keys else {}
