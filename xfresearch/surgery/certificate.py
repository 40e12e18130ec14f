"""The certificate of a conversion: how much two models differ, measured, and how much a broken conversion differs.

The models are compared in float64, on held-out text, on sequences that together have every token, up to the last row of
every table of positions, with every expert in turn, and with and without the cache of decoding. A difference is the largest
one over all logits, relative to the spread of the logits of the same token.
"""

import math
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from xfresearch.data.packing import positions
from xfresearch.kernels.cross_entropy import nll_of_logits
from xfresearch.models.model_config import ModelConfig, mixtures, predicts_next
from xfresearch.pages.cards import Card
from xfresearch.run_config.closed_form import costs
from xfresearch.runtime.tables import count
from xfresearch.surgery.layerwise import Pass, Runner
from xfresearch.surgery.network import Network, Params

BOUND = 1e-10  # relative, in float64: an exact conversion that misses it writes nothing
CONTROL = 1000 * BOUND  # the control must differ by at least this much
LONGEST = 1024  # tokens of a sequence, if no table has more rows
SPREAD = 4096  # the spread of a token's logits is taken over at most so many of them, evenly spaced
CACHED = 4  # tokens that are decoded one by one
DTYPES = ("float32", "bfloat16")


@dataclass(repr=False)
class Certificate(Card):
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
    domain: str = ""  # the inputs on which the logits were compared, in words
    dropout: str = ""  # a sentence on dropout; '' for a model without
    seconds: float = 0.0  # of the comparison

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

    @property
    def _verdict(self) -> str:
        return "exact" if self.exact else "approximate" if self.approximate else "NOT exact"

    def _before_and_after(self) -> list[tuple[str, str]]:
        bits = " -> ".join(f"{each:.4f}" for each in self.bits_per_byte.values())
        rows = [("bits per byte", bits)] if bits else []
        for name, pair in self.costs.items():
            rows.append((name, " -> ".join(count(each, "B" if name == "parameters" else "G") for each in pair.values())))
        return rows

    def _title(self) -> str:
        return f"Certificate of {', '.join(self.conversions)}: {self._verdict}"

    def _facts(self) -> dict[str, str]:
        """The worst of each kind of measurement; `print` shows all of them."""
        facts = {"compared on": f"{self.domain}, in {self.seconds:.0f} s"}
        facts["difference"] = f"of logits, relative, in float64: at most {self.relative:.1e} (allowed {BOUND:.0e})"
        if self.controls:
            least = float(np.min([*self.controls.values()]))
            facts["control"] = f"of a broken conversion: at least {least:.1e} (needed {CONTROL:.0e})"
        return facts | dict(self._before_and_after())

    def __str__(self) -> str:
        """The certificate as a table. Differences are relative."""
        rows = [(", ".join(self.conversions), self._verdict), ("compared on", f"{self.domain}, in {self.seconds:.0f} s")]
        rows += [("dropout", self.dropout)] if self.dropout else []
        differences = {name: each["relative"] for name, each in self.differences.items()}
        rows += [(f"difference of logits, {name}, float64", f"{each:.1e}") for name, each in differences.items()]
        rows += [(f"the same with parameters rounded to {dtype}", f"{each:.1e}") for dtype, each in self.rounded.items()]
        rows += [("difference of the embedding's gradient, float64", f"{self.gradient:.1e}")]
        rows += [(f"control: {name}, float64", f"{each:.1e}") for name, each in self.controls.items()]
        rows += [(f"difference of logits, {dtype}", f"{each:.1e}") for dtype, each in self.other_dtypes.items()]
        rows += [(name, f"{each:.3g}") for name, each in self.figures.items()]
        rows += self._before_and_after()
        width = max(len(name) for name, _ in rows)
        return "\n".join(f"{name:<{width}}  {value}" for name, value in rows)


class Inputs(NamedTuple):
    """The inputs of a pass: tokens [B, L], with an encoder tokens of the source [B, S], and what else the models read of
    tokens and sources, as fields of a Context: types, positions, numbers of documents, prefixes."""

    tokens_BL: np.ndarray
    source_BS: np.ndarray | None = None
    read: Mapping[str, np.ndarray] = {}
    of_source: Mapping[str, np.ndarray] = {}

    @property
    def rows(self) -> int:
        return len(self.tokens_BL)

    def pass_of(self, runner: Runner, cached: int = 0, in_turn: bool = False) -> Pass:
        """The pass. Logits of padding are 0."""
        made = runner.run(self.tokens_BL, cached, in_turn, self.source_BS, self.read, self.of_source)
        if "segments_BL" not in self.read:
            return made
        return made._replace(logits_BLV=np.where(self.read["segments_BL"][..., None] > 0, made.logits_BLV, 0))

    def in_documents(self, prefixes: bool) -> "Inputs":
        """The same tokens as two documents with padding in each row; with `prefixes`, a third of each is a prefix."""
        read, of_source = (_documents(each) for each in (self.tokens_BL, self.source_BS))
        if prefixes:
            begins_BL = (read["positions_BL"] < self.tokens_BL.shape[1] // 6) & (read["segments_BL"] > 0)
            read["prefix_BL"] = begins_BL.astype(np.int32)
        return self._replace(read={**self.read, **read}, of_source=of_source)


def _documents(tokens_BL: np.ndarray | None) -> dict[str, np.ndarray]:
    """Numbers of documents, and positions in them, of rows with two documents and padding; {} for None."""
    if tokens_BL is None:
        return {}
    at_L, length = np.arange(tokens_BL.shape[1]), tokens_BL.shape[1]
    segments_L = np.select([at_L < length // 2, at_L < length - length // 8], [1, 2], 0)
    segments_BL = np.broadcast_to(segments_L, tokens_BL.shape)
    return {"segments_BL": segments_BL, "positions_BL": positions(segments_BL)}


class HeldOut(NamedTuple):
    """Rows of held-out text, which may be None, and their bytes without the first token; 0 if that is not known."""

    inputs: Inputs | None = None
    n_bytes: int = 0


def certify(
    certificate: Certificate, before: Network, after: Network, broken: dict[str, Network], text: HeldOut
) -> None:
    """Fills in `certificate` by comparing two networks. `broken` are the controls by name. Call it with JAX in 64 bits."""
    began = time.perf_counter()
    domain = Domain.of(before, after, text.inputs)
    inputs = domain.batches[0]
    runners = [Runner(network, "float64") for network in (before, after)]
    cached = min(CACHED, inputs.tokens_BL.shape[1] - 1) if before.model.causal else 0
    old, new = (inputs.pass_of(runner, cached) for runner in runners)
    certificate.differences = {"all tokens": difference_of_logits(old.logits_BLV[:1], new.logits_BLV[:1])}
    if text.inputs is not None:
        certificate.differences["text"] = difference_of_logits(old.logits_BLV[1:], new.logits_BLV[1:])
    if old.cached_BCV is not None and new.cached_BCV is not None:
        certificate.differences["with the cache"] = difference_of_logits(old.cached_BCV, new.cached_BCV)
    gradients = (each.gradient(inputs.tokens_BL, made) for each, made in zip(runners, (old, new), strict=True))
    certificate.gradient = difference(*gradients)["relative"]
    for name, network in broken.items():
        certificate.controls[name] = difference_of_logits(old.logits_BLV, _logits(network, inputs))["relative"]
    for dtype in DTYPES:
        sides = (_logits(network, inputs, dtype) for network in (before, after))
        certificate.other_dtypes[dtype] = difference_of_logits(*sides)["relative"]
    saved = after.resolved.param_dtype
    certificate.rounded[saved] = difference_of_logits(old.logits_BLV, _logits(rounded(after, saved), inputs))["relative"]
    if text.n_bytes and not predicts_next(before.resolved):
        logits = {"before": old.logits_BLV, "after": new.logits_BLV}
        bits = {name: _bits(each[1:], inputs.tokens_BL[1:], text.n_bytes) for name, each in logits.items()}
        certificate.bits_per_byte = bits
    certificate.costs = _costs(before.resolved, after.resolved, inputs.tokens_BL.shape[1])
    del old, new
    wrong = domain.compare(certificate, runners)
    if not certificate.relative <= BOUND:
        certificate.first_difference = first_difference(runners, inputs if wrong is None else wrong)
    certificate.domain, certificate.dropout = str(domain), _dropout(before.resolved, after.told[1])
    certificate.seconds = time.perf_counter() - began


def _dropout(model: ModelConfig, undropped: Iterable[str]) -> str:
    """The certificate's sentence on dropout: the functions are compared without it, as in evaluation."""
    zero = f"; set to 0 for {', '.join(sorted(undropped))}, where training would drop other values" if undropped else ""
    return f"compared in evaluation, without it{zero}" if model.random else ""


class Domain(NamedTuple):
    """The inputs on which two networks are compared.

    batches: tokens [B, L] each, and of sources. Their first rows together have every token of the vocabulary and, in turn,
    of every type; the other rows of the first batch are text, of type 0. longest: one more sequence, and one more source, if
    a table has a row for each position or distance up to it; None without. packed: the first batch as documents with padding
    and, if the model can have them, with prefixes. experts: whether tokens are also sent to every expert in turn."""

    batches: list[Inputs]
    model: ModelConfig
    longest: Inputs | None
    packed: Inputs
    experts: bool

    @classmethod
    def of(cls, before: Network, after: Network, text: Inputs | None) -> "Domain":
        model, rng, V = before.resolved, np.random.default_rng(0), before.resolved.vocab_size
        limits = [each.longest or each.max_length or LONGEST for each in reversed(model.all_stacks)]  # of tokens, of sources
        rows = [None, None] if text is None else text[:2]
        texts = [None if row is None else row[:, : min(limit, LONGEST)] for row, limit in zip(rows, limits, strict=False)]
        lengths = [min(n, LONGEST) if t is None else t.shape[1] for n, t in zip(limits, texts, strict=False)]
        B = 1 if text is None else 1 + text.rows
        left = max(0, *(-(-(V - length) // (B * length)) for length in lengths))
        count = 1 + B * left  # batches of one shape share compiled programs
        drawn = [_tokens(rng, V, count, length) for length in lengths]
        first = [d[:1] if t is None else np.concatenate([d[:1], t]) for d, t in zip(drawn, texts, strict=False)]
        batches = [_inputs(first)] + [_inputs(d[n : n + B] for d in drawn) for n in range(1, count, B)]
        more = has_tables(before) and any(limit > length for limit, length in zip(limits, lengths, strict=True))
        longest = _inputs(rng.integers(V, size=(1, limit)) for limit in limits) if more else None
        experts = [moe for each in (model, after.resolved) for moe in mixtures(each)]
        if model.token_types:
            batches = [each._replace(read={"token_types_BL": _types(each, model, n == 0)}) for n, each in enumerate(batches)]
        packed = batches[0].in_documents(prefixes=not model.without_prefix)
        return cls(batches, model, longest, packed, bool(experts))

    def compare(self, certificate: Certificate, runners: list[Runner]) -> Inputs | None:
        """Adds the differences on the batches after the first one, on the longest sequence and with every expert. Returns
        the first batch that differs; None if none does."""
        cases = [("all tokens", inputs, False) for inputs in self.batches[1:]]
        cases += [("all positions", self.longest, False)] if self.longest else []
        cases += [("packed documents", self.packed, False)]
        cases += [("all experts", self.batches[0], True)] if self.experts else []
        wrong = None
        for name, inputs, in_turn in cases:
            sides = (inputs.pass_of(runner, in_turn=in_turn).logits_BLV for runner in runners)
            new = difference_of_logits(*sides)
            old = certificate.differences.get(name, new)
            certificate.differences[name] = {measure: float(np.max([old[measure], new[measure]])) for measure in new}
            wrong = inputs if wrong is None and not new["relative"] <= BOUND else wrong
        return wrong

    def __str__(self) -> str:
        first = self.batches[0]
        both = (self.longest or first)[:2]
        last = [each.shape[1] - 1 for each in both if each is not None]
        of_source = f" (of sources 0 to {last[1]:,})" if len(last) > 1 else ""
        text = f"{first.rows - 1} rows of text" if first.rows > 1 else "no text"
        parts = [f"all {self.model.vocab_size:,} tokens", f"positions 0 to {last[0]:,}{of_source}", text]
        parts += [f"token types 0 to {self.model.token_types - 1}"] if self.model.token_types else []
        parts += ["packed documents", *["prefixes"] * ("prefix_BL" in self.packed.read)]
        return ", ".join(parts + ["every expert"] * self.experts)


def _inputs(parts: Iterable[np.ndarray]) -> Inputs:
    """Of tokens, and with an encoder of tokens of the source."""
    tokens_BL, *source = parts
    return Inputs(tokens_BL, source[0] if source else None)


def _types(inputs: Inputs, model: ModelConfig, text: bool) -> np.ndarray:
    """Types of tokens: all in turn in drawn rows; 0 in text, the rows after the first one."""
    types_BL = np.arange(inputs.tokens_BL.size).reshape(inputs.tokens_BL.shape) % model.token_types
    return np.where(np.arange(inputs.rows)[:, None] > 0, 0, types_BL) if text else types_BL


def _tokens(rng: np.random.Generator, vocab_size: int, rows: int, length: int) -> np.ndarray:
    """Tokens [rows, length], of which the first ones are all of the vocabulary once."""
    drawn = np.concatenate([rng.permutation(vocab_size), rng.integers(vocab_size, size=rows * length)])
    return drawn[: rows * length].reshape(rows, length)


def has_tables(network: Network) -> bool:
    """Whether a table has a row for each position, or for each distance of two positions."""
    return any(_has_tables(each) for each in network.stacks)


def _has_tables(network: Network) -> bool:
    outside = any(path.startswith(("position/", "shared/")) for path in network.outside)
    return outside or any(options.kind == "lambda" for at in network.layers for options in at.block.sublayers.values())


def rounded(network: Network, dtype: str) -> Network:
    """The network with its parameters as they are saved in `dtype`."""

    def of(params: Params) -> Params:
        return {path: leaf.astype(dtype).astype(np.float64) for path, leaf in params.items()}

    encoder = network.encoder and rounded(network.encoder, dtype)
    return replace(network, outside=of(network.outside), params=lambda number: of(network.params(number)), encoder=encoder)


def _logits(network: Network, inputs: Inputs, dtype: str = "float64") -> np.ndarray:
    return inputs.pass_of(Runner(network, dtype)).logits_BLV


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


class LayerPass(NamedTuple):
    """A layer in a pass: its input, its output, and the source that it reads."""

    path: str
    taps: Callable[[], dict[str, np.ndarray]]  # its named values
    output_BLD: np.ndarray


def _layers(runner: Runner, inputs: Inputs) -> list[LayerPass]:
    """The layers of both stacks in a pass, the encoder's first."""
    made = inputs.pass_of(runner)
    of_decoder = runner.decoder, made.streams, made.source, inputs.read
    of_encoder = [(runner.encoder, made.of_encoder, None, inputs.of_source)] if runner.encoder else []
    passes = []
    for stack, streams, source, read in (*of_encoder, of_decoder):
        for n in range(len(stack)):
            taps = partial(stack.taps, n, streams[n], source, read)
            passes.append(LayerPass(f"{stack.model.prefix}blocks.{n}", taps, np.asarray(streams[n + 1].x_BLD)))
    return passes


def first_difference(runners: list[Runner], inputs: Inputs) -> str:
    """The first named value inside the first layer whose outputs differ by more than BOUND, of the encoder or of the
    decoder; '' if the layers of the two networks do not correspond."""
    before, after = (_layers(runner, inputs) for runner in runners)
    if [each.path for each in before] != [each.path for each in after]:
        return ""
    return next((name for both in zip(before, after, strict=True) if (name := _difference_in(*both))), "final")


def _difference_in(before: LayerPass, after: LayerPass) -> str:
    """The first value in a layer that differs; '' if its outputs do not."""
    if not _differ(before.output_BLD, after.output_BLD):
        return ""
    first, second = before.taps(), after.taps()
    shared = [name for name in first if name in second and first[name].shape == second[name].shape]
    return next((name for name in shared if _differ(first[name], second[name])), before.path)


def _differ(a: np.ndarray, b: np.ndarray) -> bool:
    return a.shape != b.shape or not difference(a, b)["relative"] <= BOUND  # NaN differs, too
