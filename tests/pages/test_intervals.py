"""Pictures of differences: where values, their intervals, zero and the margin are."""

import re

import pytest

from xfresearch.pages.colours import LIGHT
from xfresearch.pages.intervals import LETTER, MIDDLE, SIDE, Interval, intervals

GROUPS = {
    "a <b>": [Interval("small", 0.02, 0.01, 0.03, "worse"), Interval("large", -0.05, -0.07, -0.03)],
    "c": [Interval("small", 0.0, -0.005, 0.005)],
}
SVG = intervals("a question", GROUPS, 0.01, "bits per byte")


def numbers(pattern: str) -> list[float]:
    return [float(number) for number in re.findall(pattern, SVG)]


def test_every_value_lies_where_its_number_says():
    low, high = -0.07, 0.03  # the ends of all intervals, with 5 % of room at both sides
    x = lambda value: SIDE + MIDDLE * (value - low + 0.005) / (high - low + 0.01)  # noqa: E731
    assert numbers(r'circle cx="([\d.]+)"') == pytest.approx([x(0.02), x(-0.05), x(0)], abs=0.06)
    lines = re.findall(r'd="M([\d.]+) [\d.]+H([\d.]+)"', SVG)
    assert [float(end) for line in lines for end in line] == pytest.approx(
        [x(0.01), x(0.03), x(-0.07), x(-0.03), x(-0.005), x(0.005)], abs=0.06
    )
    band, width = numbers(r'rect x="([\d.]+)"')[0], numbers(r'rect x="[\d.]+" y="0" width="([\d.]+)"')[0]
    assert (band, width) == pytest.approx((x(-0.01), x(0.01) - x(-0.01)), abs=0.11)
    assert numbers(r'd="M([\d.]+) 0V')[0] == pytest.approx(x(0), abs=0.06)


def test_names_are_escaped_and_ticks_are_round():
    assert "a &lt;b&gt;" in SVG and "<b>" not in SVG and ">small: worse<" in SVG and ">large<" in SVG
    assert re.findall(r"middle[^>]*>([+-]?[\d.]+)<", SVG) == ["-0.06", "-0.04", "-0.02", "0", "+0.02"]


def test_rows_do_not_overlap():
    heights = numbers(r'cy="([\d.]+)"')
    assert heights == sorted(heights) and min(b - a for a, b in zip(heights, heights[1:], strict=False)) >= 18


def test_the_row_of_the_whole_group_stands_out():
    rows = [Interval("small", 0.1, 0.0, 0.2), Interval("large", 0.3, 0.2, 0.4), Interval("both", 0.2, 0.1, 0.3, whole=True)]
    svg = intervals("a", {"b": rows}, 0.01, "loss")
    usual, whole = ("4", LIGHT["run1"]), ("5", LIGHT["model"])
    assert re.findall(r'<circle [^>]*r="(\d)" fill="(#\w+)', svg) == [usual, usual, whole]


def test_long_names_and_words_have_room():
    name, words = "a" * 60, "b" * 40
    svg = intervals("a", {name: [Interval("c", 0.0, -1.0, 1.0, words)]}, 0.01, "loss")
    begin = float(re.search(r'd="M([\d.]+) [\d.]+H', svg)[1])
    at, width = float(re.search(r'x="([\d.]+)"[^>]*>c: b', svg)[1]), int(re.search(r'width="(\d+)"', svg)[1])
    assert begin > 8 + 12 * LETTER * len(name) and width > at + 10.5 * LETTER * len(f"c: {words}")
