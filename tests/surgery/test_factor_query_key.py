"""The merged matrix of a head as two factors."""

import pytest

from tests.surgery.comparing import assert_exact, assert_refused, changed, logits
from xfresearch import surgery
from xfresearch.surgery import CONVERSIONS
from xfresearch.surgery.certificate import BOUND, CONTROL, difference
from xfresearch.surgery.network import assemble, take_apart

MERGED = {"query": "merged", "bias": "('query',)"}


@pytest.mark.parametrize(
    "options",
    [
        {"bias": "()", "kv_heads": 2, "position": "t5", "softcap": 2.0},
        {"bias": "('query','key')", "kv_heads": 1, "position": "alibi", "sink": "off_by_one", "key_bias": 0},
        {"bias": "('query','key')", "memory_slots": 6, "kv_heads": 2, "memory_heads": "shared"},
    ],
    ids=lambda options: ",".join(options),
)
def test_merged_matrices_get_their_rank_back(options):
    zero_bias = "key_bias" in options
    lm = changed(**{key: value for key, value in options.items() if key != "key_bias"})
    if zero_bias:
        bias = lm.params["blocks"]["main"]["attention"]["key"]["bias"]
        lm.params["blocks"]["main"]["attention"]["key"]["bias"] = 0 * bias
    before = take_apart(lm.config, lm.params)
    merged = CONVERSIONS["merge_query_key"](before)
    networks = [CONVERSIONS["factor_query_key"](merged, broken=broken) for broken in (False, True)]
    old, new, control = map(logits, (before, *networks))
    a = networks[0].resolved.blocks["main"].attention
    assert (a.query, a.rank, a.key) == ("merged", 8, "learned")
    assert difference(old, new)["relative"] <= BOUND and difference(old, control)["relative"] >= CONTROL


def test_a_full_rank_needs_its_rank():
    lm = changed(**MERGED, value="key", memory_slots=4)
    assert assert_exact(lm, "factor_query_key", rank=32).blocks["main"].attention.value == "identity_whole"
    network = take_apart(lm.config, lm.params)
    with pytest.raises(
        surgery.Refused, match="^factor_query_key: layer 0: W_h with b_h has rank 32, the width: two factors"
    ):
        CONVERSIONS["factor_query_key"](network)


def test_matrices_of_zeros_have_factors_of_rank_1():
    lm = changed(query="merged", bias="()")
    query = lm.params["blocks"]["main"]["attention"]["query"]
    query["kernel"] = 0 * query["kernel"]
    factored = CONVERSIONS["factor_query_key"](take_apart(lm.config, lm.params))
    model, _ = assemble(factored, "float32")
    assert model.blocks["main"].attention.rank == 1


def test_a_smaller_rank_has_a_bound():
    """A merged matrix that was saved in float32 has full rank by rounding, and its old rank is nearly exact."""
    lm = changed(bias="()")
    before = take_apart(lm.config, lm.params)
    merged = take_apart(*assemble(CONVERSIONS["merge_query_key"](before), "float32"))
    with pytest.raises(surgery.Refused, match="has rank 32, the width"):
        CONVERSIONS["factor_query_key"](merged)
    for rank, low, high in ((8, 1e-12, 1e-5), (4, 1e-2, 1.0)):
        factored = CONVERSIONS["factor_query_key"](merged, rank=rank)
        assert low < difference(logits(before), logits(factored))["relative"] < high
        bounds = [value for name, value in factored.figures.items() if "|W_h - A_h B^T|" in name]
        assert len(bounds) == 2 and low < max(bounds)
        factored.figures.clear()
    assert CONVERSIONS["factor_query_key"].approximates({"rank": 8})
    assert not CONVERSIONS["factor_query_key"].approximates({})


@pytest.mark.parametrize(
    ("options", "rank", "term"),
    [
        ({}, 0, "query='learned' is no merged matrix W_h"),
        (MERGED | {"rank": 4, "bias": "()"}, 0, "W_h has factors of rank 4 already"),
        (MERGED | {"position": "relative_key"}, 0, "relative keys read x W_h itself"),
    ],
)
def test_a_refusal_names_the_term(options, rank, term):
    assert_refused(changed(**options), "factor_query_key", f"layer 0: .*{term}", rank=rank)
