from pathlib import Path

import pytest

from xfresearch.options.run_options import DataConfig
from xfresearch.run_config.config import Config

SHARED = Path(__file__).parents[3] / "shared" / "data"


def shared(name: str) -> Path:
    """A file of real data, which is not part of the repository. Skips the test if it is missing."""
    if not (SHARED / name).exists():
        pytest.skip(f"real data {name} is not in ../shared/data")
    return SHARED / name


@pytest.fixture(scope="session")
def stdlib_cache(tmp_path_factory) -> str:
    return str(tmp_path_factory.mktemp("stdlib-cache"))


@pytest.fixture
def make_config(tmp_path):
    """make_config(sequence_length=..., batch_size=..., seed=..., **fields of DataConfig)"""

    def make(sequence_length=16, batch_size=4, seed=0, **data) -> Config:
        data.setdefault("cache_dir", str(tmp_path / "cache"))
        if "corpus" in data:
            data["corpus"] = tuple([data["corpus"]] if isinstance(data["corpus"], str) else data["corpus"])
        return Config(seed=seed, sequence_length=sequence_length, batch_size=batch_size, data=DataConfig(**data))

    return make


@pytest.fixture
def text_dir(tmp_path):
    """text_dir({name: str or bytes}) writes the files and returns `text_files:` + their directory."""

    def make(files: dict, name="texts") -> str:
        for file, content in files.items():
            path = tmp_path / name / file
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return f"text_files:{tmp_path / name}"

    return make
