"""requirements/lock.txt pins everything that the cloud machines install, for every supported Python."""

import re

from tests.launch.stand_ins import ROOT

NAME = re.compile(r"([A-Za-z0-9_.-]+)(?:\[.*\])?\s*([<>=!~].*?)?\s*(?:#.*)?$")


def names(text: str) -> set[str]:
    lines = [line for line in text.splitlines() if line and not line.startswith(("#", " ", "-"))]
    return {re.sub("[-_.]+", "-", NAME.match(line.split(";")[0])[1]).lower() for line in lines}


def test_every_requirement_has_an_exact_version():
    lock = (ROOT / "requirements/lock.txt").read_text()
    files = ("requirements.txt", "requirements/cloud.txt", "requirements/eval.txt")
    wanted = set().union(*(names((ROOT / file).read_text()) for file in files))
    assert wanted <= names(lock), "run `make lock`"
    pinned = [line for line in lock.splitlines() if line and not line.lstrip().startswith("#")]
    assert all(re.match(r"[a-z0-9-]+(\[.*\])?==\S+( ; .*)?$", line) for line in pinned)
    assert "://" not in lock


def test_the_machines_install_the_versions_of_the_lock():
    for script in ("tpu_vm.sh", "Dockerfile"):
        text = (ROOT / "launch" / script).read_text()
        assert "requirements/cloud.txt" in text and re.search(r"(-c|--constraint) requirements/lock.txt", text), script
