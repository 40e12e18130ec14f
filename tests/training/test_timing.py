"""How long updates take: two configs in turns, and the operations of one."""

import pytest

from xfresearch.training import timing
from xfresearch.training.operations import kinds_of_instructions, own_times


@pytest.mark.parametrize(
    "seconds, turns, ratio",
    [
        ({"base": [1, 1, 2], "arm": [3, 2, 2]}, 3, 2.0),
        ({"base": [1, 1, 2, 2], "arm": [4, 3, 2, 2]}, 4, 2.0),  # after three turns, only one of them was fast
        ({"base": [1, *[2] * 8], "arm": [2] * 9}, 9, 2.0),
    ],
)
def test_there_are_turns_until_two_of_each_are_fast(monkeypatch, seconds, turns, ratio):
    left = {name: iter(each) for name, each in seconds.items()}
    called = []
    monkeypatch.setattr(timing, "seconds_per_update", lambda name: called.append(name) or next(left[name]))
    assert timing.relative_seconds("arm", "base") == ratio
    assert called == ["base", "arm"] * turns


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
