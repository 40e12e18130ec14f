"""Mistakes in a call of an analysis are one line, by the declarations that make the flags of the command line."""

import inspect

import jax.numpy as jnp
import numpy as np
import pytest

from tests.tiny_runs import tiny_model
from xfresearch import UserError, analysis, analyze
from xfresearch.analysis.registry import ANALYSES
from xfresearch.data.records import Record
from xfresearch.runtime.arguments import ARGUMENTS, flag

TOKENS_NL = np.array([[1, 2, 3, 4]])
FACTS = [Record("Ada", "{} plays", "a")]
WHOLE = "it must be an integer of at least"


@pytest.fixture(scope="module")
def lm():
    return tiny_model("gpt2")


@pytest.mark.parametrize(
    "name, arguments, text",
    [
        ("memories", {"top": 0}, f"top=0 is not allowed: {WHOLE} 1"),
        ("memories", {"count": 2.5}, f"count=2.5 is not allowed: {WHOLE} 1"),
        ("attention", {"seed": -1}, f"seed=-1 is not allowed: {WHOLE} 0"),
        ("tuned_lens", {"steps": 0}, f"steps=0 is not allowed: {WHOLE} 1"),
        ("features", {"steps": True}, f"steps=True is not allowed: {WHOLE} 1"),
        ("trace", {"samples": 0}, f"samples=0 is not allowed: {WHOLE} 1"),
        ("trace", {"count": 0}, f"count=0 is not allowed: {WHOLE} 1"),
        ("trace", {"window": -1}, f"window=-1 is not allowed: {WHOLE} 1"),
        ("trace", {"noise": float("nan")}, "noise=nan is not allowed: it must be a finite number above 0"),
        ("trace", {"noise": 0}, "noise=0 is not allowed: it must be a finite number above 0"),
    ],
)
def test_a_number_that_is_not_allowed(lm, name, arguments, text):
    with pytest.raises(UserError) as caught:
        getattr(analysis, name)(lm, FACTS if name == "trace" else TOKENS_NL, **arguments)
    assert str(caught.value) == text
    ((argument, value),) = arguments.items()
    if value is not True:
        with pytest.raises(UserError, match=text.split(" is not allowed: ")[1]):
            analyze.parse([name, "--workdir", "x", flag(argument), str(value)])


def test_every_number_of_an_analysis_is_declared():
    for name, each in ANALYSES.items():
        for argument in inspect.signature(each.run).parameters.values():
            if argument.annotation in (int, float):
                declared = ARGUMENTS[argument.name]
                assert declared.number is argument.annotation and declared.allows(argument.default), (name, argument)


def test_parameters_that_are_not_finite(lm):
    kernel = lm.params["blocks"]["main"]["attention"]["query"]["kernel"]
    attention = lm.params["blocks"]["main"]["attention"] | {"query": {"kernel": kernel.at[0, 0].set(jnp.nan)}}
    params = lm.params | {"blocks": {"main": lm.params["blocks"]["main"] | {"attention": attention}}}
    with pytest.raises(UserError, match="^the model has parameters that .*: blocks/main/attention/query/kernel$"):
        analysis.attention(lm.with_params(params), TOKENS_NL)
