"""Runs every snippet of README.md and docs/, page by page and in order, as a reader would."""

import json
import posixpath
import re
import shlex
import subprocess
import sys
from itertools import groupby
from pathlib import Path
from xml.etree import ElementTree

import pytest

from docs import site, write
from tests.launch import stand_ins
from xfresearch.__main__ import COMMANDS
from xfresearch.models.catalogue import TABLES
from xfresearch.models.layouts import LAYOUTS
from xfresearch.runtime.files import read_object
from xfresearch.studies import changes, report
from xfresearch.study import BASE
from xfresearch.study import parser as study_parser

ROOT = Path(__file__).parent.parent
# docs/data has reports of studies, which are made of their results.
PAGES = [ROOT / "README.md", *sorted(p for p in (ROOT / "docs").rglob("*.md") if ROOT / "docs" / "data" not in p.parents)]
FENCE = re.compile(r"^```(\w+)\n(.*?)^```$", re.M | re.S)
BY_HAND = "make "  # not run here: this test is part of `make test`
# Pages with commands that other tests run daily in a like form. These are tested under `long`.
SLOW = ("anatomy.md", "compare.md", "configuration.md", "data.md", "editing.md", "finetune.md", "inside.md", "interop.md")
SLOW += ("launch.md", "plan.md", "recipes.md", "sharding.md", "studies.md", "surgery.md")
SLOW += ("objectives.md", "playground.md", "python.md", "training.md", "w_o.md", "w_q.md")
# Runs that pages use: their configs.
RUNS = {"runs/a": "all_attention", "runs/quickstart": "quickstart", "runs/facts": "facts"}


def snippets(page: Path) -> list[tuple[str, str]]:
    return FENCE.findall(page.read_text())


@pytest.fixture(scope="module")
def checkout(tmp_path_factory):
    """A directory like a checkout, with a temporary runs/. All that the pages make must be ignored by git.

    Fake programs for gcloud and similar commands record their calls and return successful answers.
    """
    here = tmp_path_factory.mktemp("checkout")
    for name in ("xfresearch", "configs", "docs", "launch"):
        (here / name).symlink_to(ROOT / name)
    (here / ".gitignore").write_text((ROOT / ".gitignore").read_text())  # git follows no link to it
    subprocess.run(["git", "init", "--quiet", str(here)], check=True)
    author = ["-c", "user.name=a", "-c", "user.email=a@b"]  # the tag of an image is a commit
    subprocess.run(["git", "-C", str(here), *author, "commit", "--quiet", "--allow-empty", "-m", "c"], check=True)
    stand_ins.install(here / "runs" / "stand-ins")
    return here


def train_what_it_uses(page: Path, here: Path) -> None:
    """Makes the runs that the page uses, except those that it trains itself."""
    for workdir, config in RUNS.items():
        first = re.search(rf"^.*{workdir}\b.*$", page.read_text(), re.M)
        if first and "xfresearch.train" not in first[0] and not (here / workdir).exists():
            shell(f"python -m xfresearch.train --config configs/{config}.py:tiny --workdir {workdir}", here)


def shell(command: str, here: Path) -> None:
    command = re.sub(r"^python ", f"{sys.executable} ", command, flags=re.M)
    cloud = stand_ins.environment(here / "runs" / "stand-ins")
    done = subprocess.run(["bash", "-ec", command], cwd=here, env=cloud, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, f"{command}\n{done.stderr[-2000:]}"


def marked(page: Path):
    return pytest.param(page, id=page.name, marks=pytest.mark.long if page.name in SLOW else ())


# The pages adding*.md are carried out in a copy of the repository: tests/test_adding.py.
@pytest.mark.parametrize("page", [marked(page) for page in PAGES if not page.name.startswith("adding")])
def test_snippets_run(page, checkout, monkeypatch):
    train_what_it_uses(page, checkout)
    before = not_ignored(checkout)
    for language, group in groupby(snippets(page), key=lambda snippet: snippet[0]):
        texts = [text for _, text in group]
        if language == "bash":
            for text in texts:
                if not text.startswith(BY_HAND):
                    shell(text, checkout)
        if language == "python":  # in this process, which saves imports; each with names of its own
            monkeypatch.chdir(checkout)
            for number, text in enumerate(texts):
                exec(compile(text, f"{page.name}, snippet {number}", "exec"), {"__name__": "snippet"})
    assert not_ignored(checkout) == before


def not_ignored(here: Path) -> list[str]:
    """The files that git would add."""
    command = ["git", "ls-files", "--others", "--exclude-standard"]
    return subprocess.run(command, cwd=here, capture_output=True, text=True, check=True).stdout.splitlines()


def test_every_fence_has_a_known_language():
    for page in PAGES:
        for language, text in snippets(page):
            assert language in ("bash", "python", "text", "diff"), f"{page.name}: {text[:60]}"


def test_the_readme_has_an_example_of_each_command():
    text = "".join(text for _, text in snippets(ROOT / "README.md"))
    for name in COMMANDS:
        examples = [line for line in text.splitlines() if f"python -m xfresearch.{name} " in line]
        assert examples and not any("--help" in line for line in examples), name


def the_study_of_the_readme() -> tuple[str, str]:
    """Its command, and the function of the file that it writes."""
    texts = [text for _, text in snippets(ROOT / "README.md")]
    (command,) = [text for text in texts if "xfresearch.study --arms" in text]
    (function,) = [text for text in texts if text.startswith("def get_config()")]
    return command, function


def test_the_file_of_the_readmes_study_is_the_one_that_its_command_writes():
    command, function = the_study_of_the_readme()
    options = study_parser().parse_args(shlex.split(command)[3:])
    assert changes.file_of(options.arms, options.base or BASE, options.corpus).endswith(f"\n{function}")


@pytest.mark.long
def test_the_study_of_the_readme_ends_with_a_verdict_and_a_page(checkout):
    command, _ = the_study_of_the_readme()
    shell(f"mkdir -p notes && cp docs/*.md notes/\n{command}", checkout)
    results = read_object(checkout / "runs" / "relu2" / "results.json")
    assert results["sizes"]["tiny"]["arms"]["relu2"]["verdict"] in ("better", "worse", "equivalent", "undecided")
    assert (checkout / "runs" / "relu2" / "report.html").exists()


def test_the_readme_is_short():
    """Its words without its snippets."""
    assert len(FENCE.sub("", (ROOT / "README.md").read_text()).split()) <= 700


def anchors(page: Path) -> set[str]:
    """The anchors that GitHub and the site give to the titles of a page: words in small letters with hyphens between."""
    titles = re.findall(r"^#+ (.*)$", FENCE.sub("", page.read_text()), re.M)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def test_links_lead_to_files_and_titles():
    for page in PAGES:
        for target, anchor in re.findall(r"\]\((?!https?:)([^)#\s]*)#?([^)\s]*)\)", FENCE.sub("", page.read_text())):
            to = page.parent / target if target else page
            assert to.exists(), f"{page.name}: {target}"
            assert not anchor or anchor in anchors(to), f"{page.name}: {target}#{anchor}"


def meaning(text: str) -> list:
    """What a generated text says, apart from its words: titles, pictures, the first cell of each row, and all figures in its
    tables; of a drawing, what is written in it."""
    if text.startswith("{"):
        return [json.loads(text)]
    if text.lstrip().startswith(("<?xml", "<svg")):
        return [each.text for each in ElementTree.fromstring(text).iter() if (each.text or "").strip()]
    rows = [line.split(" | ") for line in text.splitlines() if line.startswith("| ")]
    told = [(cells[0], re.findall(r"\d[\d.,]*", " ".join(cells))) for cells in rows]
    return [re.findall(r"^#+ .*$", text, re.M), re.findall(r"!\[[^\]]*\]\(([^)]+)\)", text), told]


@pytest.mark.parametrize("page", write.PAGES)
def test_a_generated_page_says_what_is_generated_now(page):
    """`make site` writes all of them, so their words may be older here."""
    assert meaning((ROOT / "docs" / page).read_text()) == meaning(write.PAGES[page]()), "run `make docs`"


STUDIES = sorted((ROOT / "docs" / "data" / "studies").glob("*/results.json"))


@pytest.mark.parametrize("file", STUDIES, ids=lambda file: file.parent.name)
def test_reports_of_studies_have_the_figures_of_their_results(file):
    now = report.markdown(report.parts_of(read_object(file)))
    assert meaning((file.parent / "report.md").read_text()) == meaning(now), "run `make studies`"


def test_figures_titles_and_rows_are_meant_and_words_are_not():
    page = "# A\n\nWords.\n\n| `a` | so | 1.5 |\n"
    assert meaning(page) == meaning(page.replace("Words", "Others").replace("so", "thus"))
    for old, new in (("1.5", "1.6"), ("# A", "# B"), ("`a`", "`b`"), ("Words", "![x](x.svg)")):
        assert meaning(page) != meaning(page.replace(old, new))


def test_every_page_begins_with_its_title_and_a_paragraph():
    """A page that is written in part by `make docs` keeps what people have written before that part."""
    for page in PAGES:
        title, empty, paragraph, *_ = page.read_text().splitlines()
        assert title.startswith("# ") and not empty and paragraph[:1] not in ("", "#", "|", "!", "`"), page


def test_no_page_has_a_section_twice():
    for page in PAGES:
        titles = re.findall(r"^## .*$", FENCE.sub("", page.read_text()), re.M)
        assert len(titles) == len(set(titles)), page


def test_the_page_of_models_has_what_the_code_says_of_every_named_value():
    """And a drawing of every layout, which is there."""
    parts = dict(re.findall(r"<!-- made: (\S+) -->(.*?)<!-- end -->", (ROOT / "docs" / "models.md").read_text(), re.S))
    assert parts.keys() == TABLES.keys() | {"drawings"}
    for option, table in TABLES.items():
        made = {line.split("`")[1]: line for line in parts[option].splitlines()[4:] if line}
        assert made.keys() == table.keys()
        for name, entry in table.items():
            assert entry.formula.strip() and "\n" not in entry.formula + entry.paper, name
            assert f" | {entry.formula} | {entry.paper} |" in made[name].replace("\\|", "|"), name
        assert parts[option].strip() in site.pages()[site.VALUES]
    assert sorted(re.findall(r"!\[\w+\]\(layouts/(\w+)\.svg\)", parts["drawings"])) == sorted(LAYOUTS)


def test_the_index_lists_every_page():
    listed = [to for tab in site.navigation() for to in pages_of(tab) if not to.startswith(("reference/", site.START))]
    assert sorted(listed) == sorted(str(page.relative_to(ROOT / "docs")) for page in PAGES[1:])


def pages_of(tab: dict) -> list[str]:
    """The pages of a tab of the site."""
    (of,) = tab.values()
    return [of] if isinstance(of, str) else [to for each in of for to in each.values()]


def test_links_of_the_site_lead_to_its_pages_and_pictures():
    result = site.pages()
    for page, text in result.items():
        for _, _, target, _ in site.LINK.findall(FENCE.sub("", text)):
            to = posixpath.normpath(posixpath.join(posixpath.dirname(page), target))
            copied = to.endswith(site.SHOWN) and (ROOT / "docs" / to).exists()
            assert to in result or copied, f"{page}: {target}"


@pytest.mark.long
def test_the_site_is_built_without_a_warning_and_fetches_nothing():
    pytest.importorskip("mkdocs", reason="needs requirements/docs.txt")
    site.main()
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--config-file", "site/mkdocs.yml"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    files = [*(ROOT / "site" / "html").rglob("*.html")]
    assert len(files) > len(PAGES) and (ROOT / "site" / "html" / "search" / "search_index.json").stat().st_size > 1e5
    fetched = re.compile(r"<(?:script|img|link|iframe)[^>]*(?:src|href)=\"?(?:https?:)?//[^>]*")  # not <a href>
    assert {file.name: links for file in files if (links := fetched.findall(file.read_text()))} == {}


def test_the_table_of_variants_has_every_variant():
    from xfresearch.configs.variants import VARIANTS

    names = write.variant_names()
    assert len(names) == len(set(names)) == len(VARIANTS) + 1 + sum(name.endswith(":3m") for name in names)
    text = (ROOT / "docs" / "data" / "tables" / "variants.md").read_text()
    assert [name for name in names if f"| `{name.removeprefix('configs/')}` |" not in text] == []
