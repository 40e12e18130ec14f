"""The recording that the default suite compares with (tests/interop/record.py) is what `transformers` says now."""

import numpy as np
import pytest

from tests.parity.weights import MISSING

pytest.importorskip("torch", reason=MISSING.format("torch"))
pytest.importorskip("transformers", reason=MISSING.format("transformers"))

from safetensors.numpy import load_file  # noqa: E402

from tests.interop.folders import assert_same_tensors  # noqa: E402
from tests.interop.record import MODELS, RECORDED, said  # noqa: E402
from tests.parity import hf_torch  # noqa: E402
from tests.tolerances import TOLERANCE, relative_error  # noqa: E402

pytestmark = pytest.mark.parity


@pytest.mark.parametrize("name", MODELS)
def test_recording_is_what_transformers_says(name, tmp_path):
    recorded, now = load_file(RECORDED / f"{name}.safetensors"), said(name, RECORDED / name)
    assert recorded.keys() == now.keys()
    assert relative_error(recorded.pop("logits"), now.pop("logits")) < TOLERANCE["float32"]
    assert all(np.array_equal(recorded[what], now[what]) for what in now)
    hf_torch.read(RECORDED / name, "float32").save_pretrained(tmp_path)
    assert_same_tensors(tmp_path, RECORDED / name)
