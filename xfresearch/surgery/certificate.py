"""The certificate of a conversion: how much two models differ, measured, and how much a broken conversion differs.

The models are compared in float64, on held-out text, on sequences that together have every token, up to the last row of
every table of positions, with every expert in turn, and with and without the cache of decoding. A difference is the largest
one over all logits, relative to the spread of the logits of the same token.
"""

import math
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np

from xfresearch.kernels.cross_entropy import nll_of_logits
from xfresearch.models.model_config import ModelConfig, longest_sequence, mixtures
from xfresearch.run.closed_form import costs
from xfresearch.runtime.tables import count
from xfresearch.surgery.layerwise import Runner
from xfresearch.surgery.network import Network, Params

BOUND = 1e-10  # relative, in float64: an exact conversion that misses it writes nothing
CONTROL = 1000 * BOUND  # the control must differ by at least this much
LONGEST = 1024  # tokens of a sequence, if no table has more rows
SPREAD = 4096  # logits of a token at most, evenly spaced, of which their spread is taken
CACHED = 4  # tokens that are decoded one by one
DTYPES = ("float32", "bfloat16")


@dataclass
class Certificate:
    """The measurements of one chain of conversions; differences of logits are those of `difference_of_logits`."""

    conversions: list[str]
    approximate: bool
    differences: dict[str, dict[str, float]] = field(default_factory=dict)  # in float64: {tokens: {absolute, relative}}
    gradient: float = 0.0  # of the loss for a factor of each token's embedding, float64: it has no basis
    controls: dict[str, float] = field(default_factory=dict)  # {step that was left out: difference}
    rounded: dict[str, float] = field(default_factory=dict)  # {dtype: difference in float64 with parameters of this dtype}
    other_dtypes: dict[str, float] = field(default_factory=dict)  # of the computation, as information
    bits_per_byte: dict[str, float] = field(default_factory=dict)  # before, after
    costs: dict[str, dict[str, float]] = field(default_factory=dict)  # {name: {before, after}}
    figures: dict[str, float] = field(default_factory=dict)  # condition numbers, error bounds
    first_difference: str = ""  # the tap at which the models first differ; '' if they do not
    domain: str = ""  # what the logits were compared on
    dropout: str = ""  # what is said of it; '' for a model without
    seconds: float = 0.0  # that the comparison took

    @property
    def relative(self) -> float:
        """The largest relative difference in float64; NaN if one is NaN, which Python's max would lose."""
        values = [each["relative"] for each in self.differences.values()]
        return float(np.max(values)) if values else math.inf

    @property
    def exact(self) -> bool:
        """Whether the models agree, and the comparison would have found a fault."""
        control = np.min([*self.controls.values()]) if self.controls else 0.0
        return self.relative <= BOUND and not self.not_finite and bool(control >= CONTROL)

    @property
    def not_finite(self) -> list[str]:
        """The names of the comparisons, and of the controls, that are NaN or infinite."""
        measured = {name: each["relative"] for name, each in self.differences.items()} | self.controls
        return [name for name, each in measured.items() if not math.isfinite(each)]

    def as_dict(self) -> dict[str, Any]:
        return asdict(self) | {"relative": self.relative, "exact": self.exact, "bound": BOUND}

    def __str__(self) -> str:
        """The certificate as a table. Differences are relative."""
        verdict = "exact" if self.exact else "approximate" if self.approximate else "NOT exact"
        rows = [(", ".join(self.conversions), verdict), ("compared on", f"{self.domain}, in {self.seconds:.0f} s")]
        rows += [("dropout", self.dropout)] if self.dropout else []
        differences = {name: each["relative"] for name, each in self.differences.items()}
        rows += [(f"difference of logits, {name}, float64", f"{each:.1e}") for name, each in differences.items()]
        rows += [(f"the same with parameters rounded to {dtype}", f"{each:.1e}") for dtype, each in self.rounded.items()]
        rows += [("difference of the embedding's gradient, float64", f"{self.gradient:.1e}")]
        rows += [(f"control: {name}, float64", f"{each:.1e}") for name, each in self.controls.items()]
        rows += [(f"difference of logits, {dtype}", f"{each:.1e}") for dtype, each in self.other_dtypes.items()]
        rows += [(name, f"{each:.3g}") for name, each in self.figures.items()]
        if self.bits_per_byte:
            rows.append(("bits per byte", " -> ".join(f"{each:.4f}" for each in self.bits_per_byte.values())))
        rows += [(name, " -> ".join(count(each) for each in pair.values())) for name, pair in self.costs.items()]
        width = max(len(name) for name, _ in rows)
        return "\n".join(f"{name:<{width}}  {value}" for name, value in rows)


def certify(
    certificate: Certificate,
    before: Network,
    after: Network,
    broken: dict[str, Network],
    text_BL: np.ndarray,
    n_bytes: int,
) -> None:
    """Fills in `certificate` by comparing two networks. `broken` are the controls by name. `text_BL` are token ids of
    held-out text with `n_bytes` bytes, or None. Call it with JAX in 64 bits."""
    began = time.perf_counter()
    domain = Domain.of(before, after, text_BL)
    tokens_BL = domain.batches[0]
    runners = [Runner(network, "float64") for network in (before, after)]
    cached = min(CACHED, tokens_BL.shape[1] - 1) if before.model.causal else 0
    old, new = (runner.run(tokens_BL, cached) for runner in runners)
    certificate.differences = {"all tokens": difference_of_logits(old.logits_BLV[:1], new.logits_BLV[:1])}
    if text_BL is not None:
        certificate.differences["text"] = difference_of_logits(old.logits_BLV[1:], new.logits_BLV[1:])
    if old.cached_BCV is not None and new.cached_BCV is not None:
        certificate.differences["with the cache"] = difference_of_logits(old.cached_BCV, new.cached_BCV)
    gradients = (each.gradient(tokens_BL, made.streams) for each, made in zip(runners, (old, new), strict=True))
    certificate.gradient = difference(*gradients)["relative"]
    for name, network in broken.items():
        certificate.controls[name] = difference_of_logits(old.logits_BLV, _logits(network, tokens_BL))["relative"]
    for dtype in DTYPES:
        sides = (_logits(network, tokens_BL, dtype) for network in (before, after))
        certificate.other_dtypes[dtype] = difference_of_logits(*sides)["relative"]
    saved = after.resolved.param_dtype
    certificate.rounded[saved] = difference_of_logits(old.logits_BLV, _logits(rounded(after, saved), tokens_BL))["relative"]
    if text_BL is not None:
        logits = {"before": old.logits_BLV, "after": new.logits_BLV}
        certificate.bits_per_byte = {name: _bits(each[1:], tokens_BL[1:], n_bytes) for name, each in logits.items()}
    certificate.costs = _costs(before.resolved, after.resolved, tokens_BL.shape[1])
    del old, new
    wrong = domain.compare(certificate, runners)
    if not certificate.relative <= BOUND:
        first, second = runners
        streams = [runner.run(tokens_BL if wrong is None else wrong).streams for runner in runners]
        certificate.first_difference = first_difference(first, second, *streams)
    certificate.domain, certificate.dropout = str(domain), _dropout(before.resolved, after.undropped)
    certificate.seconds = time.perf_counter() - began


def _dropout(model: ModelConfig, undropped: Iterable[str]) -> str:
    """What a certificate says of dropout: the functions are compared without, as in evaluation."""
    zero = f"; set to 0 for {', '.join(sorted(undropped))}, where training would drop other values" if undropped else ""
    return f"compared in evaluation, without it{zero}" if model.random else ""


class Domain(NamedTuple):
    """What two networks are compared on.

    batches: tokens [B, L] each. Their first rows together have every token of the vocabulary; the other rows of the first
    batch are text. length: of one more sequence, if a table has a row for each position or distance up to it; 0 without.
    experts: whether tokens are also sent to every expert in turn."""

    batches: list[np.ndarray]
    vocab_size: int
    length: int
    experts: bool

    @classmethod
    def of(cls, before: Network, after: Network, text_BL: np.ndarray) -> "Domain":
        model = before.resolved
        limit = longest_sequence(model) or model.max_length or LONGEST
        L = min(limit, LONGEST, *([] if text_BL is None else [text_BL.shape[1]]))
        text_TL = np.zeros((0, L), int) if text_BL is None else text_BL[:, :L]
        B, V = 1 + len(text_TL), model.vocab_size
        rng = np.random.default_rng(0)
        rows = 1 + B * max(0, -(-(V - L) // (B * L)))  # batches of one shape share compiled programs
        tokens_RL = np.concatenate([rng.permutation(V), rng.integers(V, size=rows * L)])[: rows * L].reshape(rows, L)
        batches = [np.concatenate([tokens_RL[:1], text_TL])] + [tokens_RL[n : n + B] for n in range(1, rows, B)]
        experts = [moe for each in (model, after.resolved) for moe in mixtures(each)]
        return cls(batches, V, limit if has_tables(before) and limit > L else 0, bool(experts))

    def compare(self, certificate: Certificate, runners: list[Runner]) -> np.ndarray | None:
        """Adds what the batches after the first one, the longest sequence and the experts show. The tokens of the first
        batch that differs; None if none does."""
        rng = np.random.default_rng(1)
        cases = [("all tokens", tokens_BL, False) for tokens_BL in self.batches[1:]]
        cases += [("all positions", rng.integers(self.vocab_size, size=(1, self.length)), False)] if self.length else []
        cases += [("all experts", self.batches[0], True)] if self.experts else []
        wrong = None
        for name, tokens_BL, in_turn in cases:
            new = difference_of_logits(*(runner.run(tokens_BL, in_turn=in_turn).logits_BLV for runner in runners))
            old = certificate.differences.get(name, new)
            certificate.differences[name] = {measure: float(np.max([old[measure], new[measure]])) for measure in new}
            wrong = tokens_BL if wrong is None and not new["relative"] <= BOUND else wrong
        return wrong

    def __str__(self) -> str:
        length = self.length or self.batches[0].shape[1]
        text = f"{len(self.batches[0]) - 1} rows of text" if len(self.batches[0]) > 1 else "no text"
        parts = [f"all {self.vocab_size:,} tokens", f"positions 0 to {length - 1:,}", text]
        return ", ".join(parts + ["every expert"] * self.experts)


def has_tables(network: Network) -> bool:
    """Whether a table has a row for each position, or for each distance of two positions."""
    outside = any(path.startswith(("position/", "shared/")) for path in network.outside)
    return outside or any(options.kind == "lambda" for at in network.layers for options in at.block.sublayers.values())


def rounded(network: Network, dtype: str) -> Network:
    """The network with its parameters as they are saved in `dtype`."""

    def of(params: Params) -> Params:
        return {path: leaf.astype(dtype).astype(np.float64) for path, leaf in params.items()}

    return replace(network, outside=of(network.outside), params=lambda number: of(network.params(number)))


def _logits(network: Network, tokens_BL: np.ndarray, dtype: str = "float64") -> np.ndarray:
    return Runner(network, dtype).run(tokens_BL).logits_BLV


def difference(a: np.ndarray, b: np.ndarray) -> dict[str, float]:
    """The largest absolute difference of two arrays, and the same relative to the largest number of the first."""
    a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
    absolute = float(np.abs(a - b).max())
    return {"absolute": absolute, "relative": absolute / (float(np.abs(a).max()) or 1.0)}


def difference_of_logits(a_BLV: np.ndarray, b_BLV: np.ndarray) -> dict[str, float]:
    """The largest absolute difference, and the largest relative one: that of each logit, divided by the spread of its
    token's logits in the first array (the middle half of them are in an interval of this size) or, for an outlier, by its
    distance from their median. So an outlier hides no other difference."""
    of_rows = [_of_tokens(a_LV, b_LV) for a_LV, b_LV in zip(a_BLV, b_BLV, strict=True)]
    absolute, relative = np.max(of_rows, 0)  # NaN if one is NaN
    return {"absolute": float(absolute), "relative": float(relative)}


def _of_tokens(a_LV: np.ndarray, b_LV: np.ndarray) -> tuple[float, float]:
    a_LV, b_LV = np.asarray(a_LV, np.float64), np.asarray(b_LV, np.float64)
    some_LS = a_LV[:, :: -(-a_LV.shape[1] // SPREAD)]  # all of a vocabulary of 50,000 take twice as long as the rest
    last = some_LS.shape[1] - 1
    at = [last // 4, last // 2, -(-3 * last // 4)]
    low_L1, middle_L1, high_L1 = np.split(np.partition(some_LS, at, 1)[:, at], 3, 1)
    spread_L1 = high_L1 - low_L1
    if not spread_L1.all():
        spread_L1 = np.where(spread_L1 > 0, spread_L1, a_LV.std(1, keepdims=True))
    scale_LV = np.maximum(spread_L1, np.abs(a_LV - middle_L1))
    error_LV = np.abs(a_LV - b_LV)
    return error_LV.max(), (error_LV / np.where(scale_LV > 0, scale_LV, 1.0)).max()


def _bits(logits_BLV: np.ndarray, tokens_BL: np.ndarray, n_bytes: int) -> float:
    """Bits per byte of the text, without its first token."""
    return float(nll_of_logits(logits_BLV[:, :-1], tokens_BL[:, 1:]).sum() / math.log(2) / n_bytes)


def _costs(before: ModelConfig, after: ModelConfig, length: int) -> dict[str, dict[str, float]]:
    both = {"before": costs(before, length), "after": costs(after, length)}
    names = ("parameters", "flops_per_token", "cache_bytes_per_token")
    return {name.replace("_", " "): {side: getattr(each, name) for side, each in both.items()} for name in names}


def first_difference(before: Runner, after: Runner, old: list[Any], new: list[Any]) -> str:
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
