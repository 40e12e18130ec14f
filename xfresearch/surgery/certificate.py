"""The certificate of a conversion: how much two models differ, measured, and how much a broken conversion differs.

The models are compared in float64, on held-out text and on random tokens of full length, with and without the cache of
decoding. A difference is the largest one over all logits; relative means over the largest logit.
"""

import math
from dataclasses import asdict, dataclass, field

import numpy as np

from xfresearch.kernels.cross_entropy import nll_of_logits
from xfresearch.models.closed_form import costs
from xfresearch.models.model_config import ModelConfig, longest_sequence
from xfresearch.surgery.layerwise import Runner
from xfresearch.surgery.network import Network
from xfresearch.tables import count

BOUND = 1e-10  # relative, in float64: an exact conversion that misses it writes nothing
CONTROL = 1000 * BOUND  # the control must differ by at least this much
LONGEST = 1024  # tokens of a comparison
CACHED = 4  # tokens that are decoded one by one
DTYPES = ("float32", "bfloat16")


@dataclass
class Certificate:
    """The measurements of one chain of conversions; every difference is relative to the largest logit."""

    conversions: list[str]
    approximate: bool
    differences: dict[str, dict[str, float]] = field(default_factory=dict)  # in float64: {tokens: {absolute, relative}}
    gradient: float = 0.0  # of the loss for a factor of each token's embedding, float64: it has no basis
    controls: dict[str, float] = field(default_factory=dict)  # {step that was left out: difference}
    other_dtypes: dict[str, float] = field(default_factory=dict)  # as information
    bits_per_byte: dict[str, float] = field(default_factory=dict)  # before, after
    costs: dict[str, dict[str, float]] = field(default_factory=dict)  # {name: {before, after}}
    figures: dict[str, float] = field(default_factory=dict)  # condition numbers, error bounds
    first_difference: str = ""  # the tap at which the models first differ; '' if they do not

    @property
    def relative(self) -> float:
        """The largest relative difference in float64; NaN if one is NaN, which Python's max would lose."""
        found = [each["relative"] for each in self.differences.values()]
        return float(np.max(found)) if found else math.inf

    @property
    def exact(self) -> bool:
        """Whether the models agree, and the comparison would have found a fault."""
        control = np.min([*self.controls.values()]) if self.controls else 0.0
        return self.relative <= BOUND and not self.not_finite and bool(control >= CONTROL)

    @property
    def not_finite(self) -> list[str]:
        """The names of the comparisons, and of the controls, that are NaN or infinite."""
        found = {name: each["relative"] for name, each in self.differences.items()} | self.controls
        return [name for name, each in found.items() if not math.isfinite(each)]

    def as_dict(self) -> dict:
        return asdict(self) | {"relative": self.relative, "exact": self.exact, "bound": BOUND}

    def __str__(self) -> str:
        """The certificate as a table. Differences are relative."""
        verdict = "exact" if self.exact else "approximate" if self.approximate else "NOT exact"
        rows = [(", ".join(self.conversions), verdict)]
        differences = {name: each["relative"] for name, each in self.differences.items()}
        rows += [(f"difference of logits, {name}, float64", f"{each:.1e}") for name, each in differences.items()]
        rows += [("difference of the embedding's gradient, float64", f"{self.gradient:.1e}")]
        rows += [(f"control: {name}, float64", f"{each:.1e}") for name, each in self.controls.items()]
        rows += [(f"difference of logits, {dtype}", f"{each:.1e}") for dtype, each in self.other_dtypes.items()]
        rows += [(name, f"{each:.3g}") for name, each in self.figures.items()]
        if self.bits_per_byte:
            rows.append(("bits per byte", " -> ".join(f"{each:.4f}" for each in self.bits_per_byte.values())))
        rows += [(name, " -> ".join(count(each) for each in pair.values())) for name, pair in self.costs.items()]
        width = max(len(name) for name, _ in rows)
        return "\n".join(f"{name:<{width}}  {value}" for name, value in rows)


def certify(found: Certificate, before: Network, after: Network, broken: dict[str, Network], text_BL, n_bytes: int) -> None:
    """Fills in `found` by comparing two networks. `broken` are the controls by name. `text_BL` are token ids of held-out
    text with `n_bytes` bytes, or None. Call it with JAX in 64 bits."""
    inputs = {"random tokens": random_tokens(before.resolved)} | ({} if text_BL is None else {"text": text_BL})
    length = min(rows.shape[1] for rows in inputs.values())
    tokens_BL = np.concatenate([rows[:, :length] for rows in inputs.values()])
    runners = [Runner(network, "float64") for network in (before, after)]
    cached = min(CACHED, length - 1) if before.model.causal else 0
    old, new = (runner.run(tokens_BL, cached) for runner in runners)
    first = 0
    for name, rows in inputs.items():
        at = slice(first, first + len(rows))
        found.differences[name] = difference(old.logits_BLV[at], new.logits_BLV[at])
        first += len(rows)
    if cached:
        found.differences["with the cache"] = difference(old.cached_BCV, new.cached_BCV)
    gradients = (each.gradient(tokens_BL, made.streams) for each, made in zip(runners, (old, new), strict=True))
    found.gradient = difference(*gradients)["relative"]
    for name, network in broken.items():
        other = Runner(network, "float64").run(tokens_BL).logits_BLV
        found.controls[name] = difference(old.logits_BLV, other)["relative"]
    for dtype in DTYPES:
        sides = (Runner(network, dtype).run(tokens_BL).logits_BLV for network in (before, after))
        found.other_dtypes[dtype] = difference(*sides)["relative"]
    if text_BL is not None:
        logits = {"before": old.logits_BLV, "after": new.logits_BLV}
        found.bits_per_byte = {name: _bits(each[1:], text_BL[:, :length], n_bytes) for name, each in logits.items()}
    found.costs = _costs(before.resolved, after.resolved, length)
    if not found.relative <= BOUND:
        found.first_difference = first_difference(*runners, old.streams, new.streams)


def random_tokens(model: ModelConfig) -> np.ndarray:
    """Random token ids [1, L] of the longest length that the model supports, at most LONGEST."""
    length = min(longest_sequence(model) or model.max_length or LONGEST, LONGEST)
    return np.random.default_rng(0).integers(model.vocab_size, size=(1, length))


def difference(a, b) -> dict[str, float]:
    """The largest absolute difference of two arrays, and the same relative to the largest number of the first."""
    a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
    absolute = float(np.abs(a - b).max())
    return {"absolute": absolute, "relative": absolute / (float(np.abs(a).max()) or 1.0)}


def _bits(logits_BLV: np.ndarray, tokens_BL: np.ndarray, n_bytes: int) -> float:
    """Bits per byte of the text, without its first token."""
    return float(nll_of_logits(logits_BLV[:, :-1], tokens_BL[:, 1:]).sum() / math.log(2) / n_bytes)


def _costs(before: ModelConfig, after: ModelConfig, length: int) -> dict[str, dict[str, float]]:
    both = {"before": costs(before, length), "after": costs(after, length)}
    names = ("parameters", "flops_per_token", "cache_bytes_per_token")
    return {name.replace("_", " "): {side: getattr(each, name) for side, each in both.items()} for name in names}


def first_difference(before: Runner, after: Runner, old: list, new: list) -> str:
    """The first named value inside the first layer whose outputs differ by more than BOUND; '' if the layers of the two
    networks do not correspond."""
    if len(old) != len(new):
        return ""
    for number, streams in enumerate(zip(old[1:], new[1:], strict=True)):
        shapes = {stream.x_BLD.shape for stream in streams}
        if len(shapes) == 1 and difference(*(stream.x_BLD for stream in streams))["relative"] <= BOUND:
            continue
        values = before.taps(number, old[number]), after.taps(number, new[number])
        for name in [name for name in values[0] if name in values[1]]:
            a, b = (each[name] for each in values)
            if a.shape == b.shape and not difference(a, b)["relative"] <= BOUND:  # NaN differs, too
                return name
        return f"blocks.{number}"
    return "final"
