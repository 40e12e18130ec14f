"""Folders with a tied tensor under another one of its names, or marks of a version: logits equal those of `transformers`."""

import numpy as np
import pytest

from tests.parity.weights import MISSING
from tests.tolerances import TOLERANCE, relative_error

torch = pytest.importorskip("torch", reason=MISSING.format("torch"))
transformers = pytest.importorskip("transformers", reason=MISSING.format("transformers"))

import xfresearch as xf  # noqa: E402
from tests.interop import forms, record  # noqa: E402
from xfresearch.models.sources import padded  # noqa: E402

pytestmark = pytest.mark.parity


@pytest.mark.parametrize("form", forms.FORMS)
def test_logits_equal_those_of_transformers(form, tmp_path):
    name, _ = forms.FORMS[form]
    folder = forms.write(form, tmp_path / name)
    kinds = {**dict.fromkeys(record.MASKED, record.masked_outputs), **dict.fromkeys(record.PAIRS, record.pair_outputs)}
    theirs = kinds.get(name, record.outputs)(name, folder)
    given = {"source": padded(record.sources(name))} if name in record.PAIRS else {}
    if name in record.MASKED:
        given = {"segments_BL": theirs["segments"], "token_types_BL": theirs["types"]}
    ours = np.asarray(xf.load(folder)(theirs["tokens"], **given))
    real = theirs.get("segments", np.ones_like(theirs["tokens"])) > 0
    assert relative_error(ours[real], theirs["logits"][real]) < TOLERANCE["float32"]
