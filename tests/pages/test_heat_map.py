"""Heat maps: a cell for each value, with its colour and its text."""

import re

import numpy as np
import pytest

from xfresearch.pages.colours import LIGHT
from xfresearch.pages.heat_map import heat_map


def cells(svg: str) -> list[tuple]:
    """(colour, opacity, text) of each cell."""
    found = re.findall(r'fill="(#\w+)" fill-opacity="(-?[\d.]+)" stroke[^>]*><title>([^<]*)</title>', svg)
    names = {value: name for name, value in LIGHT.items() if not name.startswith("run")}
    return [(names[colour], *rest) for colour, *rest in found]


def test_cells_have_colours_from_low_to_high_and_no_value_has_no_cell():
    svg = heat_map("<T>", [[0.0, 1.0], [0.5, np.nan]], "layer", "head")
    assert cells(svg) == [
        ("model", "0.000", "layer 0, head 0: 0"),
        ("model", "1.000", "layer 0, head 1: 1"),
        ("model", "0.500", "layer 1, head 0: 0.5"),
    ]
    assert 'aria-label="&lt;T&gt;"' in svg


def test_negative_values_have_another_colour():
    drawn = cells(heat_map("t", [[-0.5, 0.0, 0.5]], "row", "column", -1.0, 1.0))
    assert [(colour, float(opacity)) for colour, opacity, _ in drawn] == [("training", 0.5), ("training", 0), ("model", 0.5)]


def test_the_first_row_is_at_the_bottom_and_labels_are_few():
    svg = heat_map("t", np.zeros((50, 3)), "layer", "head")
    heights = [float(y) for y in re.findall(r'<rect x="[\d.]+" y="([\d.]+)" width="18"', svg)]
    assert heights[0] > heights[-1] and len(re.findall('text-anchor="end"', svg)) <= 14


def test_cells_may_have_texts_and_columns_names():
    svg = heat_map("t", [[0.0, 1.0]], "layer", "token", names=("<a", "b"), texts=(("\n", "a text of the cell"),))
    labels = re.findall(r"<text[^>]*>([^<]*)</text>", svg)
    assert labels[:4] == ["\\n", "a text o", "&lt;a", "b"]


def test_a_space_at_the_start_is_a_dot():
    svg = heat_map("t", [[1.0]], "layer", "token", names=(" a",), texts=((" b c",),))
    labels = re.findall(r"<text[^>]*>([^<]*)</text>", svg)
    assert labels[:2] == ["·b c", "·a"]


def test_names_under_narrow_cells_are_upright_and_above_the_title_of_the_columns():
    svg = heat_map("t", np.zeros((2, 3)), "layer", "site", names=("a", "feed_forward", "c\x00"))
    ends = [float(y) for y in re.findall(r'rotate\(-90 [\d.]+ ([\d.]+)\)">[afc]', svg)]
    title = float(re.search(r'y="([\d.]+)"[^>]*>site<', svg)[1])
    assert len(ends) == 3 and "c\u2400" in svg and len(cells(svg)) == 6
    assert ends[0] + 12 * 5 < title < float(re.search(r'viewBox="0 0 \S+ ([\d.]+)"', svg)[1])
    assert 'width="18"' in svg


@pytest.mark.parametrize("value, low", [(4.577, 0), (0.0, 0), (-2.0, -2)])
def test_values_that_are_shown_as_one_number_have_one_colour(value, low):
    """Their last digits are noise, which would have all colours."""
    svg = heat_map("a", [[value, value * (1 + 1e-9)], [value * (1 - 1e-9), value]], "row", "column")
    found = cells(svg)
    assert len(found) == 4 and len({each[:2] for each in found}) == 1 and f">{low}</text>" in svg
