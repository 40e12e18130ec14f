"""Names of machines, and the shape of their torus."""

import pytest

from xfresearch.planning.chips import CHIPS
from xfresearch.planning.topologies import parse
from xfresearch.runtime.errors import UserError


@pytest.mark.parametrize(
    ("text", "name", "chips", "devices"),
    [
        ("v5p:8x8x4", "v5p:8x8x4", 256, 256),
        ("v5p-256", "v5p:4x4x8", 128, 128),  # TensorCores, two per chip
        ("v6e-256", "v6e:16x16", 256, 256),
        ("v5litepod-16", "v5e:4x4", 16, 16),
        ("v4-8", "v4:2x2x1", 4, 4),
        ("tpu7x:2x2x1", "tpu7x:2x2x1", 4, 8),  # two devices per chip
        ("2x v5p:4x4x4", "2x v5p:4x4x4", 128, 128),
        ("V5E:1x1", "v5e:1x1", 1, 1),
        ("h100:8", "h100:8", 8, 8),
        ("h200:8x4", "h200:8x4", 32, 32),
    ],
)
def test_names_are_parsed(text, name, chips, devices):
    result = parse(text)
    assert (result.name, result.chips, result.devices) == (name, chips, devices)
    assert parse(name) == result


def test_slices_in_the_name_and_the_option_multiply():
    assert parse("v5p:4x4x4", slices=3).devices == 192
    assert parse("2x v5p:4x4x4", slices=3).slices == 6


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("vp5:4x4", "did you mean 'v5p'"),
        ("h10:8", "did you mean 'h100'"),
        ("", "there is no such machine"),
        ("v5p:4x4", "3 dimensions"),
        ("v5p:3x4x4", "must be even"),
        ("v5p-3", "v5p-8"),
        ("v6e:32x32", "at most 16x16"),
        ("v5e:0x4", "at least 1"),
        ("h100:16", "at most 8 GPUs per host"),
        ("h100:x8", "there is no such machine"),
        ("v5p:8xx8x4", "there is no such machine"),
    ],
)
def test_unknown_machines_raise_a_one_line_error(text, message):
    with pytest.raises(UserError, match=message) as error:
        parse(text)
    assert "\n" not in str(error.value) and text in str(error.value)


def test_a_torus_is_closed_at_16_chips_or_if_it_consists_of_whole_cubes():
    assert [parse("v5e:4x16").wraps(i) for i in (0, 1)] == [False, True]
    for name, closed in (("v5p:4x4x8", True), ("v5p:2x4x8", False), ("v4:2x2x4", False), ("tpu7x:4x4x4", True)):
        assert [parse(name).wraps(i) for i in (0, 1, 2)] == [closed] * 3


def test_peak_flops_of_every_chip():
    assert {name: round(chip.peak("bfloat16") * chip.devices / 1e12) for name, chip in CHIPS.items()} == {
        "v4": 275, "v5e": 197, "v5p": 459, "v6e": 918, "tpu7x": 2307, "a100": 312, "h100": 989, "h200": 989, "b200": 2250
    }  # fmt: skip
