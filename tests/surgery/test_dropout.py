"""Dropout is no reason to refuse a conversion: where it would drop other values in training, the new config has none."""

import pytest

from tests.surgery.comparing import changed
from tests.surgery.test_drop import NO_BIAS, normless
from tests.tiny_runs import tiny_model
from xfresearch import surgery
from xfresearch.surgery.certificate import _dropout
from xfresearch.surgery.network import take_apart

BLOCK = "model__blocks__main__"
EVERYWHERE = {"model__dropout": 0.1, BLOCK + "dropout": 0.1, BLOCK + "attention__dropout": 0.1}
OUTPUTS, EMBEDDING, WEIGHTS = "the outputs of sublayers", "the embedding", "weights of attention"


def rates(lm, name: str, **options) -> tuple[dict[str, float], str]:
    """The dropout of the converted config, and what the certificate would say."""
    before = take_apart(lm.config, lm.params)
    after = surgery.CONVERSIONS[name](before, **options)
    block = after.resolved.blocks["main"]
    collected = {EMBEDDING: after.resolved.dropout, OUTPUTS: block.dropout, WEIGHTS: block.attention.dropout}
    return collected, _dropout(before.resolved, after.undropped)


@pytest.mark.parametrize(
    ("name", "options", "zero"),
    [
        ("absorb_value_output", {}, [WEIGHTS]),
        ("absorb_value_output", {"attention__bias": "()"}, []),
        ("merge_query_key", {}, []),
        ("centre", {}, [EMBEDDING, OUTPUTS]),
        ("fuse_output", {"layout": "no_residual_between"}, [OUTPUTS]),
        ("feed_forward_to_memory", {"layout": "parallel"}, [OUTPUTS]),
        ("widen", {}, []),
    ],
)
def test_no_dropout_where_a_term_would_be_another(name, options, zero):
    lm = tiny_model(**EVERYWHERE, **{BLOCK + key: value for key, value in options.items()})
    result, said = rates(lm, name, **({"hidden": 160} if name == "widen" else {}))
    assert {each for each, rate in result.items() if not rate} == {*zero}
    assert said.startswith("compared in evaluation, without it") and all(each in said for each in zero)
    assert ("set to 0" in said) == bool(zero)


def test_no_dropout_in_another_basis_term():
    lm = normless(model={"model__dropout": 0.1}, **NO_BIAS, dropout=0.1)
    result, said = rates(lm, "drop_query")
    assert not result[EMBEDDING] and "the embedding, the outputs of sublayers, where training would" in said
    assert rates(changed(), "absorb_value_output")[1] == ""  # a model without dropout


def test_the_certificate_of_a_model_with_dropout_says_so():
    _, certificate = surgery.absorb_value_output(tiny_model(**EVERYWHERE))
    assert certificate.exact and "set to 0 for weights of attention" in str(certificate)
