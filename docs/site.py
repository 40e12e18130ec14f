"""python -m docs.site: writes site/source and site/mkdocs.yml, of which `make site` builds site/html.

They are plain Markdown and a list, so any builder that reads a mkdocs.yml can take them. Python's standard library is
enough: the code is read and not imported. The navigation is that of docs/index.md, a tab for each section and a page for
each row of its tables. README.md becomes start.md. The public Python face has a page for each package, and the tables of
layouts, norms and kinds are a page. Links to files outside of docs/ lead to the repository, or are plain text while
pyproject.toml names none.
"""

import ast
import json
import posixpath
import re
import shutil
import tomllib
from pathlib import Path

ROOT = Path(__file__).parent.parent
DOCS, SITE = ROOT / "docs", ROOT / "site"
START = "start.md"  # README.md
VALUES = "reference/values.md"  # of options that have names
SHOWN = (".md", ".svg", ".png")  # of docs/; notebooks are shown by the repository
LINK = re.compile(r"(!?)\[([^\]]*)\]\((?!https?:|#)([^)#\s]+)(#[^)\s]*)?\)")
SECTION = re.compile(r"^## (.*)$", re.M)
ROW = re.compile(r"^\| \[([^\]]+)\]\(([^)]+\.md)\)", re.M)
# Page: title, page of docs/ that shows its use, and what it documents; None for the names of the package itself.
REFERENCE = {
    "xfresearch": ("import xfresearch as xf", "inside", None),
    "surgery": ("Surgery", "surgery", ("surgery.converting.convert", "surgery.registry.chain", "surgery.refused")),
    "analysis": ("Analyses", "anatomy", ("analysis",)),
    "editing": ("Editing", "editing", ("editing",)),
    "studies": ("Studies", "studies", ("studies", "studies.report", "studies.statistics")),
}


def pages() -> dict[str, str]:
    """Every page of the site with its text: {path: Markdown}."""
    found = {str(file.relative_to(DOCS)): file.read_text() for file in sorted(DOCS.rglob("*.md"))}
    found = {page: _linked(text, f"docs/{page}", page) for page, text in found.items()}
    readme = (ROOT / "README.md").read_text().replace('src="docs/', 'src="')
    found[START] = _linked(readme, "README.md", START)
    return found | {VALUES: _values()} | {f"reference/{name}.md": _reference(name) for name in REFERENCE}


def navigation() -> list[dict]:
    """The tabs, as mkdocs.yml has them."""
    _, *parts = SECTION.split((DOCS / "index.md").read_text())
    sections = zip(parts[::2], parts[1::2], strict=True)
    tabs = {title: found for title, text in sections if (found := [{name: to} for name, to in ROW.findall(text)])}
    tabs["Start"].insert(0, {"From nothing to a report": START})
    reference = [{title: f"reference/{name}.md"} for name, (title, _, _) in REFERENCE.items()]
    reference.append({"Layouts, norms and kinds": VALUES})
    return [{"Home": "index.md"}, *({title: each} for title, each in tabs.items()), {"Reference": reference}]


def repository() -> str:
    """The address of the repository in pyproject.toml; '' if it names none."""
    urls = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"].get("urls", {})
    return urls.get("Repository", "").rstrip("/")


def face() -> list[str]:
    """Where the public names of the package are: 'loading.load' for xf.load."""
    tree = ast.parse((ROOT / "xfresearch" / "__init__.py").read_text())
    assigned = {ast.unparse(node.targets[0]): node.value for node in tree.body if isinstance(node, ast.Assign)}
    return [f"{module}.{name}" for name, module in ast.literal_eval(assigned["_HOMES"]).items()]


def _values() -> str:
    """The tables of docs/models.md that are made of the code."""
    made = re.findall(r"^<!-- made: (\S+) -->\n\n(\| `.*?)\n<!-- end -->", (DOCS / "models.md").read_text(), re.M | re.S)
    parts = [f"## {option}\n\n{table}" for option, table in made if option != "drawings"]
    return "\n".join(["# Layouts, norms and kinds\n\nHow they are used is in [models](../models.md).\n", *parts])


def _reference(name: str) -> str:
    title, page, objects = REFERENCE[name]
    text = f"# {title}\n\n`from xfresearch import {name}`: " if objects else f"# {title}\n\n"
    text += "each conversion is also a function, `surgery.NAME(lm, layers=None, ...)`. " if name == "surgery" else ""
    parts = [f"::: xfresearch.{each}" for each in objects or face()]
    return "\n\n".join([f"{text}How they are used is in [{page}](../{page}.md).", *parts]) + "\n"


def _linked(text: str, source: str, page: str) -> str:
    """The text of `source`, a path in the repository, with links that are right on `page` of the site."""

    def target(found: re.Match) -> str:
        picture, words, to, anchor = found[1], found[2], found[3], found[4] or ""
        path = posixpath.normpath(posixpath.join(posixpath.dirname(source), to))
        on_site = START if path == "README.md" else path.removeprefix("docs/") if path.endswith(SHOWN) else ""
        if on_site and (path == "README.md" or path.startswith("docs/")):
            return f"{picture}[{words}]({posixpath.relpath(on_site, posixpath.dirname(page) or '.')}{anchor})"
        return f"[{words}]({repository()}/blob/main/{path})" if repository() else words

    return LINK.sub(target, text)


def main() -> None:
    shutil.rmtree(SITE, ignore_errors=True)
    for file in DOCS.rglob("*"):
        if file.suffix in SHOWN[1:]:
            to = SITE / "source" / file.relative_to(DOCS)
            to.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(file, to)
    for page, text in pages().items():
        to = SITE / "source" / page
        to.parent.mkdir(parents=True, exist_ok=True)
        to.write_text(text)
    config = {"INHERIT": "../docs/mkdocs.yml", "nav": navigation(), "repo_url": repository() or None}
    config["plugins"] = {"mkdocstrings": {"handlers": {"python": {"paths": [str(ROOT)]}}}}
    (SITE / "mkdocs.yml").write_text(json.dumps(config, indent=1))  # JSON is YAML


if __name__ == "__main__":
    main()
