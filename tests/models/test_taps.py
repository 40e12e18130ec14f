"""Taps: values inside the model that can be recorded or replaced by name."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.contracts.variants import ALL, forward, model, random_params, tokens_for
from xfresearch.errors import UserError
from xfresearch.models.context import Context
from xfresearch.models.layouts import LAYOUTS
from xfresearch.models.taps import Taps

CONFIG = model()


def run(taps, config=CONFIG):
    return forward(config, random_params(config), tokens_for(config), taps=taps)[0]


def names_of(config) -> list[str]:
    taps = Taps()
    jax.eval_shape(lambda: run(taps, config))
    return taps.names


def test_names_are_in_the_order_of_the_computation():
    attention = ["in", "query", "key", "value", "weights", "heads", "out", "residual"]
    feed_forward = ["in", "hidden", "coefficients", "out", "residual"]
    layer = [f"attention.{name}" for name in attention] + [f"feed_forward.{name}" for name in feed_forward]
    assert names_of(CONFIG) == ["embed", *(f"blocks.{i}.{name}" for i in range(2) for name in layer), "final"]


@pytest.mark.parametrize("name", ALL)
def test_every_variant_names_each_value_once(name):
    config = ALL[name]
    names = names_of(config)
    assert len(names) == len(set(names))
    for layer in range(config.depth):
        block = config.blocks[config.pattern[layer % len(config.pattern)]]
        for sublayer in LAYOUTS[block.layout].sublayers:
            assert {f"blocks.{layer}.{sublayer.name}.{value}" for value in ("in", "out", "residual")} <= set(names)


def test_recording_returns_the_value_and_does_not_change_the_logits():
    taps = Taps(record=["final", "blocks.1.attention.query", "blocks.0.feed_forward.hidden"])
    np.testing.assert_array_equal(run(taps), run(None))
    assert taps.values["blocks.1.attention.query"].shape == (2, 8, 4, 8)
    assert taps.values["blocks.0.feed_forward.hidden"].shape == (2, 8, 32)
    expected = taps.values["final"] @ random_params(CONFIG)["embed"]["table"].T
    np.testing.assert_allclose(run(None), expected, rtol=1e-5, atol=1e-5)


def test_the_residual_is_the_sum_of_all_outputs_so_far():
    names = ["embed", *(f"blocks.0.{s}.{v}" for s in ("attention", "feed_forward") for v in ("out", "residual"))]
    taps = Taps(record=names)
    run(taps)
    embed, attention, after_attention, feed_forward, after = (taps.values[name] for name in names)
    np.testing.assert_allclose(after_attention, embed + attention, rtol=1e-6)
    np.testing.assert_allclose(after, embed + attention + feed_forward, rtol=1e-5, atol=1e-6)


def test_replacing_a_value_by_itself_changes_nothing_and_by_zero_changes_the_logits():
    for name in names_of(CONFIG):
        np.testing.assert_array_equal(run(Taps(replace={name: lambda x: x})), run(None))
        assert not np.allclose(run(Taps(replace={name: lambda x: 0 * x})), run(None)), name


def test_a_replaced_value_is_recorded_after_the_replacement():
    taps = Taps(record=["blocks.0.attention.out"], replace={"blocks.0.attention.out": lambda x: x + 1})
    run(taps)
    before = Taps(record=["blocks.0.attention.out"])
    run(before)
    np.testing.assert_allclose(taps.values["blocks.0.attention.out"], before.values["blocks.0.attention.out"] + 1)


def test_replacing_the_outputs_of_a_layer_by_zero_removes_the_layer():
    config = model({"depth": 1})
    zero = {f"blocks.0.{s}.out": jnp.zeros_like for s in ("attention", "feed_forward")}
    taps = Taps(record=["embed", "blocks.0.feed_forward.residual"], replace=zero)
    run(taps, config)
    np.testing.assert_array_equal(taps.values["embed"], taps.values["blocks.0.feed_forward.residual"])


def test_replacing_is_differentiable_and_works_under_jit():
    def loss(shift):
        return run(Taps(replace={"blocks.1.attention.heads": lambda x: x + shift})).sum()

    assert float(jnp.abs(jax.jit(jax.grad(loss))(0.0))) > 0


@pytest.mark.parametrize(
    "new, words", [(lambda x: x[:1], r"\(1, 8, 32\): it must be \(2, 8, 32\)"), (lambda x: None, "shape None")]
)
def test_a_replacement_of_another_shape_is_an_error(new, words):
    with pytest.raises(UserError, match=words):
        run(Taps(replace={"blocks.0.feed_forward.hidden": new}))


def test_a_context_without_taps_has_only_the_name_of_the_sublayer():
    ctx = Context(positions_BL=None).layer(1, "main").at("attention")
    x = jnp.ones(3)
    assert ctx.tap("query", x) is x and ctx.place == "attention"
