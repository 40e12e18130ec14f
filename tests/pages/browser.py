"""Opens pages in headless Chromium: what a reader's browser makes of them, and what it complains about."""

import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
FLAGS = ("--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--enable-logging=stderr", "--dump-dom")
OFFLINE = "--host-resolver-rules=MAP * ~NOTFOUND"


class Page(HTMLParser):
    """An open page: its elements, links and visible text, and the lines of the browser's console."""

    def __init__(self, dom: str, console: list[str]):
        super().__init__()
        self.console = console
        self.tags: list[str] = []
        self.links: list[str] = []
        self.loads: list[str] = []  # addresses that the page loads by itself
        self.text = ""
        self.inside = ""
        self.feed(dom)

    def handle_starttag(self, tag, attrs):
        values = dict(attrs)
        self.tags.append(tag)
        self.inside = tag
        if tag == "a" and "href" in values:
            self.links.append(values["href"])
        elif listed := [values[name] for name in ("src", "href", "xlink:href", "data", "poster") if name in values]:
            self.loads += [address for address in listed if not address.startswith("#")]

    def handle_data(self, data):
        self.text += "" if self.inside == "style" else data


def opened(path: Path, profile: Path) -> Page:
    """The page at `path`, in a browser without a network. Skips the test if there is no browser."""
    browser = next(filter(None, map(shutil.which, NAMES)), None)
    if browser is None:
        pytest.skip(f"none of {', '.join(NAMES)} is installed")
    command = [browser, *FLAGS, OFFLINE, f"--user-data-dir={profile}", path.absolute().as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    if done.returncode:
        pytest.skip(f"{browser} does not run here: {done.stderr.strip().splitlines()[-1:]}")
    return Page(done.stdout, re.findall(r"CONSOLE.*", done.stderr))
