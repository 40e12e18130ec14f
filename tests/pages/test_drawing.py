"""The drawing of a block: what its layout has is there, once, and the arrows start and end where the formula says."""

import re
import xml.etree.ElementTree as ElementTree
from dataclasses import replace

import pytest

from docs.write import layout_drawing
from tests.tiny_runs import tiny_config
from tests.variants import LAYOUTS as CASES
from xfresearch.models.block_config import BLOCKS
from xfresearch.models.layouts import LAYOUTS
from xfresearch.pages.drawing import draw_block


def drawn(svg: str, kind: str) -> int:
    return len(re.findall(rf'class="{kind}"', svg))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_is_drawn_as_its_formula(layout):
    svg = draw_block(BLOCKS[layout](), words=False)
    ElementTree.fromstring(svg)
    sums, factors = svg.count(">+</text>"), svg.count(">×</text>")
    assert CASES[layout].drawing == (drawn(svg, "norm"), sums, drawn(svg, "skip"), factors, drawn(svg, "sum"))
    names = [branch.role for branch in LAYOUTS[layout].branches]
    for role in ("mixer", "cross", "feed_forward"):
        assert drawn(svg, role) == names.count(role)
    assert drawn(svg, "source") == names.count("cross")


def test_a_skip_goes_around_its_own_sublayers():
    """The skip of no_residual_between starts below attention; that of the feed-forward of pre_norm above it."""
    starts = {}
    for layout in ("no_residual_between", "pre_norm"):
        svg = draw_block(BLOCKS[layout](), words=False)
        attention = float(re.search(r'class="mixer" x="\S+" y="(\S+)"', svg)[1])
        starts[layout] = [float(y) < attention for y in re.findall(r'class="skip" d="M0 (\S+?)L', svg)]
    assert starts == {"no_residual_between": [False], "pre_norm": [False, True]}


def test_options_appear_in_words_and_hostile_ones_as_text():
    block = tiny_config("all_attention").model.blocks["main"]
    svg = draw_block(block)
    slots = block.attention.memory_slots
    assert (
        slots and f"{slots} slots" in svg and f"{block.attention.heads} heads of" in svg and drawn(svg, "memory") == 1
    )
    norms = replace(block.norms, attention_post=replace(block.norms.attention_post, kind="<b>"))
    assert "&lt;b&gt; norm" in draw_block(replace(block, norms=norms))


def test_a_norm_of_kind_none_is_not_drawn():
    assert drawn(draw_block(BLOCKS["pre_norm"](norm="none"), words=False), "norm") == 0


def test_files_have_a_dark_theme_and_elements_have_none():
    assert "prefers-color-scheme: dark" in layout_drawing("pre_norm") and "<style>" not in draw_block(
        BLOCKS["pre_norm"]()
    )
    assert "memory slots" in layout_drawing("all_attention")
