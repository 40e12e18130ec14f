"""Hugging Face folders of a tiny Llama: in one file, in several, and a copy that a test may damage."""

import shutil
from pathlib import Path

import pytest

from tests.tiny_runs import tiny_model


@pytest.fixture(scope="session")
def whole(tmp_path_factory) -> Path:
    """A folder of a tiny Llama, with one safetensors file."""
    path = tmp_path_factory.mktemp("folders") / "whole"
    tiny_model("llama").export_hf(path)
    return path


@pytest.fixture(scope="session")
def sharded(tmp_path_factory) -> Path:
    """A folder of a tiny Llama, with several safetensors files."""
    path = tmp_path_factory.mktemp("folders") / "sharded"
    tiny_model("llama").export_hf(path, shard_bytes=50_000)
    assert len(list(path.glob("*.safetensors"))) > 3
    return path


@pytest.fixture
def folder(whole, tmp_path) -> Path:
    """A copy of `whole` that a test may change."""
    return shutil.copytree(whole, tmp_path / "m")
