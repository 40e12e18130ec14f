"""Contract 9: under dtype = 'bfloat16' the gradient of every parameter is near that in float32, at its first values.

bfloat16 has 8 bits: a sum of many numbers kept in it stops growing once a number is less than 1/256 of the sum. Where many
tokens add to one row of a table, to a bias or to a gain, their sum has to be float32. So half of the tokens here are one
token, and half of the rows are documents of four tokens.

Some gradients move further than 2 % without any such sum: rounding changes choices of experts, and large terms that cancel
leave their rounding behind. How far, rounding itself says: the same model in float32, its parameters, its activations and
their gradients rounded to bfloat16 at every tap and after every linear map and norm.
"""

from contextlib import contextmanager
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from tests.contracts import losses
from tests.contracts.test_gradients import named
from tests.contracts.variants import ALL, forward, marked, plain
from tests.tolerances import TOLERANCE
from xfresearch.models import transformer
from xfresearch.models.linear import Linear
from xfresearch.models.norms import Norm

B, L, SHORT = 32, 64, 4
EXPERTS = 8  # of all models here; heads have 8 outputs too, and are rounded at their taps
ROUNDING = 2.5  # times what roundings alone make: between the places where they are made here there are others
# Biases, gains of branches, the scale and both tables of embeddings, gains after the cast: sums over tokens.
EVERY_DAY = [
    *("attention.bias=('query', 'key', 'value', 'output')", "feed_forward.bias=True", "layout=skipless"),
    *("embedding_scale=learned", "position=learned", "configs/llama.py"),
]


@pytest.fixture(autouse=True)
def loops(monkeypatch):
    losses.compile_loops_once(monkeypatch)


def skewed_batch(vocab_size: int) -> dict:
    random = np.random.default_rng(7)
    zipf_V = 1 / np.arange(1, vocab_size + 1)
    p_V = 0.5 * zipf_V / zipf_V.sum() + 0.5 * (np.arange(vocab_size) == 0)
    tokens_BL = random.choice(vocab_size, (B, L + 1), p=p_V).astype(np.int32)
    size_B1 = np.where(np.arange(B) % 2, SHORT, L)[:, None]
    return losses.batch_of(tokens_BL, np.arange(L) // size_B1 + 1, np.arange(L) % size_B1)


def rounded(x):
    """x, and its gradient on the way back, to the nearest number that bfloat16 has."""
    return x.astype(jnp.bfloat16).astype(x.dtype)


@contextmanager
def rounded_outputs():
    """Linear maps and norms whose outputs are rounded, but for routers, which compute in float32."""
    linear, norm = Linear.__call__, Norm.__call__

    def rounded_linear(self, x, ctx=None):
        y = linear(self, x, ctx)
        return y if y.shape[-1] == EXPERTS else rounded(y)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Linear, "__call__", rounded_linear)
        patch.setattr(Norm, "__call__", lambda self, x: rounded(norm(self, x)))
        yield


def rounded_loss(config, batch):
    """The loss in float32 of rounded parameters and of activations that are rounded at every tap."""

    def loss(params):
        context = {"positions_BL": batch["positions"], "segments_BL": batch["segments"]}
        taps = lambda name, value: rounded(value) if value.dtype == jnp.float32 else value  # noqa: E731
        logits, extra = forward(config, jax.tree.map(rounded, params), batch["tokens"], taps=taps, **context)
        nll_BL = optax.softmax_cross_entropy_with_integer_labels(logits, batch["targets"])
        return nll_BL.mean() + sum(value.sum() for value in extra.values()) / nll_BL.size

    return loss


def norms(tree) -> dict[str, float]:
    return {name: float(jnp.linalg.norm(leaf)) for name, leaf in named(tree).items()}


def errors(found, expected) -> dict[str, float]:
    """Norm of the difference over that of each expected gradient. One below 1e-6 of the whole is zero but for rounding (a
    key's bias moves all logits alike): its error is that over a twentieth of the whole."""
    sizes, differences = norms(expected), norms(jax.tree.map(jnp.subtract, found, expected))
    whole = sum(size**2 for size in sizes.values()) ** 0.5
    return {name: differences[name] / (size if size > 1e-6 * whole else whole / 20) for name, size in sizes.items()}


@pytest.mark.parametrize("name", marked(EVERY_DAY))
def test_gradients_in_bfloat16_are_near_those_in_float32(name):
    config = plain(ALL[name])
    params, batch = transformer.init(config, jax.random.key(0)), skewed_batch(config.vocab_size)

    def gradients(config):
        return jax.grad(losses.loss_of(config, batch, packing="documents"))(params)

    expected = gradients(config)
    found = errors(gradients(replace(config, dtype="bfloat16")), expected)
    with rounded_outputs():
        rounding = errors(jax.grad(rounded_loss(config, batch))(params), expected)
    assert max(found.values()) > 1e-4  # it is bfloat16 indeed
    allowed = {name: max(TOLERANCE["bfloat16"], ROUNDING * rounding[name]) for name in found}
    wrong = {name: f"{found[name]:.3f}, allowed {allowed[name]:.3f}" for name in found if found[name] > allowed[name]}
    assert not wrong, wrong
