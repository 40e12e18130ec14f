"""W_Q W_K^T as one matrix per head."""

import pytest

from tests.surgery.comparing import assert_exact, assert_refused, changed
from xfresearch import surgery


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"bias": "('query','key')"},
        {"bias": "('query','key')", "value": "key", "kv_heads": 2},
        {"kv_heads": 1, "position": "alibi", "scale": 0.3},
        {"memory_slots": 6, "bias": "('query','key')", "kv_heads": 2},
        {"memory_slots": 6, "bias": "('query','key')", "kv_heads": 2, "memory_heads": "shared"},
        {"softcap": 2.0, "sink": "learned", "position": "t5"},
    ],
    ids=lambda options: ",".join(options) or "base",
)
def test_the_merged_matrix_computes_the_same(options):
    model = assert_exact(changed(**{"bias": "()"} | options), "merge_query_key")
    assert model.blocks["main"].attention.query == "merged"


@pytest.mark.parametrize(
    ("options", "term"),
    [
        ({"position": "rope"}, "x W_Q R.l - s. W_K"),
        ({"position": "relative_key"}, "relative keys read the query without W_K"),
        ({"qk_norm": "rms"}, "the norm of queries and keys divides x W_Q"),
        ({"qk_norm": "rms", "clip": 1.0}, "divides x W_Q by its length"),
        ({"bias": "('key',)", "softcap": 2.0}, "b_K.T of the key's bias does not cancel with softcap=2.0"),
        ({"bias": "('key',)", "sink": "off_by_one"}, "does not cancel with sink='off_by_one'"),
        ({"bias": "()", "query": "identity"}, "query='identity' and key='learned' are not both matrices"),
    ],
    ids=lambda value: ",".join(value) if isinstance(value, dict) else "",
)
def test_a_refusal_names_the_term(options, term):
    assert_refused(changed(**options), "merge_query_key", f"layer 0: .*{term}")


def test_some_layers_become_a_block_of_their_own():
    model = assert_exact(changed(), "merge_query_key", layers=(1,))
    assert [block.attention.query for block in model.blocks.values()] == ["learned", "merged"]


def test_a_matrix_without_an_inverse_is_refused():
    lm = changed(memory_slots=6, bias="()")
    kernel = lm.params["blocks"]["main"]["attention"]["key"]["kernel"]
    lm.params["blocks"]["main"]["attention"]["key"]["kernel"] = kernel.at[1, :, 0, 1].set(kernel[1, :, 0, 0])
    with pytest.raises(surgery.Refused, match="layer 1, W_K of group 0 has condition number .* no exact inverse"):
        surgery.merge_query_key(lm)


def test_the_certificate_measures_the_result():
    lm, certificate = surgery.merge_query_key(changed())
    assert certificate.exact and certificate.relative < 1e-12 and certificate.gradient < 1e-10
    assert {"all tokens", "text", "with the cache", "packed documents"} == {*certificate.differences}
    before, after = (certificate.costs["parameters"][side] for side in ("before", "after"))
    assert after > before and lm.config.blocks["main"].attention.query == "merged"
    assert certificate.bits_per_byte["before"] == pytest.approx(certificate.bits_per_byte["after"], rel=1e-12)
    assert "control: merge_query_key" in str(certificate)
