"""What the launch scripts print is what docs/data/tables/launch_output.md has, and each event ends as it should."""

import re

import pytest

from tests.launch import transcripts


@pytest.mark.parametrize("event", transcripts.EVENTS, ids=lambda event: event.title)
def test_the_page_has_what_the_script_prints(event, tmp_path):
    said, code, verbs = transcripts.play(event, tmp_path)
    assert code == event.code, said
    page = transcripts.PAGE.read_text()
    found = re.search(rf"^## {re.escape(event.title)}\n\n```text\n(.*?)\n```$", page, re.M | re.S)
    assert (found[1] if found else "") == said, "python -m tests.launch.transcripts"
