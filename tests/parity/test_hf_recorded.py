"""The recording for the default test suite (tests/interop/record.py) equals the present outputs of `transformers`."""

import numpy as np
import pytest

from tests.parity.weights import MISSING

pytest.importorskip("torch", reason=MISSING.format("torch"))
pytest.importorskip("transformers", reason=MISSING.format("transformers"))

from safetensors.numpy import load_file  # noqa: E402

from tests.interop.folders import assert_same_tensors, tensors  # noqa: E402
from tests.interop.record import MODELS, RECORDED, TRAINED, outputs, train  # noqa: E402
from tests.parity import hf_torch  # noqa: E402
from tests.tolerances import TOLERANCE, relative_error  # noqa: E402

pytestmark = pytest.mark.parity


@pytest.mark.parametrize("name", MODELS)
def test_recorded_outputs_are_current(name, tmp_path):
    recorded = load_file(RECORDED / f"{name}.safetensors")
    now = outputs(name, RECORDED / name)
    assert recorded.keys() == now.keys()
    assert relative_error(recorded.pop("logits"), now.pop("logits")) < TOLERANCE["float32"]
    assert all(np.array_equal(recorded[key], now[key]) for key in now)
    hf_torch.read(RECORDED / name, "float32").save_pretrained(tmp_path)
    assert_same_tensors(tmp_path, RECORDED / name)


@pytest.mark.parametrize("name", TRAINED)
def test_recorded_training_is_current(name, tmp_path):
    train(name, tmp_path)
    recorded = RECORDED / "trained" / name
    assert_same_tensors(tmp_path / "before", recorded / "before")
    now = tensors(tmp_path / "after")
    then = tensors(recorded / "after")
    assert now.keys() == then.keys()
    assert all(relative_error(now[tensor], then[tensor]) < TOLERANCE["float32"] for tensor in then)
    losses = (load_file(folder / "losses.safetensors")["losses"] for folder in (tmp_path, recorded))
    assert relative_error(*losses) < TOLERANCE["float32"]
