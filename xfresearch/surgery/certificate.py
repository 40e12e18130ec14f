"""The certificate of a conversion: how much two models differ, measured, and how much a broken conversion differs.

The models are compared in float64, on held-out text and on random tokens of full length, with and without the cache of
decoding. A difference is the largest one over all logits; relative means over the largest logit.
"""

import math
from dataclasses import asdict, dataclass, field, replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from xfresearch.model_inputs import forward, tap_names
from xfresearch.models import decoding, transformer
from xfresearch.models.closed_form import costs
from xfresearch.models.model_config import ModelConfig, longest_sequence, resolve_model
from xfresearch.models.taps import Taps
from xfresearch.tables import count

BOUND = 1e-10  # relative, in float64: an exact conversion that misses it writes nothing
CONTROL = 1000 * BOUND  # the control must differ by at least this much
LONGEST = 1024  # tokens of a comparison
CACHED = 4  # tokens that are decoded one by one
DTYPES = ("float32", "bfloat16")


@dataclass(frozen=True)
class Side:
    """A model before or after surgery, with parameters in float64."""

    model: ModelConfig
    params: dict

    def in_dtype(self, dtype: str) -> "Side":
        """The same model with this dtype of computation, and parameters in float32 or float64."""
        wide = "float64" if dtype == "float64" else "float32"
        model = resolve_model(replace(self.model, dtype=dtype, param_dtype=wide))
        return Side(model, jax.tree.map(lambda leaf: jnp.asarray(leaf, wide), self.params))


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
    condition_numbers: dict[str, float] = field(default_factory=dict)
    first_difference: str = ""  # the tap at which the models first differ; '' if they do not

    @property
    def relative(self) -> float:
        """The largest relative difference in float64."""
        return max((each["relative"] for each in self.differences.values()), default=math.inf)

    @property
    def exact(self) -> bool:
        """Whether the models agree, and the comparison would have found a fault."""
        return self.relative <= BOUND and min(self.controls.values(), default=0.0) >= CONTROL

    def as_dict(self) -> dict:
        return asdict(self) | {"relative": self.relative, "exact": self.exact, "bound": BOUND}

    def __str__(self) -> str:
        """The certificate as a table. Differences are relative."""
        verdict = "approximate" if self.approximate else "exact" if self.exact else "NOT exact"
        rows = [(", ".join(self.conversions), verdict)]
        differences = {name: each["relative"] for name, each in self.differences.items()}
        rows += [(f"difference of logits, {name}, float64", f"{each:.1e}") for name, each in differences.items()]
        rows += [("difference of the embedding's gradient, float64", f"{self.gradient:.1e}")]
        rows += [(f"control: {name}, float64", f"{each:.1e}") for name, each in self.controls.items()]
        rows += [(f"difference of logits, {dtype}", f"{each:.1e}") for dtype, each in self.other_dtypes.items()]
        rows += [(f"condition number of {name}", f"{each:.3g}") for name, each in self.condition_numbers.items()]
        if self.bits_per_byte:
            rows.append(("bits per byte", " -> ".join(f"{each:.4f}" for each in self.bits_per_byte.values())))
        rows += [(name, " -> ".join(count(each) for each in pair.values())) for name, pair in self.costs.items()]
        width = max(len(name) for name, _ in rows)
        return "\n".join(f"{name:<{width}}  {value}" for name, value in rows)


def certify(
    found: Certificate, before: Side, after: Side, broken: dict[str, Side], text_BL, n_bytes: int
) -> Certificate:
    """Fills in `found` by comparing two models. `broken` are the controls by name. `text_BL` are token ids of held-out
    text with `n_bytes` bytes, or None. Call it with JAX in 64 bits."""
    inputs = {"random tokens": random_tokens(before.model)} | ({} if text_BL is None else {"text": text_BL})
    tokens_BL = np.concatenate([rows[:, : _length(inputs)] for rows in inputs.values()])
    old, new = before.in_dtype("float64"), after.in_dtype("float64")
    old_BLV, new_BLV = logits_of(old, tokens_BL), logits_of(new, tokens_BL)
    first = 0
    for name, rows in inputs.items():
        at = slice(first, first + len(rows))
        found.differences[name] = difference(old_BLV[at], new_BLV[at])
        first += len(rows)
    if before.model.causal:
        found.differences["with the cache"] = difference(_cached(old, tokens_BL), _cached(new, tokens_BL))
    found.gradient = difference(_gradient(old, tokens_BL), _gradient(new, tokens_BL))["relative"]
    for name, side in broken.items():
        found.controls[name] = difference(old_BLV, logits_of(side.in_dtype("float64"), tokens_BL))["relative"]
    for dtype in DTYPES:
        sides = (logits_of(side.in_dtype(dtype), tokens_BL) for side in (before, after))
        found.other_dtypes[dtype] = difference(*sides)["relative"]
    if text_BL is not None:
        logits = {"before": old_BLV, "after": new_BLV}
        found.bits_per_byte = {name: _bits(each[-len(text_BL) :], text_BL, n_bytes) for name, each in logits.items()}
    found.costs = _costs(before.model, after.model, tokens_BL.shape[1])
    if found.relative > BOUND:
        found.first_difference = first_difference(old, new, tokens_BL)
    return found


def random_tokens(model: ModelConfig) -> np.ndarray:
    """Random token ids [1, L] of the longest length that the model supports, at most LONGEST."""
    length = min(longest_sequence(model) or model.max_length or LONGEST, LONGEST)
    return np.random.default_rng(0).integers(model.vocab_size, size=(1, length))


def _length(inputs: dict[str, np.ndarray]) -> int:
    return min(rows.shape[1] for rows in inputs.values())


def difference(a, b) -> dict[str, float]:
    """The largest absolute difference of two arrays, and the same relative to the largest number of the first."""
    a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
    absolute = float(np.abs(a - b).max())
    return {"absolute": absolute, "relative": absolute / (float(np.abs(a).max()) or 1.0)}


@partial(jax.jit, static_argnums=0)
def _forward(model: ModelConfig, params: dict, tokens_BL):
    lm, hidden_BLD = forward(model, params, tokens_BL)
    return lm.logits(hidden_BLD)


def logits_of(side: Side, tokens_BL) -> np.ndarray:
    return np.asarray(_forward(side.model, side.params, jnp.asarray(tokens_BL, jnp.int32)), np.float64)


def _cached(side: Side, tokens_BL) -> np.ndarray:
    """Logits [B, CACHED, V] of the last tokens, decoded one by one after a pass over those before them."""
    number = min(CACHED, tokens_BL.shape[1] - 1)
    prompts = tokens_BL[:, :-number].tolist()
    padded_BP, segments_BP = decoding.pad_left(prompts)
    layers, keys_B = decoding.fast_layers(), decoding.row_keys(prompts, 0)
    length = padded_BP.shape[1] + number
    state = decoding.prefill(side.model, layers, length, side.params, padded_BP, segments_BP, keys_B)
    found = []
    for token_B in jnp.asarray(tokens_BL[:, -number:].T, jnp.int32):
        state = _advance(side.model, layers, side.params, state, token_B)
        found.append(state["logits"])
    return np.stack(found, 1)


@partial(jax.jit, static_argnums=(0, 1))
def _advance(model: ModelConfig, layers: str, params: dict, state: dict, token_B) -> dict:
    return decoding.advance(transformer.bind(model, params), layers, state, token_B, ())


def _gradient(side: Side, tokens_BL):
    """The gradient of the mean loss for factors [B, L, 1] of the embedding. A conversion may change the basis of the
    residual stream, and so the gradient for x; it does not change x times that gradient."""
    return _loss_gradient(side.model, side.params, jnp.asarray(tokens_BL, jnp.int32))


@partial(jax.jit, static_argnums=0)
def _loss_gradient(model: ModelConfig, params: dict, tokens_BL):
    def loss(scale_BL1):
        lm, hidden_BLD = forward(model, params, tokens_BL, Taps(replace={"embed": lambda x_BLD: x_BLD * scale_BL1}))
        log_p_BLV = jax.nn.log_softmax(lm.logits(hidden_BLD)[:, :-1])
        return -jnp.take_along_axis(log_p_BLV, tokens_BL[:, 1:, None], -1).mean()

    return jax.grad(loss)(jnp.ones((*tokens_BL.shape, 1), model.dtype))


def _bits(logits_BLV: np.ndarray, tokens_BL: np.ndarray, n_bytes: int) -> float:
    """Bits per byte of the text, without its first token."""
    logits_BLV = logits_BLV[:, :-1]
    top_BL = logits_BLV.max(-1)
    log_total_BL = top_BL + np.log(np.exp(logits_BLV - top_BL[..., None]).sum(-1))
    chosen_BL = np.take_along_axis(logits_BLV, tokens_BL[:, 1 : logits_BLV.shape[1] + 1, None], -1)[..., 0]
    return float((log_total_BL - chosen_BL).sum() / math.log(2) / n_bytes)


def _costs(before: ModelConfig, after: ModelConfig, length: int) -> dict[str, dict[str, float]]:
    both = {"before": costs(before, length), "after": costs(after, length)}
    names = ("parameters", "flops_per_token", "cache_bytes_per_token")
    return {name.replace("_", " "): {side: getattr(each, name) for side, each in both.items()} for name in names}


def first_difference(before: Side, after: Side, tokens_BL) -> str:
    """The first tap that both models have and at which they differ by more than BOUND; '' if there is none."""
    common = [
        name for name in tap_names(before.model) if name in set(tap_names(after.model)) and name.endswith("residual")
    ]
    values = [
        _taps(side.model, tuple(common), side.params, jnp.asarray(tokens_BL, jnp.int32)) for side in (before, after)
    ]
    for name in common:
        old, new = (each[name] for each in values)
        if old.shape == new.shape and difference(old, new)["relative"] > BOUND:
            return name
    return ""


@partial(jax.jit, static_argnums=(0, 1))
def _taps(model: ModelConfig, names: tuple[str, ...], params: dict, tokens_BL) -> dict:
    taps = Taps(record=names)
    forward(model, params, tokens_BL, taps)
    return taps.values
