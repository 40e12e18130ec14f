"""What a notebook shows of an object: its facts within a screen, and nothing of its data."""

import base64
import io
import re
import shutil
import subprocess
from html.parser import HTMLParser
from xml.etree import ElementTree

import numpy as np
import pytest

from tests.tiny_runs import tiny_model
from xfresearch.analysis.result import Result
from xfresearch.pages.cards import HEIGHT, MOST, Card
from xfresearch.pages.figures import HeatMap
from xfresearch.surgery.certificate import Certificate

SCREEN = 700  # pixels
ROW = 24  # the height of a row of a table in a notebook


class Height(HTMLParser):
    """The height of a card in pixels, and its tags that are open."""

    def __init__(self, card: str):
        super().__init__()
        self.height, self.open = 0, []
        self.feed(card)

    def handle_starttag(self, tag, attrs):
        self.height += {"tr": ROW, "p": 2 * ROW, "b": ROW, "img": HEIGHT}.get(tag, 0)
        self.open += [tag] if tag != "img" else []

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def check(shown: Card, lines: int = 8) -> str:
    """The card of an object, whose repr has at most so many lines, if it fits a screen."""
    text, card = repr(shown), shown._repr_html_()
    assert len(text.splitlines()) <= lines and max(map(len, text.splitlines())) <= 200
    read = Height(card)
    assert 2 * ROW < read.height <= SCREEN and not read.open
    assert f"max-height: {HEIGHT}px" in card or "<img" not in card
    return card


def image(card: str) -> str:
    """The SVG file of the card."""
    return base64.b64decode(re.findall(r"data:image/svg\+xml;base64,([^\"]*)", card)[0]).decode()


def result() -> Result:
    values = np.arange(4000.0).reshape(40, 100)
    data = {f"array <{number}>": values for number in range(40)}
    summary = {f"figure {number}": (number / 3, 0.1) for number in range(30)}
    return Result("lens", "a model\nof " + "many words " * 50, 5, data, summary, (HeatMap("Heads", "", values, "a", "b"),))


def test_a_result_shows_its_figures_and_one_picture():
    card = check(result())
    assert "array &lt;0&gt;[40, 100]" in card and "<0>" not in card and 'alt="Heads"' in card
    assert ElementTree.fromstring(image(card)).tag == "{http://www.w3.org/2000/svg}svg"


@pytest.mark.skipif(not shutil.which("rsvg-convert"), reason="needs rsvg-convert of librsvg (Debian: librsvg2-bin)")
def test_the_picture_is_a_file_that_programs_draw():
    from matplotlib.image import imread

    for shown in (result(), tiny_model()):
        svg = image(shown._repr_html_())
        drawn = subprocess.run(["rsvg-convert"], input=svg.encode(), capture_output=True, check=True).stdout
        assert imread(io.BytesIO(drawn)).shape[0] > 50


def test_a_model_shows_its_block():
    card = check(tiny_model())
    assert "LanguageModel" in card and "parameters" in card and 'class="mixer"' in image(card)


def test_a_certificate_shows_its_verdict_and_its_worst_figures():
    shown = Certificate(["fold_norm"], False, domain="all tokens", bits_per_byte={"before": 1.5, "after": 1.5})
    shown.differences = {str(number): {"absolute": 0.0, "relative": number * 1e-15} for number in range(50)}
    shown.controls = {f"step {number}": 0.5 + number for number in range(50)}
    card = check(shown)
    assert "Certificate of fold_norm: exact" in card and "4.9e-14" in card and "5.0e-01" in card and "1.5000" in card
    assert "4.9e-14" in repr(shown) and len(str(shown).splitlines()) > 100
    shown.controls = {}
    assert "NOT exact" in repr(shown)


def test_a_table_has_a_few_rows_and_says_how_many_more():
    class Long(Card):
        def _facts(self):
            return {"a": "b"}

        def _rows(self):
            return [("name", "loss"), *((f"run {number}", "1") for number in range(MOST + 3))]

    card = check(Long())
    assert "run 7" in card and "run 8" not in card and "<p>3 more</p>" in card and "<th>loss</th>" in card
