"""The passes of causal tracing (trace.py): clean, corrupted, and restored, in compiled batches of cases."""

from collections.abc import Callable
from functools import partial
from itertools import groupby
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from xfresearch.analysis.passes import inside_blocks
from xfresearch.analysis.prompts import ROUND, Prompt, check_fit, read
from xfresearch.analysis.sequences import Sequences, passed
from xfresearch.models.model_config import ModelConfig
from xfresearch.models.stack import StackConfig
from xfresearch.models.sublayers import Sublayer
from xfresearch.models.taps import ENCODER, Patch, Request, Stacked, address
from xfresearch.runtime.progress import stage

TOGETHER = 64  # restored passes at a time
CASES = 128  # of one call of a compiled program
CHUNK = 16  # facts whose clean values are in memory


class Effects(NamedTuple):
    """Probabilities of the first token of one fact's object."""

    clean: float
    corrupted: float
    # {value: [N, L]}; NaN for layers without the value, and for tokens before the subject, which noise does not reach in a
    # causal stack. Those of an encoder are encoder/value; then the decoder has one token.
    restored: dict[str, np.ndarray]


class Facts(NamedTuple):
    """F prompts of at most L tokens, as arrays."""

    rows: Sequences  # F rows
    noise_FSLD: np.ndarray  # S draws for each; 0 at tokens that are not the subject's
    last_F: np.ndarray  # position of the last token that is read before the object
    answer_F: np.ndarray  # first token of the object


def reader(model: ModelConfig) -> StackConfig:
    """The stack that reads the prompt: the encoder, if there is one."""
    return model.encoder or model


def sites_of(model: ModelConfig) -> dict[str, dict[str, str]]:
    """{value: {stack: site}} of the values that a model has (trace.py); those of an encoder are encoder/value."""
    by_value: dict[str, dict[str, str]] = {}
    for stack in model.all_stacks:
        with_slots = len({each.name for each in stack.sublayers(has="slots") if each.prefix == stack.prefix})
        for _, of_layer in groupby(_own(stack), lambda each: each.layer):
            sublayers = list(of_layer)
            wanted = {"stream": f"{sublayers[-1].name}.residual"} | {each.name: f"{each.name}.out" for each in sublayers}
            for each in sublayers:
                if each.options.slots:
                    wanted[f"slots of {each.name}" if with_slots > 1 else "slots"] = f"{each.name}.coefficients"
            for value, site in wanted.items():
                by_value.setdefault(f"{stack.prefix.replace('.', '/')}{value}", {})[sublayers[0].stack] = site
    return by_value


def _own(stack) -> list[Sublayer]:
    """The sublayers of one stack: those of a model with an encoder are the decoder's."""
    return [each for each in stack.sublayers() if each.prefix == stack.prefix]


def numbers_of(model: ModelConfig) -> dict[str, list[int]]:
    """{stack of layers: their numbers}, of both stacks."""
    numbers: dict[str, list[int]] = {}
    for each in model.sublayers():
        of_stack = numbers.setdefault(each.stack, [])
        of_stack += [] if each.layer.number in of_stack else [each.layer.number]
    return numbers


def value_of(model: ModelConfig, sublayer: Sublayer) -> str:
    """The value of `sites_of` that stands for the memory of a sublayer: its slots, or what it writes."""
    of_its_slots = f"{sublayer.name}.coefficients"
    of_slots = [name for name, sites in sites_of(model).items() if sites.get(sublayer.stack) == of_its_slots]
    return of_slots[0] if of_slots else f"{sublayer.prefix.replace('.', '/')}{sublayer.name}"


def normal(seed: int, deviation: float, samples: int) -> Callable:
    """draw(number of a fact, length, width) -> [samples, length, width], independent for each fact."""

    def draw(number: int, length: int, width: int):
        return deviation * np.random.default_rng((seed, number)).standard_normal((samples, length, width))

    return draw


def effects(lm, prompts: list[Prompt], window: int, draw: Callable) -> list[Effects]:
    """The probabilities of each fact, with noise from `draw` (see `normal`) and windows of that many layers. Raises
    UserError for a prompt that is longer than the table of positions."""
    check_fit(lm.config, prompts)
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
    draws = [draw(n, length, reader(model).width) for n in filled]
    facts = _facts(lm, [prompts[number] for number in filled], draws, length)
    sites, numbers_in = sites_of(model), numbers_of(model)
    names = frozenset((stack, site) for of_stack in sites.values() for stack, site in of_stack.items())
    clean_F, corrupted_F, values = _clean_and_corrupted(model, names, lm.params, facts)
    restored = {}
    for value, of_stack in sites.items():
        layer_numbers = sorted(number for stack in of_stack for number in numbers_in[stack])
        positions = [_positions(model, value, prompt) for prompt in chosen]
        passes, cases_C4 = _cases(layer_numbers, positions, 1 if value.endswith("stream") else window)
        arguments = (model, tuple(sorted(of_stack.items())), lm.params, values, facts)
        p_C = np.concatenate([_restored(*arguments, part) for part in cases_C4.reshape(-1, CASES, 4)])
        depth = model.encoder.depth if model.encoder and value.startswith(f"{ENCODER}/") else model.depth
        restored[value] = np.full((len(chosen), depth, length), np.nan)
        restored[value][tuple(passes.T)] = p_C[: len(passes)]
    measured = []
    for n, prompt in enumerate(chosen):
        sizes = {value: len(prompt.tokens) if of_prompt(model, value) else 1 for value in restored}
        of_fact = {value: x_FNL[n, :, : sizes[value]] for value, x_FNL in restored.items()}
        measured.append(Effects(float(clean_F[n]), float(corrupted_F[n]), of_fact))
    return measured


def of_prompt(model: ModelConfig, value: str) -> bool:
    """Whether a value has the tokens of the prompt; in the decoder beside an encoder it has the start id alone."""
    return model.encoder is None or value.startswith(f"{ENCODER}/")


def _positions(model: ModelConfig, value: str, prompt: Prompt) -> range:
    """The tokens at which a value is restored: those that noise on the subject reaches."""
    if not of_prompt(model, value):
        return range(1)
    return range(prompt.first if reader(model).causal else 0, len(prompt.tokens))


def _facts(lm, prompts: list[Prompt], draws: list[np.ndarray], length: int) -> Facts:
    at_L = np.arange(length)
    subject_FL = np.stack([(at_L >= prompt.first) & (at_L <= prompt.last) for prompt in prompts])
    noise_FSLD = np.stack(draws) * subject_FL[:, None, :, None]
    rows, last_F = read(lm, prompts, length)
    return Facts(rows, noise_FSLD.astype(lm.config.dtype), last_F, np.array([prompt.target[0] for prompt in prompts]))


def _cases(numbers: list[int], positions: list[range], window: int) -> tuple[np.ndarray, np.ndarray]:
    """(fact, layer, position) of each restored pass, and its (fact, first layer, end, position), filled up to a
    multiple of CASES, for the positions of each fact in layers with these numbers."""
    passes = [
        (fact, layer, position) for fact, of_fact in enumerate(positions) for layer in numbers for position in of_fact
    ]
    cases = [(fact, layer - window // 2, layer - window // 2 + window, position) for fact, layer, position in passes]
    return np.array(passes), np.array(cases + cases[:1] * (-len(cases) % CASES), np.int32)


def _probability(model: ModelConfig, params: dict, rows: Sequences, taps: Request, last, answer):
    """[B]: that of `answer` after position `last`."""
    lm, out = passed(model, params, rows, taps)
    return jax.nn.softmax(lm.logits(out.hidden_BLD[:, last][:, None])[:, 0])[:, answer], out


def _corruption(model: ModelConfig, noise_SLD) -> dict:
    stack, _, site = address(model, f"{reader(model).prefix}embed")
    return {stack: {site: (Patch(jnp.add, (noise_SLD,)),)}}


def _copies(row: Sequences, count: int) -> Sequences:
    """A row of a vmapped tree, without its first dimension, `count` times."""
    return jax.tree.map(lambda leaf: jnp.broadcast_to(leaf, (count, *leaf.shape)), row)


@partial(jax.jit, static_argnums=(0, 1))
def _clean_and_corrupted(model: ModelConfig, names: frozenset, params: dict, facts: Facts):
    """P(clean) and P(corrupted) [F], and the clean values {stack: {site: [F, R, ...]}}."""

    def of_fact(fact: Facts):
        row, noise_SLD, last, answer = fact
        clean_B, out = _probability(model, params, _copies(row, 1), Request(names), last, answer)
        corrupted = Request(patches=_corruption(model, noise_SLD))
        corrupted_S, _ = _probability(model, params, _copies(row, len(noise_SLD)), corrupted, last, answer)
        return clean_B[0], corrupted_S.mean(), inside_blocks(out.captures)

    return jax.lax.map(of_fact, facts)


@partial(jax.jit, static_argnums=(0, 1))
def _restored(model: ModelConfig, sites: tuple[tuple[str, str], ...], params: dict, values: dict, facts: Facts, cases_C4):
    """P(restored) [C] of each case: the value of a window of layers, at one position, from the clean pass."""
    numbers = numbers_of(model)

    def case(each):
        fact, low, high, position = each
        row, noise_SLD, last, answer = jax.tree.map(lambda leaf: leaf[fact], facts)
        patches = _corruption(model, noise_SLD)
        for stack, site in sites:
            value_R = values[stack][site][fact]  # [R, 1, L, D], or [R, 1, H, L, M] of slots
            number_R = jnp.array(numbers[stack])
            at_L = (jnp.arange(value_R.shape[-2]) == position)[(None,) * (value_R.ndim - 3)]
            where_R = jnp.broadcast_to(at_L, (len(number_R), *at_L.shape))
            slots_R = jnp.where((number_R >= low) & (number_R < high), jnp.arange(len(number_R)), -1)
            patches[stack] = {site: (Stacked(Patch(arguments=(value_R,), where=where_R), slots_R),)}
        rows = _copies(row, len(noise_SLD))
        return _probability(model, params, rows, Request(patches=patches), last, answer)[0].mean()

    return jax.lax.map(case, cases_C4, batch_size=TOGETHER)
