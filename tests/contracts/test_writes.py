"""At initialisation, the outputs of every kind of feed-forward and attention are about as large as those of the base.

The models have some millions of parameters: a mean over many values only becomes small at such sizes.
"""

import math

import jax
import numpy as np
import pytest

from tests.contracts.variants import VARIANTS, change, marked, single
from tests.variants import CASES
from xfresearch.models import transformer
from xfresearch.models.context import Context
from xfresearch.models.model_config import resolve_model
from xfresearch.models.taps import captured, request

B, L, D, F, M = 4, 128, 256, 1024, 1024
SIZES = {"width": D, "depth": 1, "max_length": L, "vocab_size": 512}
OPTIONS = ("kind", "query", "key", "value", "output", "shaping", "rank", "memory_activation", "memory_slots")
GROUPS = (*(f"attention.{name}=" for name in OPTIONS), "feed_forward.kind", "feed_forward.moe.expert")
# Variants of norms and of sizes are left out: they do not change how large outputs are.
ALIKE = ("feed_forward.kind=", "feed_forward.moe.expert=", "attention.memory_activation=")  # activations: some are enough
IDENTITIES = tuple(f"attention.{name}=identity" for name in ("query", "key", "value"))  # that of the output is enough
SOME = ("=relu", "=geglu", "=swiglu", "=softmax", "=moe")
KINDS = ["base", *(name for name in VARIANTS if name.startswith(GROUPS) and "norm=" not in name)]

# {prefix of a variant's name: why it may differ by more than a factor of 3}. No variant differs by more than 20.
EXCEPTIONS = {prefix: why for case in CASES for prefix, why in case.writes.items()}


def output_std(name: str) -> dict[str, float]:
    """{sublayer: standard deviation of its output} in the first layer of a variant, at realistic sizes."""
    changes = single()[name] | SIZES
    config = VARIANTS["base"]
    for path, value in changes.items():
        value = {"blocks.main.attention.memory_slots": M, "blocks.main.attention.head_size": D // 4}.get(path, value)
        config = change(config, path, value)
    block = config.blocks["main"]
    if getattr(block.feed_forward, "hidden", 0) and "hidden" not in name:
        config = change(config, "blocks.main.feed_forward.hidden", F)
    if getattr(block.attention, "head_size", 0) == 8:
        config = change(config, "blocks.main.attention.head_size", 0)
    config = resolve_model(config)
    names = ["blocks.0.attention.out", "blocks.0.feed_forward.out"]
    tokens_BL = np.random.default_rng(0).integers(0, 512, (B, L))
    ctx = Context(np.broadcast_to(np.arange(L), (B, L)))
    lm = transformer.bind(config, transformer.init(config, jax.random.key(0)))
    values = captured(config, lm(tokens_BL, ctx, taps=request(config, names)).captures, names)
    return {tap.split(".")[-2]: float(value.std()) for tap, value in values.items()}


@pytest.fixture(scope="module")
def base():
    return output_std("base")


DEFAULT_RUN = [name for name in KINDS if not name.startswith((*ALIKE, *IDENTITIES)) or name.endswith(SOME)]


@pytest.mark.parametrize("name", marked(DEFAULT_RUN, KINDS))
def test_outputs_are_within_a_factor_of_three_of_the_base(name, base):
    allowed = 20 if name.startswith(tuple(EXCEPTIONS)) else 3
    for sublayer, std in output_std(name).items():
        ratio = std / base[sublayer]
        assert 1 / allowed < ratio < allowed, f"std of {sublayer}: {std:.3g}, in the base {base[sublayer]:.3g}"


@pytest.mark.parametrize("name, n", [("feed_forward.kind=softmax", F), ("attention.kind=slots", M)])
def test_a_mean_of_many_values_has_the_expected_std(name, n):
    sublayer = name.split(".")[0]
    assert output_std(name)[sublayer] == pytest.approx(math.sqrt(math.e / n / 2), rel=0.25)  # and 1/sqrt(2 * depth)


def test_every_exception_is_needed(base):
    """Every prefix in EXCEPTIONS has a variant that differs by more than a factor of 3."""
    for prefix in EXCEPTIONS:
        names = [name for name in KINDS if name.startswith(prefix)]
        ratios = [std / base[sublayer] for name in names for sublayer, std in output_std(name).items()]
        assert any(not 1 / 3 < ratio < 3 for ratio in ratios), prefix
