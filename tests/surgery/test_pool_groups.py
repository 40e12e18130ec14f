"""Fewer key-value heads, as means."""

import jax.numpy as jnp
import pytest

from tests.surgery.comparing import apart, assert_refused, changed
from xfresearch import surgery
from xfresearch.surgery.certificate import BOUND
from xfresearch.surgery.network import take_apart


def test_the_mean_of_two_heads():
    lm = changed(bias="('key',)", memory_slots=3)
    before = take_apart(lm.config, lm.params)
    after = surgery.CONVERSIONS["pool_groups"](before, kv_heads=2)
    old, new = before.params(1), after.params(1)
    assert after.resolved.blocks["main"].attention.kv_heads == 2
    for path, axis in {"key/kernel": 1, "value/kernel": 1, "key/bias": 0, "memory/key": 1, "memory/value": 1}.items():
        array, mean = old[f"attention/{path}"], new[f"attention/{path}"]
        assert mean.take(1, axis) == pytest.approx((array.take(2, axis) + array.take(3, axis)) / 2)
    assert (new["attention/query/kernel"] == old["attention/query/kernel"]).all()


def test_equal_heads_are_pooled_exactly():
    lm = changed(bias="()")
    for name in ("key", "value"):
        linear = lm.params["blocks"]["main"]["attention"][name]
        linear["kernel"] = jnp.broadcast_to(linear["kernel"][:, :, :1], linear["kernel"].shape)
    model, exact, _ = apart(lm, "pool_groups")
    assert exact < BOUND and model.blocks["main"].attention.kv_heads == 1


def test_the_certificate_states_the_error():
    lm, certificate = surgery.pool_groups(changed(), kv_heads=2)
    assert certificate.approximate and not certificate.exact and certificate.relative > 1e-3
    assert certificate.costs["cache bytes per token"]["after"] == certificate.costs["cache bytes per token"]["before"] / 2


@pytest.mark.parametrize(
    ("options", "kv_heads", "term"),
    [
        ({}, 3, "kv_heads=3 is not a smaller divisor of its 4 key-value heads"),
        ({}, 4, "kv_heads=4 is not a smaller divisor"),
        ({"key": "identity", "bias": "()"}, 1, "key='identity' splits the input"),
        ({"key": "identity_whole", "value": "identity_whole", "bias": "()"}, 1, "all heads read the same keys and values"),
        ({"kind": "differential"}, 1, "attention of kind 'differential' has no key-value heads"),
    ],
)
def test_a_refusal_names_the_term(options, kv_heads, term):
    assert_refused(changed(**options), "pool_groups", f"layer 0: {term}", kv_heads=kv_heads)
