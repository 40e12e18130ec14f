"""The recording that the default suite compares with (tests/interop/record.py) is what `transformers` says now."""

import numpy as np
import pytest

from tests.parity.weights import MISSING

pytest.importorskip("torch", reason=MISSING.format("torch"))
pytest.importorskip("transformers", reason=MISSING.format("transformers"))

from safetensors.numpy import load_file  # noqa: E402

from tests.interop.folders import assert_same_tensors, tensors  # noqa: E402
from tests.interop.record import MODELS, RECORDED, TRAINED, said, train  # noqa: E402
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


@pytest.mark.parametrize("name", TRAINED)
def test_training_is_what_transformers_makes_of_it(name, tmp_path):
    train(name, tmp_path)
    recorded = RECORDED / "trained" / name
    assert_same_tensors(tmp_path / "before", recorded / "before")
    now, then = tensors(tmp_path / "after"), tensors(recorded / "after")
    assert now.keys() == then.keys()
    assert all(relative_error(now[tensor], then[tensor]) < TOLERANCE["float32"] for tensor in then)
    losses = (load_file(folder / "losses.safetensors")["losses"] for folder in (tmp_path, recorded))
    assert relative_error(*losses) < TOLERANCE["float32"]
