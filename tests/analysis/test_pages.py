"""Reports and pages of keys in a browser: no errors, nothing from elsewhere, and text of the corpus is only text."""

import re
from dataclasses import replace

import numpy as np
import pytest

from tests.pages.browser import opened
from tests.tiny_runs import rough_params, tiny_model
from xfresearch import LanguageModel, analysis

HOSTILE = b'<script>f("1")</script> &amp; <img src=x>\n<b>\x00\x1b\xff</svg>'


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Results of a small model whose corpus has markup, and whose vocabulary is larger than its tokenizer."""
    result = tmp_path_factory.mktemp("results")
    lm = tiny_model("gpt2", model__depth=1, model__blocks__main__feed_forward__hidden=24)
    model = replace(lm.config, vocab_size=300)
    lm = LanguageModel(model, rough_params(model), lm.tokenizer, lm.run)
    tokens_NL = np.array([[*HOSTILE, 256, 299], [299, 280, *HOSTILE]])
    clean_BL, corrupted_BL = tokens_NL[:1, :12], tokens_NL[1:, :12]
    analysis.memories(lm, tokens_NL, top=12).save(result / "memories")
    analysis.lens(lm, tokens_NL[:, -10:]).save(result / "lens")
    analysis.patching(lm, clean_BL, corrupted_BL, sites=("feed_forward.out",)).save(result / "patching")
    return result


def pages(folder) -> list:
    return sorted(folder.rglob("*.html"))


PAGES = ("memories/report.html", "memories/blocks.0.feed_forward.html", "lens/report.html", "patching/report.html")


@pytest.mark.parametrize("name", PAGES)
def test_a_browser_opens_a_page_without_errors_and_text_of_the_corpus_is_text(folder, tmp_path, name):
    page = opened(folder / name, tmp_path)
    assert page.console == [] and page.loads == []
    assert not {"script", "img", "b", "iframe"} & set(page.tags)
    if name.startswith("memories"):
        assert all(text in page.text for text in ("<script>f(", "&amp;", "<img src=x>", "<299>"))
    assert page.tags.count("html") == 1 and "body" in page.tags and page.text.strip()


def test_the_browser_reports_errors(tmp_path):
    (tmp_path / "page.html").write_text("<p>x</p><script>nothing()</script><img src='http://example.org/a.png'>")
    page = opened(tmp_path / "page.html", tmp_path / "profile")
    assert "nothing is not defined" in page.console[0] and page.loads == ["http://example.org/a.png"]
    assert "script" in page.tags


def test_links_between_the_pages_work(folder):
    assert {str(path.relative_to(folder)) for path in pages(folder)} >= set(PAGES)
    for path in pages(folder):
        links = re.findall(r'href="([^"]*)"', path.read_text())
        assert all((path.parent / link).exists() for link in links), path
        is_keys = path.name != "report.html"
        assert ("report.html" in links) == is_keys
    report = (folder / "memories/report.html").read_text()
    assert 'href="blocks.0.feed_forward.html"' in report


def test_pages_name_nothing_outside(folder):
    for path in pages(folder):
        page = path.read_text().replace("http://www.w3.org/2000/svg", "")
        assert "default-src 'none'" in page and not re.search(r"https?://|@import|\burl\((?!#)", page), path
        assert "<script" not in page and not re.search(r'\s(src|onload|onerror)="', page), path


def test_a_picture_that_is_wider_than_a_column_has_the_width_of_the_page(folder):
    page = (folder / "lens/report.html").read_text()
    assert re.findall(r'<figure( class="wide")?><figcaption><h3>([^<]*)', page)[:2] == [
        (' class="wide"', "Most likely next tokens"),
        ("", "Attribution by sublayer"),
    ]


def test_pictures_are_well_formed_with_control_characters(folder):
    from xml.etree import ElementTree

    found = sorted(folder.rglob("*.svg"))
    assert len(found) == 6
    for path in found:
        ElementTree.parse(path)


def test_the_repr_of_a_result_is_a_few_lines():
    """The figures and the shapes of the data, not the data."""
    arrays = {f"array_{number}": np.zeros((3, number)) for number in range(40)}
    summary = {f"figure {number}": (number / 3, 0.1) for number in range(30)}
    lines = repr(analysis.Result("lens", "a model; 7 rows", 5, {"n": 2.0, **arrays}, summary)).splitlines()
    assert lines[0] == "Result lens" and len(lines) == 5 and max(map(len, lines)) < 200
    assert "figure 1 0.3333" in lines[3] and "22 more" in lines[3] and "n, array_0[3, 0], array_1[3, 1]" in lines[4]
