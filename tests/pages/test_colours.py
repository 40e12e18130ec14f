"""Pictures show right where CSS is not read, and every colour has its dark one where it is."""

import io
import re
import shutil
import subprocess
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import numpy as np
import pytest
from matplotlib.image import imread

from xfresearch.models.block_config import BLOCKS
from xfresearch.models.layouts import LAYOUTS
from xfresearch.pages.charts import Curve, line_chart, styles, with_interval
from xfresearch.pages.colours import DARK, LIGHT, RULES, as_file
from xfresearch.pages.drawing import draw_block
from xfresearch.pages.heat_map import heat_map
from xfresearch.pages.intervals import Interval, intervals

DOCS = Path(__file__).parents[2] / "docs"
SVG = "{http://www.w3.org/2000/svg}"
SHAPES = {f"{SVG}{name}" for name in ("path", "rect", "circle", "text", "use", "line", "polyline", "polygon", "ellipse")}
# What SVG gives where nothing is said.
BEGINNING = {"fill": "black", "stroke": "none", "stroke-width": "1", "fill-opacity": "1", "font-family": ""}
ZOOM = 2  # lines are then wide enough for pixels that are theirs alone


def made() -> dict[str, str]:
    """A picture of each kind that the package draws."""
    of_arms = [Curve(np.array([[0, n], [1, 2.0 * n]]), half=np.ones(2), **look) for n, look in enumerate(styles(9))]
    rows = [Interval(str(number), 0.0, -1.0, 1.0, "undecided", number == 3) for number in range(4)]
    return {
        **{layout: draw_block(BLOCKS[layout]()) for layout in LAYOUTS},
        "heat map": heat_map("a", [[-1.0, 1.0], [0.5, 1.0]], "row", "column", -1.0, texts=(("a", "b"), ("c", "d"))),
        "chart of an interval": line_chart("a", with_interval([[0, 1.0, 0.1], [1, 2.0, 0.1]]), {"level": 1.5}),
        "chart of arms": line_chart("a", of_arms, {}, second=("hours", 2.0)),
        "intervals": intervals("a", {"b": rows}, 0.5, "loss"),
    }


PICTURES = {name: as_file(svg) for name, svg in made().items()}
PICTURES |= {str(file.relative_to(DOCS)): file.read_text() for file in sorted(DOCS.rglob("*.svg"))}


def drawn(element, said: dict[str, str]):
    """Yields (shape, what is said of it) of an element and all in it, as a program without style sheets sees them."""
    own = dict(re.findall(r"([\w-]+): ([^;]*)", element.get("style", ""))) | element.attrib
    said = {name: own.get(name, value) for name, value in said.items()}
    if element.tag in SHAPES:
        yield element, said
    for each in element:
        if each.tag != f"{SVG}clipPath":
            yield from drawn(each, said)


@pytest.mark.parametrize("name", PICTURES)
def test_every_shape_has_a_colour_of_the_light_theme_without_css(name):
    svg = re.sub(r"(?s)<style.*?</style>", "", PICTURES[name])
    listed = [said for shape, said in drawn(ElementTree.fromstring(svg), BEGINNING) if shape.get("id") not in used(svg)]
    colours = {said[paint] for said in listed for paint in ("fill", "stroke")} - {"none"}
    assert len(colours) > 1 and colours <= set(LIGHT.values())
    assert not re.search(r'style="[^"]*\b(fill|stroke|color): ', svg)  # a style sheet could not replace it


def used(svg: str) -> list[str]:
    """The shapes that are drawn elsewhere, in the colours of <use>."""
    return re.findall(r'<use xlink:href="#(\w+)"', svg)


@pytest.mark.parametrize("name", PICTURES)
def test_every_text_has_a_font(name):
    listed = drawn(ElementTree.fromstring(PICTURES[name]), BEGINNING)
    fonts = [said["font-family"] for shape, said in listed if shape.tag == f"{SVG}text"]
    assert fonts and all(font.endswith("sans-serif") for font in fonts)


@pytest.mark.parametrize("name", PICTURES)
def test_every_colour_of_a_file_has_its_dark_one(name):
    svg = PICTURES[name]
    attributes = set(re.findall(r'(?:fill|stroke)="#\w+"', svg.partition("</style>")[2]))
    assert attributes and attributes <= set(RULES)
    assert all(f"[{attribute}] {{ {RULES[attribute]} }}" in svg for attribute in attributes)


def test_a_light_colour_has_one_dark_colour():
    assert list(LIGHT) == list(DARK) and len(set(zip(LIGHT.values(), DARK.values(), strict=True))) == len({*LIGHT.values()})


@pytest.mark.skipif(not shutil.which("rsvg-convert"), reason="needs rsvg-convert of librsvg (Debian: librsvg2-bin)")
@pytest.mark.parametrize("name", PICTURES)
def test_librsvg_shows_the_light_colours(name):
    """Some pixels have the colour of each opaque area and of each line that is wide enough, and none are black."""
    command = ["rsvg-convert", "--zoom", str(ZOOM)]
    picture = subprocess.run(command, input=PICTURES[name].encode(), capture_output=True, check=True).stdout
    pixels = (255 * imread(io.BytesIO(picture))).round().astype(np.uint8)  # [rows, columns, red, green, blue, alpha]
    shown = {f"#{red:02x}{green:02x}{blue:02x}" for red, green, blue, alpha in different(pixels) if alpha == 255}
    listed = drawn(ElementTree.fromstring(PICTURES[name]), BEGINNING)
    shapes = [said for shape, said in listed if shape.tag != f"{SVG}text" and shape.get("id") not in used(PICTURES[name])]
    areas = {said["fill"] for said in shapes if float(said["fill-opacity"]) == 1}
    lines = {said["stroke"] for said in shapes if float(said["stroke-width"]) >= 1}
    assert (areas | lines) - {"none"} <= shown and "#000000" not in shown


def different(pixels: np.ndarray) -> np.ndarray:
    """The colours of pixels, each once: [colours, 4]."""
    return np.unique(pixels.reshape(-1, 4).view(np.uint32)).view(np.uint8).reshape(-1, 4)
