"""The wheel: it has every file that the package needs, and its command works in an empty directory, without the checkout."""

import json
import os
import re
import shutil
import subprocess
import sys
import zipfile
from email import message_from_string
from pathlib import Path

import pytest

from tests.cpu_time import cpu_seconds
from xfresearch import __version__
from xfresearch.__main__ import COMMANDS
from xfresearch.run_config import known_keys
from xfresearch.run_config.config import Config

ROOT = Path(__file__).parent.parent
FOLDER = f"xfresearch-{__version__}.dist-info"
OWN = """\
from xfresearch.configs import common


def get_config(size="tiny"):
    config = common.base(size)
    config.seed, config.log.sample = 7, common.__file__
    return config
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    """The wheel of this checkout, built from a copy, without a network."""
    tree, folder = tmp_path_factory.mktemp("tree"), tmp_path_factory.mktemp("dist")
    for name in ("requirements.txt", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tree)
    for name in ("xfresearch", "configs", "requirements"):
        shutil.copytree(ROOT / name, tree / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    known_keys.write(Config(), tree / known_keys.OF_WHEEL.relative_to(ROOT))  # as `make wheel`
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(folder), str(tree)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    (built,) = folder.iterdir()
    return built


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory):
    """Runs `xfresearch ARGUMENTS` of the installed wheel in an empty directory. All dependencies are those of the tests."""
    target, here = tmp_path_factory.mktemp("installed"), tmp_path_factory.mktemp("empty")
    pip = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-index", "--no-compile", "--target", str(target)]
    subprocess.run([*pip, str(wheel)], check=True, stderr=subprocess.DEVNULL)
    environment = {**os.environ, "PYTHONPATH": str(target), "XFRESEARCH_CACHE": str(here / "cache")}

    def run(*arguments: str, code: int = 0) -> subprocess.CompletedProcess:
        command = [str(target / "bin" / "xfresearch"), *arguments]
        done = subprocess.run(command, cwd=here, env=environment, capture_output=True, text=True)
        assert done.returncode == code, done.stdout + done.stderr
        return done

    run.here, run.target = here, target
    return run


def test_it_has_every_file_of_the_package_and_the_configs(wheel):
    """Also one of a kind that pyproject.toml does not name yet."""
    names = {name for name in zipfile.ZipFile(wheel).namelist() if not name.startswith(FOLDER)}
    files = {*(ROOT / "xfresearch").rglob("*"), *(ROOT / "xfresearch" / "configs").rglob("*")}
    wanted = {file.relative_to(ROOT).as_posix() for file in files if file.is_file() and "__pycache__" not in file.parts}
    assert names == wanted | {"xfresearch/run_config/keys.json"}
    assert {"xfresearch/configs/studies/w_o.py", "xfresearch/data/fact_words.toml"} <= names
    assert any(name.endswith(".jinja") for name in names)


def test_its_metadata_are_whole_and_its_requirements_are_those_of_the_files(wheel):
    with zipfile.ZipFile(wheel) as archive:
        data = message_from_string(archive.read(f"{FOLDER}/METADATA").decode())
        assert f"{FOLDER}/licenses/LICENSE" in archive.namelist()
    assert data["Version"] == __version__ and data["License-Expression"] == "Apache-2.0"
    assert "# xfresearch" in data.get_payload() and data["Summary"] and data["Requires-Python"] == ">=3.11"
    assert {each.split(",")[0] for each in data.get_all("Project-URL")} >= {"Repository", "Changelog", "Issues"}
    assert set(data.get_all("Provides-Extra")) == {"gpu", "tpu", "eval", "cloud", "notebook", "trackers"}
    for extra in ("", *data.get_all("Provides-Extra")):
        file = ROOT / (f"requirements/{extra}.txt" if extra else "requirements.txt")
        lines = [line.split("#")[0].strip() for line in file.read_text().splitlines()]
        given = [each for each in data.get_all("Requires-Dist") if ("extra ==" in each) == bool(extra)]
        given = [each for each in given if not extra or f'extra == "{extra}"' in each]
        assert len(given) == len([line for line in lines if line]) > 0, extra
        for line in filter(None, lines):
            name = re.match(r"[\w.-]+(\[\w+\])?", line)[0]
            assert any(each.startswith(name) for each in given), line


def test_the_first_typo_after_an_installation_is_answered_before_jax_is_imported(installed):
    before = cpu_seconds()
    error = installed("train", "--config=gpt2:tiny", "--config.model.widht=64", code=2).stderr
    assert error.startswith("error: config.model.widht=64: there is no key 'widht'; did you mean 'width'?")
    assert cpu_seconds() - before < 0.5 and not (installed.here / "cache").exists()


def test_its_command_reads_shipped_configs_and_files_of_the_user_in_an_empty_directory(installed):
    (installed.here / "own.py").write_text(OWN)
    assert all(f"  xfresearch {name}" in installed("--help").stdout for name in COMMANDS)
    assert "gpt2" in installed("configs").stdout
    config = json.loads(installed("train", "--config", "own.py", "--print-config").stdout)
    assert config["seed"] == 7 and config["model"]["width"] == 32
    assert config["log"]["sample"] == str(installed.target / "xfresearch" / "configs" / "common.py")
    error = installed("train", "--config", "gtp2:tiny", code=2).stderr
    assert error.startswith("error: --config=gtp2:tiny: there is no such file; did you mean 'gpt2:tiny'?")


@pytest.mark.long
def test_it_trains_evaluates_generates_and_analyses_in_an_empty_directory(installed):
    (installed.here / "own.py").write_text(OWN)
    trained = installed("train", "--config", "quickstart", "--config.steps=5", "--workdir", "runs/quickstart")
    assert "warning: config.optimizer.warmup=20 is longer than the run of 5 updates" in trained.stderr
    assert "per parameter (usual for new parameters: 20)" in trained.stderr
    assert "\nevaluate     xfresearch evaluate --workdir runs/quickstart\n" in trained.stdout
    run = ("--workdir", "runs/quickstart")
    assert "bits/byte" in installed("evaluate", *run, "--limit", "20").stdout
    assert installed("generate", *run, "--prompt", "def main(", "--max-new-tokens", "8").stdout.startswith("def main(")
    installed("analyze", "lens", *run, "--count", "2")
    assert (installed.here / "runs" / "quickstart" / "analysis" / "lens" / "report.html").exists()
    assert (installed.here / "runs" / "quickstart" / "report.html").exists()
    installed("train", "--config", "own.py:tiny", "--config.steps=2", "--workdir", "runs/own")
    assert json.loads((installed.here / "runs" / "own" / "config.json").read_text())["seed"] == 7
    planned = installed("study", "--config", "studies/w_o:tiny", "--workdir", "studies/w_o", "--plan").stdout
    assert planned.startswith("question   Is W_O redundant")
