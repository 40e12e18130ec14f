"""More heads, hidden units and slots."""

import numpy as np
import pytest

from tests.surgery.comparing import assert_exact, changed
from tests.tiny_runs import tiny_model
from xfresearch import surgery
from xfresearch.surgery.network import take_apart

FEED_FORWARD = "model__blocks__main__feed_forward__"
WIDE = {"memory_slots": 6, "memory_activation": "relu"}


@pytest.mark.parametrize(
    ("options", "totals"),
    [
        ({}, {"heads": 5, "hidden": 200}),
        ({"kv_heads": 2, "position": "rope", "memory_slots": 3, "qk_norm": "rms", "sink": "off_by_one"}, {"heads": 8}),
        ({"kv_heads": 1, "position": "t5", "sink": "learned", "output_gate": "head"}, {"heads": 6}),
        ({"query": "merged", "value": "identity_whole", "shaping": "shaped", "bias": "('output',)"}, {"heads": 6}),
        (WIDE, {"slots": 9, "heads": 6}),
        ({"kind": "slots", "memory_slots": 5, "bias": "()"}, {"heads": 6}),
    ],
    ids=lambda value: ",".join(value),
)
def test_a_wider_layer_computes_the_same(options, totals):
    block = assert_exact(changed(**options), "widen", **totals).blocks["main"]
    collected = {"heads": block.attention.heads, "hidden": block.feed_forward.hidden}
    collected["slots"] = getattr(block.attention, "memory_slots", 0)
    assert collected | totals == collected


def test_experts_and_shared_experts():
    options = {FEED_FORWARD + "moe__shared": 2, FEED_FORWARD + "moe__bias": "('router','experts')"}
    model = assert_exact(tiny_model("moe", **options), "widen", layers=(1,), hidden=160)
    assert {block.feed_forward.hidden for block in model.blocks.values()} >= {160} and len(model.blocks) == 2


def test_groups():
    for groups, heads, expected in ((2, 8, 4), (1, 7, 1), (4, 6, 6)):
        lm = changed(kv_heads=groups, bias="()")
        after = surgery.CONVERSIONS["widen"](take_apart(lm.config, lm.params), heads=heads)
        attention = after.resolved.blocks["main"].attention
        assert (attention.heads, attention.kv_heads) == (heads, expected)
        result = after.params(0)
        assert result["attention/key/kernel"].shape[1] == expected and not result["attention/output/kernel"][4:].any()
        assert np.abs(result["attention/value/kernel"]).min() > 0


@pytest.mark.parametrize(
    ("lm", "totals", "term"),
    [
        (lambda: changed(position="alibi"), {"heads": 8}, "ALiBi's slopes .* depend on the number H of heads"),
        (lambda: changed(output="identity", bias="()"), {"heads": 8}, "output='identity' has no rows of W_O"),
        (lambda: changed(qk_norm="rms", qk_norm_over="heads"), {"heads": 8}, "qk_norm_over='heads' divides by a mean"),
        (lambda: changed(query="identity", bias="()"), {"heads": 8}, "query='identity' splits the input among the heads"),
        (lambda: changed(kv_heads=2), {"heads": 7}, "heads=7 is no multiple of the 2 heads of each"),
        (changed, {"heads": 4}, "heads=4 is not above its 4 heads"),
        (lambda: changed(kind="differential"), {"heads": 8}, "attention of kind 'differential' has no heads of softmax"),
        (lambda: tiny_model(**{FEED_FORWARD + "kind": "solu"}), {"hidden": 999}, "'solu' is normalised over the"),
        (lambda: tiny_model(**{FEED_FORWARD + "kind": "softmax"}), {"hidden": 999}, "'softmax' is normalised over"),
        (changed, {"hidden": 3}, "hidden=3 is not above its"),
        (lambda: tiny_model("all_attention"), {"hidden": 999}, "layout='all_attention' has no feed-forward layer"),
        (lambda: tiny_model("all_attention"), {"slots": 999}, "a new slot in the softmax takes weight from the others"),
        (changed, {"slots": 3}, "attention has no slots"),
        (lambda: changed(**WIDE), {"slots": 3}, "slots=3 is not above its 6 slots"),
    ],
)
def test_a_refusal_names_the_term(lm, totals, term):
    with pytest.raises(surgery.Refused, match=f"^widen: layer 0: .*{term}"):
        surgery.widen(lm(), **totals)


def test_layers_that_share_a_table_are_widened_together():
    with pytest.raises(surgery.Refused, match="^widen: layer 1: its T5 table has a column for each head"):
        surgery.widen(changed(position="t5"), layers=(0,), heads=6)
    with pytest.raises(surgery.Refused, match="^widen: heads=0, hidden=0 and slots=0: nothing grows"):
        surgery.widen(changed())
    with pytest.raises(surgery.Refused, match="^widen: seed=-1 is below 0"):
        surgery.widen(changed(), heads=6, seed=-1)


def test_the_certificate_measures_the_result():
    lm, certificate = surgery.widen(changed(), heads=6, hidden=256)
    assert certificate.exact and certificate.gradient < 1e-10
    attention = lm.config.blocks["main"].attention
    assert (attention.heads, attention.head_size) == (6, lm.config.width // 4)
