"""Folders of a tiny Llama, whole ones and a copy to damage."""

import shutil
from pathlib import Path

import pytest

from tests.tiny_runs import tiny_model


@pytest.fixture(scope="session")
def whole(tmp_path_factory) -> Path:
    """A folder of a tiny Llama, in one file."""
    path = tmp_path_factory.mktemp("folders") / "whole"
    tiny_model("llama").export_hf(path)
    return path


@pytest.fixture(scope="session")
def sharded(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("folders") / "sharded"
    tiny_model("llama").export_hf(path, shard_bytes=50_000)
    assert len(list(path.glob("*.safetensors"))) > 3
    return path


@pytest.fixture
def folder(whole, tmp_path) -> Path:
    return shutil.copytree(whole, tmp_path / "m")
