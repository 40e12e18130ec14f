"""RoPE in config.json: `rope_theta` and `rope_scaling`, as models on the Hub have them, or `rope_parameters`, which
newer releases of `transformers` write."""

from xfresearch.interop.family import Rope, Unsupported, count, number
from xfresearch.models.mixers.softmax.config import SoftmaxConfig, rotary_size

PATH = "*.attention.rope."
# {rope_type: (our rope.scaling, {our field: Hugging Face key})}
SCALINGS = {
    "default": ("none", {}),
    "linear": ("linear", {"factor": "factor"}),
    "llama3": ("llama3", {"factor": "factor", "low_frequency": "low_freq_factor", "high_frequency": "high_freq_factor",
                          "original_length": "original_max_position_embeddings"}),
    "yarn": ("yarn", {"factor": "factor", "low_frequency": "beta_slow", "high_frequency": "beta_fast",
                      "original_length": "original_max_position_embeddings",
                      "attention_factor": "attention_factor"}),
}  # fmt: skip
DEFAULTS = {"beta_slow": 1.0, "beta_fast": 32.0, "attention_factor": 0.0}


def read_rope(rope: Rope, config: dict, changes: dict) -> dict:
    """Our RoPE fields. `changes` has the head sizes. Raises Unsupported if our models lack the scaling."""
    given = config.get("rope_scaling") or config.get("rope_parameters") or {}  # in the order of `transformers`
    if not isinstance(given, dict):
        raise Unsupported(f"config.json: rope_scaling={given!r} has the wrong type: it must be an object")
    kind = given.get("rope_type", given.get("type", "default"))
    if kind not in list(SCALINGS):  # in a list, because the value may not be hashable
        raise Unsupported(f"config.json: rope_type={kind!r} is not allowed: it must be one of {', '.join(SCALINGS)}")
    name, keys = SCALINGS[kind]
    theta = given.get("rope_theta", config.get(rope.theta)) or rope.theta_default
    found = {
        PATH + "theta": number(rope.theta, theta),
        PATH + "scaling": name,
        PATH + "fraction": _fraction(rope, config | given, changes),
    }
    original = config.get("original_max_position_embeddings", config.get("max_position_embeddings"))
    for ours, theirs in keys.items():
        value = given.get(theirs, DEFAULTS.get(theirs, original if ours == "original_length" else None))
        if value is None and theirs not in DEFAULTS:
            raise Unsupported(f"config.json: rope_scaling has no {theirs}: rope_type={kind!r} requires it")
        found[PATH + ours] = count(theirs, value) if ours == "original_length" else number(theirs, value or 0.0)
    for unknown in sorted(given.keys() & {"mscale", "mscale_all_dim", "short_factor", "long_factor"}):
        raise Unsupported(f"config.json: {unknown} of rope_scaling is not allowed: our yarn does not support it")
    if not given.get("truncate", True):
        raise Unsupported(
            "config.json: truncate=False of rope_scaling is not allowed: it must be true, because our yarn blends "
            "between whole dimensions"
        )
    return found


def rope_names(rope: Rope, scaling: str) -> dict[str, str]:
    """{our RoPE field: Hugging Face key} for our rope.scaling=`scaling`."""
    fraction = rope.fraction or rope.size and f"{rope.size} over the size of a head"
    names = {
        PATH + ours: theirs for name, keys in SCALINGS.values() if name == scaling for ours, theirs in keys.items()
    }
    return names | {PATH + "theta": rope.theta} | ({PATH + "fraction": fraction} if fraction else {})


def _fraction(rope: Rope, config: dict, changes: dict) -> float:
    """The fraction of a head's dimensions that RoPE rotates."""
    heads = changes["*.attention.heads"]
    width = changes["width"]
    given = changes.get("*.attention.head_size")
    head = given or max(width // heads, 1)
    if rope.size:
        return count(rope.size, config.get(rope.size, rope.size_default)) / head
    if not rope.fraction:
        if head % 2 and (given or width % heads == 0):
            name = "head_dim" if given else "hidden_size / num_attention_heads"
            raise Unsupported(f"config.json: {name}={head} is not allowed: it must be even, because RoPE rotates pairs")
        return 1.0
    # In `rope_parameters`, every family uses the same key.
    return number(rope.fraction, config.get("partial_rotary_factor", config.get(rope.fraction, rope.default)))


def write_rope(rope: Rope, attention: SoftmaxConfig, length: int) -> dict:
    """The RoPE keys of config.json, in the form of models on the Hub."""
    ours = attention.rope
    theirs, keys = next((kind, keys) for kind, (name, keys) in SCALINGS.items() if name == ours.scaling)
    found = {rope.theta: ours.theta} if rope.theta else {}
    values = {name: getattr(ours, field) for field, name in keys.items() if name != "attention_factor"}
    if getattr(ours, "attention_factor", 0.0) and ours.scaling == "yarn":
        values["attention_factor"] = ours.attention_factor
    if rope.theta:
        found["rope_scaling"] = None if theirs == "default" else {"rope_type": theirs, **values}
    if rope.size:
        found[rope.size] = rotary_size(attention.head_size, ours.fraction)
    if rope.fraction:
        found[rope.fraction] = ours.fraction
    return found
