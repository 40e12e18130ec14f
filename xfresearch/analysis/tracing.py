"""The passes of causal tracing (trace.py): clean, corrupted, and restored, in compiled batches of cases."""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from xfresearch.analysis.prompts import ROUND, Prompt, padded
from xfresearch.models import layers
from xfresearch.models.inputs import forward
from xfresearch.models.model_config import ModelConfig, check_length
from xfresearch.models.sublayers import Sublayer
from xfresearch.models.taps import OUTSIDE, Patch, Request, Stacked
from xfresearch.runtime.progress import stage

TOGETHER = 64  # restored passes at a time
CASES = 128  # of one call of a compiled program
CHUNK = 16  # facts whose clean values are in memory


class Effects(NamedTuple):
    """Probabilities of the first token of one fact's object."""

    clean: float
    corrupted: float
    restored: dict[str, np.ndarray]  # {value: [N, L]}; NaN for tokens before the subject and layers without the value


class Facts(NamedTuple):
    """F prompts of at most L tokens, as arrays."""

    tokens_FL: np.ndarray
    noise_FSLD: np.ndarray  # S draws for each; 0 at tokens that are not the subject's
    last_F: np.ndarray  # position of the last token
    answer_F: np.ndarray  # first token of the object


def sites_of(model: ModelConfig) -> dict[str, dict[str, str]]:
    """{value: {stack: site}} of the values that a model has (trace.py)."""
    by_value: dict[str, dict[str, str]] = {}
    with_slots = len({each.name for each in model.sublayers(has="slots")})
    for layer in layers.layers(model):
        sublayers = model.sublayers(layer=layer.number)
        wanted = {"stream": f"{sublayers[-1].name}.residual"} | {each.name: f"{each.name}.out" for each in sublayers}
        for each in sublayers:
            if each.options.slots:
                wanted[f"slots of {each.name}" if with_slots > 1 else "slots"] = f"{each.name}.coefficients"
        for value, site in wanted.items():
            by_value.setdefault(value, {})[layer.stack] = site
    return by_value


def value_of(model: ModelConfig, sublayer: Sublayer) -> str:
    """The value of `sites_of` that stands for the memory of a sublayer: its slots, or what it writes."""
    stack, of_its_slots = sublayer.layer.stack, f"{sublayer.name}.coefficients"
    of_slots = [name for name, sites in sites_of(model).items() if sites.get(stack) == of_its_slots]
    return of_slots[0] if of_slots else sublayer.name


def normal(seed: int, deviation: float, samples: int) -> Callable:
    """draw(number of a fact, length, width) -> [samples, length, width], independent for each fact."""

    def draw(number: int, length: int, width: int):
        return deviation * np.random.default_rng((seed, number)).standard_normal((samples, length, width))

    return draw


def effects(lm, prompts: list[Prompt], window: int, draw: Callable) -> list[Effects]:
    """The probabilities of each fact, with noise from `draw` (see `normal`) and windows of that many layers. Raises
    UserError for a prompt that is longer than the table of positions."""
    check_length(lm.config, max(len(prompt.tokens) for prompt in prompts))
    by_number: dict[int, Effects] = {}
    by_length: dict[int, list[int]] = {}
    for number, prompt in enumerate(prompts):
        by_length.setdefault(-(-len(prompt.tokens) // ROUND) * ROUND, []).append(number)
    with stage("tracing", len(prompts), "facts") as progress:
        for length, numbers in by_length.items():
            for first in range(0, len(numbers), CHUNK):
                chunk = numbers[first : first + CHUNK]
                by_number |= dict(zip(chunk, _chunk(lm, prompts, chunk, length, window, draw), strict=True))
                progress.update(len(chunk))
    return [by_number[number] for number in range(len(prompts))]


def _chunk(lm, prompts: list[Prompt], numbers: list[int], length: int, window: int, draw: Callable) -> list[Effects]:
    """The effects of at most CHUNK facts of at most `length` tokens."""
    model, chosen = lm.config, [prompts[number] for number in numbers]
    filled = [*numbers, *numbers[:1] * (CHUNK - len(numbers))]  # chunks of one size share a program
    facts = _facts(model, [prompts[number] for number in filled], [draw(n, length, model.width) for n in filled], length)
    sites = sites_of(model)
    names = frozenset((stack, site) for of_stack in sites.values() for stack, site in of_stack.items())
    clean_F, corrupted_F, values = _clean_and_corrupted(model, names, lm.params, facts)
    restored = {}
    for value, of_stack in sites.items():
        passes, cases_C4 = _cases(model, chosen, of_stack, 1 if value == "stream" else window)
        arguments = (model, tuple(sorted(of_stack.items())), lm.params, values, facts)
        p_C = np.concatenate([_restored(*arguments, part) for part in cases_C4.reshape(-1, CASES, 4)])
        restored[value] = np.full((len(chosen), model.depth, length), np.nan)
        restored[value][tuple(passes.T)] = p_C[: len(passes)]
    measured = []
    for n, prompt in enumerate(chosen):
        of_fact = {value: x_FNL[n, :, : len(prompt.tokens)] for value, x_FNL in restored.items()}
        measured.append(Effects(float(clean_F[n]), float(corrupted_F[n]), of_fact))
    return measured


def _facts(model: ModelConfig, prompts: list[Prompt], draws: list[np.ndarray], length: int) -> Facts:
    at_L = np.arange(length)
    subject_FL = np.stack([(at_L >= prompt.first) & (at_L <= prompt.last) for prompt in prompts])
    noise_FSLD = np.stack(draws) * subject_FL[:, None, :, None]
    tokens_FL = padded([prompt.tokens for prompt in prompts], length)
    last_F, answer_F = (np.array(each) for each in zip(*((len(p.tokens) - 1, p.target[0]) for p in prompts), strict=True))
    return Facts(tokens_FL, noise_FSLD.astype(model.dtype), last_F, answer_F)


def _cases(model: ModelConfig, prompts: list[Prompt], of_stack: dict, window: int) -> tuple[np.ndarray, np.ndarray]:
    """(fact, layer, position) of each restored pass, and its (fact, first layer, end, position), filled up to a
    multiple of CASES. Noise does not reach the tokens before the subject."""
    numbers = [layer.number for layer in layers.layers(model) if layer.stack in of_stack]
    passes = [
        (fact, layer, position)
        for fact, prompt in enumerate(prompts)
        for layer in numbers
        for position in range(prompt.first, len(prompt.tokens))
    ]
    cases = [(fact, layer - window // 2, layer - window // 2 + window, position) for fact, layer, position in passes]
    return np.array(passes), np.array(cases + cases[:1] * (-len(cases) % CASES), np.int32)


def _probability(model: ModelConfig, params: dict, tokens_BL, taps: Request, last, answer):
    """[B]: that of `answer` after position `last`."""
    lm, out = forward(model, params, tokens_BL, taps)
    return jax.nn.softmax(lm.logits(out.hidden_BLD[:, last][:, None])[:, 0])[:, answer], out


def _corruption(noise_SLD) -> dict:
    return {OUTSIDE: {"embed": (Patch(jnp.add, (noise_SLD,)),)}}


@partial(jax.jit, static_argnums=(0, 1))
def _clean_and_corrupted(model: ModelConfig, names: frozenset, params: dict, facts: Facts):
    """P(clean) and P(corrupted) [F], and the clean values {stack: {site: [F, R, ...]}}."""

    def of_fact(fact: Facts):
        tokens_L, noise_SLD, last, answer = fact
        clean_B, out = _probability(model, params, tokens_L[None], Request(names), last, answer)
        tokens_SL = jnp.broadcast_to(tokens_L, (len(noise_SLD), len(tokens_L)))
        corrupted_S, _ = _probability(model, params, tokens_SL, Request(patches=_corruption(noise_SLD)), last, answer)
        return clean_B[0], corrupted_S.mean(), {stack: values for stack, values in out.captures.items() if stack}

    return jax.lax.map(of_fact, facts)


@partial(jax.jit, static_argnums=(0, 1))
def _restored(model: ModelConfig, sites: tuple[tuple[str, str], ...], params: dict, values: dict, facts: Facts, cases_C4):
    """P(restored) [C] of each case: the value of a window of layers, at one position, from the clean pass."""
    numbers: dict[str, list[int]] = {}
    for layer in layers.layers(model):
        numbers.setdefault(layer.stack, []).append(layer.number)

    def case(each):
        fact, low, high, position = each
        tokens_L, noise_SLD, last, answer = jax.tree.map(lambda leaf: leaf[fact], facts)
        patches = _corruption(noise_SLD)
        for stack, site in sites:
            value_R = values[stack][site][fact]  # [R, 1, L, D], or [R, 1, H, L, M] of slots
            number_R = jnp.array(numbers[stack])
            at_L = (jnp.arange(len(tokens_L)) == position)[(None,) * (value_R.ndim - 3)]
            where_R = jnp.broadcast_to(at_L, (len(number_R), *at_L.shape))
            slots_R = jnp.where((number_R >= low) & (number_R < high), jnp.arange(len(number_R)), -1)
            patches[stack] = {site: (Stacked(Patch(arguments=(value_R,), where=where_R), slots_R),)}
        tokens_SL = jnp.broadcast_to(tokens_L, (len(noise_SLD), len(tokens_L)))
        return _probability(model, params, tokens_SL, Request(patches=patches), last, answer)[0].mean()

    return jax.lax.map(case, cases_C4, batch_size=TOGETHER)
