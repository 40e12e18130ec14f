"""Contract 7: a few steps on real text bring the loss below the entropy of its bytes (a unigram model)."""

import sysconfig
from pathlib import Path

import jax
import numpy as np
import optax
import pytest

from tests.contracts.passes import forward
from tests.contracts.variants import KINDS, NAMED, ONE_STACK, marked, model, needed
from xfresearch.models import transformer

STEPS, BATCH, LENGTH, VOCAB = 80, 16, 32, 128
BASE = {"vocab_size": VOCAB, "max_length": LENGTH, "position": "learned"}
ACTIVATIONS = ["relu2", "softmax", "solu"]
# The models that differ most at initialisation. test_gradients.py tests the gradients of all variants.
DEFAULT_RUN = ("post_norm", "skipless_parallel", "moe")


def learners() -> dict:
    """Each layout, some activations and each kind once, and the causal named configs (for the other one, see
    tests/test_majority.py)."""
    cases = [("blocks.main.layout", name) for name in ONE_STACK]
    cases += [("blocks.main.feed_forward.kind", name) for name in (*ACTIVATIONS, *KINDS["feed_forward"])]
    cases += [("blocks.main.attention.kind", name) for name in KINDS["attention"]]
    by_name = {name: {path: name} | needed(path, name) for path, name in cases}
    by_name = {name: model(BASE | changes) for name, changes in by_name.items()}
    causal = {name: named for name, named in NAMED.items() if named.causal}
    return by_name | {f"configs/{name}.py": model({"vocab_size": VOCAB}, named) for name, named in causal.items()}


LEARNERS = learners()


@pytest.fixture(scope="module")
def batches():
    """Python source from the standard library as bytes below 128: [STEPS, BATCH, LENGTH + 1], without repetition."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    names = ("argparse.py", "ast.py", "calendar.py", "datetime.py", "difflib.py", "doctest.py", "inspect.py")
    data = b"".join(path.read_bytes() for path in (folder / name for name in names) if path.exists())
    text = np.array([byte for byte in data if byte < VOCAB], np.int32)
    sequences = text[: len(text) // (LENGTH + 1) * (LENGTH + 1)].reshape(-1, LENGTH + 1)
    return np.random.default_rng(0).permutation(sequences)[: STEPS * BATCH].reshape(STEPS, BATCH, LENGTH + 1)


def entropy(tokens) -> float:
    p = np.bincount(tokens) / len(tokens)
    return -(p[p > 0] * np.log(p[p > 0])).sum()


def train(config, batches) -> np.ndarray:
    """The loss of each step before its update, in nats per byte."""
    optimizer = optax.adam(1e-2)

    def loss(params, batch):
        logits, losses = forward(config, params, batch[:, :-1], "scan")
        nll = optax.softmax_cross_entropy_with_integer_labels(logits, batch[:, 1:]).mean()
        return nll + sum(value.sum() for value in losses.values()) / batch[:, 1:].size, nll

    @jax.jit
    def run(params, batches):
        def step(state, batch):
            params, opt = state
            gradients, nll = jax.grad(loss, has_aux=True)(params, batch)
            updates, opt = optimizer.update(gradients, opt)
            return (optax.apply_updates(params, updates), opt), nll

        return jax.lax.scan(step, (params, optimizer.init(params)), batches)[1]

    return np.asarray(run(transformer.init(config, jax.random.key(0)), batches))


@pytest.mark.parametrize("name", marked(DEFAULT_RUN, LEARNERS))
def test_learns_more_than_byte_frequencies(name, batches):
    losses = train(LEARNERS[name], batches)
    assert losses[-10:].mean() < entropy(batches.ravel())
