"""The time of an update by operation, and the floors of operations."""

import pytest

from xfresearch.benchmarks.device_rates import Rates
from xfresearch.benchmarks.operations import device_times, floors_by_operation, kinds_of_instructions, own_times


def test_an_operation_has_the_time_that_it_does_not_spend_in_others():
    events = [("while.2", 0, 100), ("ThunkExecutor::Execute", 5, 90), ("dot.1", 10, 30), ("add_fusion.7", 40, 20)]
    events += [("ynn_fusion", 70, 20), ("Await", 110, 40), ("add_fusion", 160, 5)]
    expected = {"while": 10, "starting operations": 90 - 70, "matrix products": 50, "add_fusion": 25}
    assert own_times(reversed(events), dict.fromkeys(("dot.1", "ynn_fusion"), "matrix products")) == expected


def test_a_fused_operation_is_what_it_computes_and_not_what_it_is_called():
    import jax
    import jax.numpy as jnp

    def function(x, y):
        return jax.nn.softmax(jnp.tanh(x @ y), -1) @ y

    text = jax.jit(function).lower(jnp.ones((64, 64)), jnp.ones((64, 64))).compile().as_text()
    kinds = kinds_of_instructions(text)
    assert sorted(set(kinds.values())) == ["matrix products", "reductions"]
    made_up = """%fused.1 (p: f32[2]) -> f32[] {
  ROOT %r = f32[] reduce(%p), to_apply=%add
}
ENTRY %main (x: f32[2]) -> f32[] {
  %ynn_fusion.2 = f32[] fusion(%x), kind=kCustom, calls=%fused.1
  ROOT %dot.3 = f32[] dot(%x, %x), lhs_contracting_dims={0}
}
"""
    assert kinds_of_instructions(made_up) == {"r": "reductions", "ynn_fusion.2": "reductions", "dot.3": "matrix products"}


def test_a_kernel_counts_for_its_instruction():
    events = [("nvjet_tst_128", "dot.3", 50), ("fusion_7", "fusion.7", 20), ("fusion_9", "fusion.9", 1), ("memcpy", "", 5)]
    assert device_times(events, {"dot.3": "matrix products"}) == {"matrix products": 50, "fusion": 21, "memcpy": 5}


def test_the_floor_is_the_longer_time_of_products_and_bytes():
    """A product [64, 32] x [32, 16] has 2 x 64 x 32 x 16 FLOPs, and moves its three arrays of float32."""
    import jax
    import jax.numpy as jnp

    text = jax.jit(jnp.dot).lower(jnp.ones((64, 32)), jnp.ones((32, 16))).compile().as_text()
    flops, moved = 2 * 64 * 32 * 16, 4 * (64 * 32 + 32 * 16 + 64 * 16)
    for rates, seconds in ((Rates(1.0, "", 1e9, ""), flops), (Rates(1e9, "", 1.0, ""), moved)):
        result, known = floors_by_operation(text, rates)
        assert known and result["matrix products"] == pytest.approx(seconds)


def test_a_program_that_is_not_understood_has_no_floors():
    assert floors_by_operation("no program", Rates(1.0, "", 1.0, "")) == ({}, False)
