"""Contract 9: with dtype = 'bfloat16', gradients of all parameters at initialisation are close to float32 gradients.

bfloat16 has 8 bits of precision: a long sum in it stops growing once each number is less than 1/256 of the sum. Where
many tokens contribute to one row of a table, to a bias or to a gain, the sum has to be float32. The batch here makes
such sums long: half of its tokens are the same token, and half of its rows are documents of four tokens.

Some gradients differ by more than 2 % without such a sum: rounding changes the choices of experts, and large terms that
cancel leave their rounding errors. The tolerance for these comes from rounding alone: the float32 model with its
parameters, activations and activation gradients rounded to bfloat16 at every tap and after every linear map and norm.
"""

from contextlib import contextmanager
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from tests.contracts import losses
from tests.contracts.passes import forward
from tests.contracts.two_stacks import MODELS
from tests.contracts.variants import ALL, marked
from tests.tolerances import TOLERANCE
from xfresearch.models import transformer
from xfresearch.models.context import source_in
from xfresearch.models.inputs import tap_shapes
from xfresearch.models.linear import Linear
from xfresearch.models.norms import Norm
from xfresearch.runtime.trees import by_path

B, L, SHORT = 32, 64, 4
EXPERTS = 8  # in every model here; heads have 8 outputs too, and are rounded at their taps
ROUNDING = 2.5  # allowed error over that of the rounded float32 model: bfloat16 also rounds at other places
# Sums over tokens: biases, the embedding scale, both tables of embeddings, gains after the cast.
DEFAULT_RUN = [
    *("attention.bias=('query', 'key', 'value', 'output')", "feed_forward.bias=True"),
    *("embedding_scale=learned", "position=learned", "configs/llama.py"),
]


@pytest.fixture(autouse=True)
def loops(monkeypatch):
    losses.compile_loops_once(monkeypatch)


def skewed_batch(vocab_size: int, seed: int, source: bool = False) -> dict:
    random = np.random.default_rng(seed)
    zipf_V = 1 / np.arange(1, vocab_size + 1)
    p_V = 0.5 * zipf_V / zipf_V.sum() + 0.5 * (np.arange(vocab_size) == 0)
    tokens_BL = random.choice(vocab_size, (B, L + 1), p=p_V).astype(np.int32)
    size_B1 = np.where(np.arange(B) % 2, SHORT, L)[:, None]
    segments_BL, positions_BL = np.arange(L) // size_B1 + 1, np.arange(L) % size_B1
    batch = losses.batch_of(tokens_BL, segments_BL, positions_BL)
    if not source:
        return batch
    source_BS = random.choice(vocab_size, (B, L), p=p_V).astype(np.int32)  # each document has a source as long as it
    return batch | {"source": source_BS, "source_segments": segments_BL, "source_positions": positions_BL}


def rounded(x):
    """x rounded to bfloat16; in the backward pass, its gradient too."""
    return x.astype(jnp.bfloat16).astype(x.dtype)


@contextmanager
def rounded_outputs():
    """Rounds the outputs of linear maps and norms, except those of routers, which compute in float32."""
    linear, norm = Linear.__call__, Norm.__call__

    def rounded_linear(self, x, ctx=None):
        y = linear(self, x, ctx)
        return y if y.shape[-1] == EXPERTS else rounded(y)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Linear, "__call__", rounded_linear)
        patch.setattr(Norm, "__call__", lambda self, x: rounded(norm(self, x)))
        yield


def activations(config) -> list[str]:
    """The taps of values that a model in bfloat16 rounds: not the router's, nor those that a lambda layer computes only
    for taps."""
    values = {name: value for name, value in tap_shapes(config).items() if value.dtype == jnp.float32}
    layers_with_state = {name.removesuffix(".state") for name in values if name.endswith(".state")}
    unused = {f"{layer}.{name}" for layer in layers_with_state for name in ("state", "weights")}
    return [name for name in values if name not in unused and not name.endswith(".router_probabilities")]


def rounded_loss(config, batch):
    """The loss in float32, with rounded parameters and with activations rounded at every tap."""

    def loss(params):
        context = {"positions_BL": batch["positions"], "segments_BL": batch["segments"], "source": source_in(batch)}
        everywhere = dict.fromkeys(activations(config), rounded)
        logits, extra = forward(config, jax.tree.map(rounded, params), batch["tokens"], replace=everywhere, **context)
        nll_BL = optax.softmax_cross_entropy_with_integer_labels(logits, batch["targets"])
        return nll_BL.mean() + sum(value.sum() for value in extra.values()) / nll_BL.size

    return loss


def norms(tree) -> dict[str, float]:
    return {name: float(jnp.linalg.norm(leaf)) for name, leaf in by_path(tree).items()}


def errors(actual, expected) -> dict[str, float]:
    """For each gradient, the norm of the difference divided by the norm of the expected gradient. A gradient below 1e-6
    of the whole tree's norm is zero except for rounding (a key bias shifts all logits equally); its error is relative
    to a twentieth of that norm."""
    sizes, differences = norms(expected), norms(jax.tree.map(jnp.subtract, actual, expected))
    whole = sum(size**2 for size in sizes.values()) ** 0.5
    return {name: differences[name] / (size if size > 1e-6 * whole else whole / 20) for name, size in sizes.items()}


def too_large(config, seeds) -> dict[str, str]:
    """The errors that exceed what is allowed, over the gradients of all seeds together: of initial values and batches."""
    batches = [skewed_batch(config.vocab_size, seed, source=config.encoder is not None) for seed in seeds]
    samples = [(transformer.init(config, jax.random.key(seed)), batch) for seed, batch in zip(seeds, batches, strict=True)]

    def gradients(loss) -> dict:
        result = [jax.grad(loss(batch))(params) for params, batch in samples]
        return jax.tree.map(lambda *leaves: jnp.stack(leaves), *result)

    def loss_of(config):
        return lambda batch: losses.loss_of(config, batch, packing="documents")

    expected = gradients(loss_of(config))
    result = errors(gradients(loss_of(replace(config, dtype="bfloat16"))), expected)
    with rounded_outputs():
        rounding = errors(gradients(lambda batch: rounded_loss(config, batch)), expected)
    assert max(result.values()) > 1e-4  # proves that bfloat16 was used
    allowed = {name: max(TOLERANCE["bfloat16"], ROUNDING * rounding[name]) for name in result}
    return {name: f"{result[name]:.3f}, allowed {allowed[name]:.3f}" for name in result if result[name] > allowed[name]}


@pytest.mark.parametrize("name", marked(DEFAULT_RUN))
def test_gradients_in_bfloat16_are_near_those_in_float32(name):
    """The gradient of a single number, such as dyt's alpha, may happen to be near zero at one seed: four decide."""
    if too_large(ALL[name], [0]):
        wrong = too_large(ALL[name], range(4))
        assert not wrong, wrong


@pytest.mark.long
@pytest.mark.parametrize("name", ["pre-norm", "merged", "post-norm"])
def test_gradients_of_two_stacks_in_bfloat16_are_near_those_in_float32(name):
    if too_large(MODELS[name], [0]):
        wrong = too_large(MODELS[name], range(4))
        assert not wrong, wrong
