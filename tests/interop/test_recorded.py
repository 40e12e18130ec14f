"""Folders that `transformers` wrote, and what it said of them (record.py): read, run, and written again."""

import numpy as np
import pytest
from safetensors.numpy import load_file

import xfresearch as xf
from tests.interop.folders import assert_same_tensors, choices, greedy
from tests.interop.record import CONTINUATION, MODELS, PROMPT, RECORDED
from tests.tolerances import TOLERANCE, relative_error


@pytest.fixture(scope="module", params=MODELS)
def name(request) -> str:
    return request.param


@pytest.fixture(scope="module")
def said(name) -> dict:
    return load_file(RECORDED / f"{name}.safetensors")


@pytest.fixture(scope="module")
def lm(name):
    return xf.load(RECORDED / name)


def test_logits_are_those_of_transformers(lm, said):
    assert 0.5 < np.abs(said["logits"]).max() < 50
    assert relative_error(lm(said["tokens"]), said["logits"]) < TOLERANCE["float32"]


def test_greedy_continuation_is_that_of_transformers(lm, said):
    assert np.array_equal(greedy(lm, said["tokens"][:, :PROMPT], CONTINUATION), said["greedy"])


def test_router_chooses_the_experts_that_it_does_in_transformers():
    lm, said = xf.load(RECORDED / "mixtral"), load_file(RECORDED / "mixtral.safetensors")
    assert np.array_equal(choices(lm, said["tokens"], said["choices"].shape[-1]), said["choices"])


def test_export_writes_the_same_folder(lm, name, said, tmp_path):
    lm.export_hf(tmp_path / name)
    assert_same_tensors(tmp_path / name, RECORDED / name)
    again = xf.load(tmp_path / name)
    assert np.array_equal(again(said["tokens"]), lm(said["tokens"]))
