"""W_V W_O as one matrix per head, or in another gauge."""

import pytest

from tests.surgery.comparing import assert_exact, assert_refused, changed
from xfresearch import surgery
from xfresearch.surgery.network import take_apart

CASES = [
    {},
    {"bias": "('value','output')", "kv_heads": 2},
    {"bias": "()", "kv_heads": 1, "sink": "learned"},
    {"bias": "('value',)", "memory_slots": 6, "kv_heads": 2},
    {"bias": "()", "output_gate": "head"},
]


@pytest.mark.parametrize("gauge", ["merged", "balanced", "qr", "first_rows"])
@pytest.mark.parametrize("options", CASES, ids=lambda options: ",".join(options) or "base")
def test_the_matrices_compute_the_same(options, gauge):
    model = assert_exact(changed(**options), "absorb_value_output", gauge=gauge)
    assert (model.blocks["main"].attention.value == "identity_whole") == (gauge == "merged")


def test_slots_that_heads_share_get_values_of_their_own():
    model = assert_exact(changed(memory_slots=6, memory_heads="shared", kv_heads=2), "absorb_value_output")
    assert model.blocks["main"].attention.memory_heads == "each"


@pytest.mark.parametrize(
    ("options", "term"),
    [
        ({"value": "key", "bias": "()"}, "value='key' is no matrix"),
        ({"output": "identity", "bias": "()"}, "output='identity' is no matrix"),
        ({"clip": 1.0, "bias": "()"}, "clip is not linear in x W_V"),
        ({"output_gate": "elementwise"}, "multiplies each number between W_V and W_O"),
        ({"bias": "('value',)", "sink": "off_by_one"}, "weights that sum to 1: sink="),
        ({"bias": "('value',)", "shaping": "skip_init"}, "weights that sum to 1: shaping="),
        ({"bias": "('value',)", "sees_itself": False}, "weights that sum to 1: .*the first token sees none"),
        (
            {"bias": "('value',)", "sees_itself": False, "memory_slots": 6, "memory_activation": "gelu"},
            "weights that sum to 1: .*the first token sees none",
        ),
        ({"bias": "('value',)", "output_gate": "head"}, "weights that sum to 1: output_gate="),
    ],
    ids=lambda value: ",".join(value) if isinstance(value, dict) else "",
)
def test_a_refusal_names_the_term(options, term):
    assert_refused(changed(**options), "absorb_value_output", f"layer 0: .*{term}")


def test_a_gauge_moves_a_bias_under_any_weights():
    """b_V R stays where b_V was: only 'merged' takes it out of the sum."""
    lm = changed(bias="('value',)", sink="off_by_one", output_gate="head", dropout=0.1)
    assert_exact(lm, "absorb_value_output", gauge="balanced")


@pytest.mark.parametrize(
    ("gauge", "reason"),
    [
        ("balanced", "W_V W_O has a smaller rank than the heads"),
        ("qr", "layer 1, W_V of group 0 has condition number .* it has no exact inverse"),
        ("first_rows", "layer 1, first rows of W_V of group 0 has condition number .* it has no exact inverse"),
    ],
)
def test_a_matrix_without_an_inverse_is_refused(gauge, reason):
    lm = changed()
    value = lm.params["blocks"]["main"]["attention"]["value"]
    value["kernel"] = value["kernel"].at[1, :, 0, 1].set(0)
    with pytest.raises(surgery.Refused, match=f"^absorb_value_output: {reason}"):
        surgery.absorb_value_output(lm, gauge=gauge)
    _, certificate = surgery.absorb_value_output(lm)  # one matrix per head needs no inverse
    assert certificate.exact


@pytest.mark.parametrize("gauge", ["balanced", "qr"])
def test_a_badly_conditioned_matrix_is_refused(gauge):
    lm = changed()
    kernel = lm.params["blocks"]["main"]["attention"]["value"]["kernel"]
    nearly = kernel[..., 0] + 1e-5 * kernel[..., 1]
    lm.params["blocks"]["main"]["attention"]["value"]["kernel"] = kernel.at[..., 1].set(nearly)
    network = surgery.CONVERSIONS["absorb_value_output"](take_apart(lm.config, lm.params), gauge=gauge)
    with pytest.raises(surgery.Refused, match="layer 0, W_V of group 0 has condition number .*, above 1e.04"):
        network.params(0)


@pytest.mark.parametrize("gauge", ["balanced", "qr", "first_rows"])
def test_heads_that_are_wider_than_the_model_are_refused(gauge):
    with pytest.raises(surgery.Refused, match=r"W_V of group 0 is \(32, 40\): its columns are dependent"):
        surgery.absorb_value_output(changed(head_size=40, heads=2, bias="()"), gauge=gauge)
