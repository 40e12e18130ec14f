"""Key-value heads of their own for all query heads."""

import pytest

from tests.surgery.comparing import assert_exact, assert_refused, changed


@pytest.mark.parametrize(
    "options",
    [
        {"kv_heads": 1, "position": "rope"},
        {"kv_heads": 2, "qk_norm": "rms", "qk_norm_over": "heads", "memory_slots": 3},
        {"kv_heads": 2, "value": "key", "memory_slots": 3, "memory_heads": "shared", "bias": "('key',)"},
        {"kv_heads": 2, "query": "merged", "bias": "('query','value')", "memory_slots": 3},
        {"kv_heads": 2, "query": "merged", "rank": 4, "bias": "()", "sink": "learned"},
        {"kind": "differential", "kv_heads": 2, "position": "rope"},
        {"kind": "value_residual", "kv_heads": 2, "position": "rope"},
        {"kind": "slots", "kv_heads": 2, "memory_slots": 5, "bias": "()"},
    ],
    ids=lambda options: ",".join(options),
)
def test_repeated_heads_compute_the_same(options):
    attention = assert_exact(changed(**options), "expand_groups").blocks["main"].attention
    assert attention.kv_heads == attention.heads


@pytest.mark.parametrize(
    ("options", "term"),
    [
        ({}, "each of the 4 heads has keys and values of its own already"),
        ({"kv_heads": 2, "head_size": 16, "key": "identity", "bias": "()"}, "key='identity' splits the input"),
        ({"kv_heads": 2, "head_size": 16, "value": "identity_plus", "bias": "()"}, "value='identity_plus' splits the input"),
        ({"kind": "lambda", "lambdas__window": 4}, "attention of kind 'lambda' has no key-value heads"),
    ],
    ids=["heads", "key", "value", "kind"],
)
def test_a_refusal_names_the_term(options, term):
    assert_refused(changed(**options), "expand_groups", f"layer 0: {term}")
