"""A tied tensor under another one of its names, and marks of a version (forms.py)."""

import shutil

import numpy as np
import pytest
from safetensors.numpy import load_file

import xfresearch as xf
from tests.interop import forms
from tests.interop.edits import WEIGHTS, edit_tensors
from tests.interop.folders import assert_same_tensors
from tests.interop.record import RECORDED
from xfresearch.models.sources import padded

SOURCE = {name: {"source": padded([[4, 5, 6], [7, 8]])} for name in ("t5", "bart")}


def logits(folder) -> np.ndarray:
    return np.asarray(xf.load(folder)([[1, 2, 3], [4, 3, 2]], **SOURCE.get(folder.name, {})))


@pytest.mark.parametrize("form", [form for form in forms.FORMS if "another head" not in form])
def test_a_tied_tensor_is_read_under_each_of_its_names(form, tmp_path):
    """The export has the usual names."""
    name, _ = forms.FORMS[form]
    folder = forms.write(form, tmp_path / name)
    assert load_file(folder / WEIGHTS).keys() != load_file(RECORDED / name / WEIGHTS).keys()
    assert np.array_equal(logits(folder), logits(RECORDED / name))
    xf.load(folder).export_hf(tmp_path / "out")
    assert_same_tensors(tmp_path / "out", RECORDED / name)


def test_another_head_is_kept_where_the_table_has_another_name(tmp_path):
    folder = forms.write("t5: a table in each stack, another head", tmp_path / "t5")
    usual = shutil.copytree(folder, tmp_path / "usual" / "t5")
    edit_tensors(usual, lambda tensors: tensors.update({"shared.weight": tensors[forms.TABLES[0]]}))
    assert not xf.load(folder).config.tie_embeddings
    assert np.array_equal(logits(folder), logits(usual)) and not np.array_equal(logits(folder), logits(RECORDED / "t5"))


@pytest.mark.parametrize("form", ["t5: a table in each stack", "bart: a table in each stack"])
def test_tables_that_differ_are_refused_also_where_the_shared_one_is_missing(form, tmp_path):
    folder = forms.write(form, tmp_path / "m")
    name = next(name for name in load_file(folder / WEIGHTS) if name.endswith(forms.TABLES[1]))
    edit_tensors(folder, lambda tensors: tensors.update({name: 2 * tensors[name]}))
    both = f"tensors {name} and {name.replace('decoder', 'encoder')} differ: a stack with a table of its own is not supp"
    with pytest.raises(xf.UserError, match=both):
        xf.load(folder)


def test_a_table_that_is_nowhere_is_missing(tmp_path):
    folder = shutil.copytree(RECORDED / "t5", tmp_path / "t5")
    edit_tensors(folder, lambda tensors: tensors.pop("shared.weight"))
    with pytest.raises(xf.UserError, match="tensor shared.weight is missing"):
        xf.load(folder)
