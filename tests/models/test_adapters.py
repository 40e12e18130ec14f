"""Adapters against a NumPy reference in float64: every kind of matrix, on several layouts and on both stacks."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.tiny_runs import tiny_config
from tests.tolerances import TOLERANCE, relative_error
from xfresearch.models import transformer
from xfresearch.models.context import Context, Source
from xfresearch.models.transformer import Transformer
from xfresearch.runtime.errors import UserError
from xfresearch.runtime.trees import by_path, nested
from xfresearch.training.program import Program

WIDE_NUMBERS = {"model__dtype": "float64", "model__param_dtype": "float64"}
WIDE = {"model__blocks__main__attention__memory_activation": "relu"}
SKIPLESS = {"model__blocks__main__attention__value": "identity_plus"}
CASES = {
    "gpt2": {},
    "all_attention": {},  # slots in the softmax
    "all_attention wide": WIDE,
    "mixtral_8x7b": {},
    "t5": {},
    "simplified": SKIPLESS,
    "merged_query": {},
}


def config_of(case: str, kind: str = "lora", **overrides):
    """A tiny model in float64 with adapters of rank 3, or without."""
    lora = {"model__adapter__kind": "lora", "model__adapter__rank": 3, "model__adapter__alpha": 5.0}
    lora = lora if kind == "lora" else {}
    return tiny_config(case.split()[0], **lora | WIDE_NUMBERS | CASES[case] | overrides)


def random_params(model) -> dict:
    """Parameters of which every adapter changes the output."""
    flat = by_path(transformer.init(model, jax.random.key(0)))
    random = np.random.default_rng(1)
    return nested({path: jnp.asarray(leaf + 0.3 * random.normal(size=leaf.shape)) for path, leaf in flat.items()})


def product(path: str, scale: float, a, b, shape: tuple) -> np.ndarray:
    """s A B of each layer, as the equation has it, for the letters that a matrix at this path has."""
    a, b = np.asarray(a), np.asarray(b)
    if "/experts/" in path:  # NEIr, NErO
        return scale * a @ b
    if "memory/" in path and a.ndim == 4:  # NGMr, NGrK of NMGK
        return scale * (a @ b).swapaxes(1, 2)
    a, b = a.reshape(shape[0], -1, a.shape[-1]), b.reshape(shape[0], b.shape[1], -1)
    delta = scale * a @ b
    return delta.swapaxes(1, 2) if path.endswith("memory/key") else delta.reshape(shape)  # keys are M x D


def without_adapters(params: dict, scale: float) -> dict:
    flat = by_path(params)
    merged = {path: np.asarray(leaf) for path, leaf in flat.items() if "_adapter/" not in path}
    for path in [path for path in merged if f"{path}_adapter/a" in flat]:
        factors = (flat[f"{path}_adapter/{name}"] for name in "ab")
        merged[path] = merged[path] + product(path, scale, *factors, merged[path].shape)
    return nested({path: jnp.asarray(leaf) for path, leaf in merged.items()})


def logits_of(config, params: dict):
    random = np.random.default_rng(2)
    tokens = jnp.asarray(random.integers(257, size=(2, 12)))
    source = Source(jnp.asarray(random.integers(257, size=(2, 9)))) if config.model.encoder else None
    ctx = Context(jnp.broadcast_to(jnp.arange(12), (2, 12)), source=source)

    @jax.jit
    def logits(params):
        lm = transformer.bind(config.model, params)
        return lm.logits(lm(tokens, ctx).hidden_BLD)

    return logits(params)


@pytest.mark.parametrize("case", CASES)
def test_logits_and_gradients_are_those_of_w_plus_s_a_b(case):
    with jax.enable_x64(True):
        config, plain = config_of(case), config_of(case, "none")
        params = random_params(config.model)
        adapted = [path for path in by_path(params) if path.endswith("_adapter/a")]
        assert {path.removesuffix("_adapter/a") for path in adapted} == {
            path for path, axes in by_path(transformer.axes(plain.model)).items() if axes.matrix and "blocks/" in path
        }
        merged = without_adapters(params, 5.0 / 3)
        assert relative_error(logits_of(config, params), logits_of(plain, merged)) < TOLERANCE["float64"]

        def loss(params, config=config):
            return jnp.square(logits_of(config, params)).sum()

        ours, theirs = by_path(jax.grad(loss)(params)), by_path(jax.grad(loss)(merged, plain))
        for path in [path for path in theirs if f"{path}_adapter/a" in ours]:
            a, b = (by_path(params)[f"{path}_adapter/{name}"] for name in "ab")
            for name in "ab":  # the product is linear in each factor: <dW, s A B> = <dA, A> = <dB, B>
                gradient, factor = ours[f"{path}_adapter/{name}"], {"a": a, "b": b}[name]
                inner = np.sum(np.asarray(theirs[path]) * product(path, 5.0 / 3, a, b, theirs[path].shape))
                np.testing.assert_allclose(np.sum(gradient * factor), inner, rtol=1e-9, atol=1e-9)


def test_new_adapters_add_nothing_and_leave_the_other_parameters_as_they_are():
    config, plain = (tiny_config("gpt2", model__adapter__kind=kind) for kind in ("lora", "none"))
    new, old = (transformer.init(each.model, jax.random.key(3)) for each in (config, plain))
    for path, leaf in by_path(old).items():
        np.testing.assert_array_equal(by_path(new)[path], leaf)
    np.testing.assert_array_equal(logits_of(config, new), logits_of(plain, old))
    a = by_path(new)["blocks/main/feed_forward/down/kernel_adapter/a"]
    inputs = a.shape[1]
    assert 0.9 * inputs**-0.5 < abs(a).max() <= inputs**-0.5 and not np.array_equal(a[0], a[1])


def test_the_scale_of_rslora_falls_with_the_root_of_the_rank():
    lora, rslora = (config_of("gpt2", model__adapter__scaling=each).model.adapter.scale for each in ("lora", "rslora"))
    assert (lora, rslora) == (5.0 / 3, 5.0 / 3**0.5)


def test_targets_choose_matrices_and_one_that_matches_none_is_refused():
    target = "('encoder/*/query/*','blocks/main/cross_attention/v*')"
    config = tiny_config("t5", model__adapter__kind="lora", model__adapter__targets=target)
    paths = [path for path in by_path(transformer.abstract(config.model)) if path.endswith("_adapter/a")]
    names = "blocks/main/cross_attention/value", "encoder/blocks/main/attention/query"
    assert paths == [f"{name}/kernel_adapter/a" for name in names]
    with pytest.raises(UserError, match=r"config.model.adapter.targets=.*'\*/qeury/\*' matches none of blocks/main/"):
        Program(tiny_config("gpt2", model__adapter__kind="lora", model__adapter__targets="('*/qeury/*',)"))


@pytest.mark.parametrize("name", ["all_attention", "t5"])
def test_closed_form_parameters_are_the_counted_ones(name):
    model = tiny_config(name, model__adapter__kind="lora").model
    counted = sum(leaf.size for leaf in jax.tree.leaves(transformer.abstract(model)))
    assert Transformer.costs(model, 8).parameters == counted


def test_code_outside_of_models_reads_the_sum():
    with jax.enable_x64(True):
        config = config_of("gpt2")
        params = random_params(config.model)
        merged = without_adapters(params, 5.0 / 3)
        (bound,) = transformer.bind(config.model, params).sublayers("feed_forward", layer=1)
        np.testing.assert_allclose(bound.matrix("up"), merged["blocks"]["main"]["feed_forward"]["up"]["kernel"][1])
        assert [term.kernel for term in bound.terms] == ["down/kernel", "up/kernel"]
